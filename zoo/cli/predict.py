"""``zoo predict``: print the best classes of each image."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.cli.options import Command, Positive, argument, option
from zoo.errors import ConfigError, DataError, escape

if TYPE_CHECKING:
    from zoo.tables import Cell
    from zoo.tasks.prediction import Prediction

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Predict(Command):
    """Print the best classes of each image.

    Unreadable images are named, the others get their results, and the exit code is then 2.
    """

    name: str = argument("NAME")
    """Network (zoo list), experiment, experiment file, checkpoint of zoo train, or hf-hub:OWNER/NAME."""
    images: tuple[Path, ...] = argument("IMAGE")
    """Image files, and folders, which are searched recursively."""
    weights: Path | None = None
    """Weights file or published name (default: the published weights of NAME)."""
    top: Positive = option(default=5, metavar="K")
    """Classes per image."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        from zoo.data.classes import class_names
        from zoo.data.sources.scan import find_images
        from zoo.data.transforms.classification import ValTransform
        from zoo.engine.process import open_process
        from zoo.registry.load_network import load_network
        from zoo.run.console import Progress
        from zoo.tasks.prediction import BATCH_SIZE, predict

        # In the order of the arguments; files of a folder in the order of a data set.
        paths = [path for image in self.images for path in (find_images(image) if os.path.isdir(image) else [image])]
        with open_process() as process:
            network = load_network(self.name, self.weights)
            if network.experiment.task == "segmentation":
                raise ConfigError(
                    f"{network.title} predicts a class for each pixel, and zoo predict prints one per image",
                    "command line",
                    f"zoo segment {self.name} IMAGES OUT writes label maps and overlays",
                )
            names = class_names(network.experiment.network.num_classes, network.class_names)
            settings = network.experiment.input
            transform = ValTransform(
                settings.scale_val, settings.crop_val, settings.mean, settings.std,
                interpolation=settings.interpolation_val, crop_mode=settings.crop_mode_val,
            )  # fmt: skip
            with Progress("predict", math.ceil(len(paths) / BATCH_SIZE), show=process.is_main) as progress:
                predictions, faults = predict(
                    network.model, paths, transform, process.device, self.top, progress.advance
                )
        if not process.is_main:
            return 0
        if predictions:
            print(_as_json(network.title, predictions, names) if self.json else _as_table(predictions, names))
        for fault in faults:
            logger.warning("%s", fault)
        if faults:
            what = f"{len(faults)} of {len(paths)} images could not be read, as listed above"
            raise DataError(what, remedy="correct the paths, or repair or remove the files")
        return 0


def _as_json(title: str, predictions: Sequence[Prediction], names: Sequence[str]) -> str:
    """Return JSON in ASCII. Bytes of a path that are not UTF-8 are Python's surrogates, \\udc80 to \\udcff."""
    entries = [
        {"network": title, "path": prediction.path, "predictions": _named(prediction, names)}
        for prediction in predictions
    ]
    return json.dumps(entries, indent=2)


def _named(prediction: Prediction, names: Sequence[str]) -> list[dict[str, Any]]:
    best = zip(prediction.classes, prediction.probabilities, strict=True)
    return [{"class": index, "name": names[index], "probability": value} for index, value in best]


def _as_table(predictions: Sequence[Prediction], names: Sequence[str]) -> str:
    from zoo.tables import markdown_table

    rows: list[list[Cell]] = []
    for prediction in predictions:
        best = [
            [entry["class"], escape(entry["name"]), 100 * entry["probability"]] for entry in _named(prediction, names)
        ]
        rows += [[None if place else escape(prediction.path), *cells] for place, cells in enumerate(best)]
    return markdown_table(["image", "class", "name", "probability %"], rows)
