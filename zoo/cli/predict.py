"""``zoo predict``: print the best classes of each image."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.cli.options import Command, Positive, argument, option
from zoo.errors import DataError, escape

if TYPE_CHECKING:
    from zoo.run.predicting import ImagePrediction
    from zoo.tables import Cell

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Predict(Command):
    """Print the best classes of each image.

    Names unreadable images, continues with the others, and exits with code 2.
    """

    example = "zoo predict runs/mine/model_best.pth.tar cat.jpg"
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
        from zoo.engine._process import open_process
        from zoo.registry.load_network import load_network
        from zoo.run.predicting import predict_each

        with open_process() as process:
            network = load_network(self.name, self.weights)
            predictions, faults = predict_each(network, self.images, top=self.top, process=process)
        if not process.is_main:
            return 0
        if predictions:
            print(_as_json(network.title, predictions) if self.json else _as_table(predictions))
        for fault in faults:
            logger.warning("%s", fault)
        if faults:
            what = f"{len(faults)} of {len(faults) + len(predictions)} images could not be read, as listed above"
            raise DataError(what, remedy="correct the paths, or repair or remove the files")
        return 0


def _as_json(title: str, predictions: Sequence[ImagePrediction]) -> str:
    """Return JSON in ASCII. Bytes of a path that are not UTF-8 are Python's surrogates, \\udc80 to \\udcff."""
    entries = [
        {
            "network": title,
            "path": path,
            "predictions": [
                {"class": each.index, "name": each.name, "probability": each.probability} for each in classes
            ],
        }
        for path, classes in predictions
    ]
    return json.dumps(entries, indent=2)


def _as_table(predictions: Sequence[ImagePrediction]) -> str:
    from zoo.tables import markdown_table

    rows: list[list[Cell]] = []
    for path, classes in predictions:
        best: list[list[Cell]] = [[each.index, escape(each.name), 100 * each.probability] for each in classes]
        rows += [[None if place else escape(path), *cells] for place, cells in enumerate(best)]
    return markdown_table(["image", "class", "name", "probability %"], rows)
