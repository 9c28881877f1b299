"""``zoo predict``: the best classes of each image, by name."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.cli.options import positive
from zoo.errors import MAX_LISTED, ConfigError, DataError, printable

if TYPE_CHECKING:
    from zoo.tables import Cell
    from zoo.tasks.prediction import Prediction

logger = logging.getLogger(__name__)

GRID_LINES = 3
GRID_IMAGES = 120
PNG = ".png"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``predict``."""
    parser = commands.add_parser("predict", help="print the best classes of each image")
    parser.add_argument(
        "name", metavar="NAME",
        help="a network (zoo list), the name of an experiment or its file, or a checkpoint of zoo train",
    )  # fmt: skip
    parser.add_argument(
        "images", metavar="IMAGE", type=Path, nargs="+",
        help="image files, and folders, which are searched with their sub-folders",
    )  # fmt: skip
    parser.add_argument("--weights", metavar="FILE", type=Path, help="weights (default: the published ones)")
    parser.add_argument(
        "--classes", metavar="PATH", type=Path,
        help="names of the classes: the folder with the class folders (DATA/train), or a text file with a name per "
        "line (default: those that the weights file knows, of ImageNet for 1000 classes, otherwise numbers)",
    )  # fmt: skip
    parser.add_argument("--top", type=positive, default=5, metavar="K", help="classes per image (default: 5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--grid", metavar="FILE", type=Path, help="draw the images and predictions into a .png file")
    parser.add_argument(
        "--on-bad-image", choices=("stop", "skip"), default="stop",
        help="images that cannot be read are named, and the others get their results; the exit code is then 2 (stop) "
        "or 0 (skip) (default: %(default)s)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the best classes of each image and draw the grid; returns 0. Raises DataError if images are left out."""
    if args.grid is not None and args.grid.suffix.lower() != PNG:
        raise ConfigError(f"{printable(args.grid)} is not called {PNG}; --grid: the grid is written as PNG")
    from zoo.data.classes import class_names
    from zoo.data.scan import find_images
    from zoo.data.transforms import ValTransform
    from zoo.engine.process import open_process
    from zoo.run.console import Progress
    from zoo.run.scoring import load_network
    from zoo.tasks.prediction import BATCH_SIZE, predict

    # The files of all arguments in their order, those of a folder in the order of a data set.
    paths = [path for image in args.images for path in (find_images(image) if os.path.isdir(image) else [image])]
    with open_process() as process:
        network = load_network(args.name, args.weights)
        if network.experiment.task == "segmentation":
            raise ConfigError(
                f"{network.title} gives each pixel a class, and zoo predict prints one for an image; command line: "
                f"zoo segment {args.name} IMAGES OUT writes label maps and overlays"
            )
        names = class_names(network.experiment.network.num_classes, args.classes, network.class_names)
        settings = network.experiment.input
        transform = ValTransform(settings.scale_val, settings.crop_val, settings.mean, settings.std)
        with Progress("predict", math.ceil(len(paths) / BATCH_SIZE), show=process.is_main) as progress:
            predictions, faults = predict(network.model, paths, transform, process.device, args.top, progress.advance)
    if not process.is_main:
        return 0
    if predictions:
        print(_as_json(network.title, predictions, names) if args.json else _as_table(predictions, names))
        if args.grid is not None:
            _draw(args.grid, predictions, names)
    _report(faults, len(paths), args.on_bad_image)
    return 0


def _report(faults: Sequence[str], num_images: int, on_bad_image: str) -> None:
    """Log which images were left out; DataError if there are no others, or if nobody asked to leave them out."""
    for fault in faults[:MAX_LISTED]:
        logger.warning("%s", fault)
    if len(faults) > MAX_LISTED:
        logger.warning("and %d more", len(faults) - MAX_LISTED)
    if len(faults) == num_images:
        raise DataError(f"none of {num_images} images could be used; they and the reasons are named above")
    if faults and on_bad_image == "stop":
        raise DataError(
            f"{len(faults)} of {num_images} images could not be used and are named above, the others have their "
            "results; mend or remove the files, or leave such images out with --on-bad-image skip"
        )
    if faults:
        logger.warning("%d of %d images are left out", len(faults), num_images)


def _as_json(title: str, predictions: Sequence[Prediction], names: Sequence[str]) -> str:
    """Return JSON in ASCII; a byte of a name that is no UTF-8 is written as Python has it, \\udc80 to \\udcff."""
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
            [entry["class"], printable(entry["name"]), 100 * entry["probability"]]
            for entry in _named(prediction, names)
        ]
        rows += [[None if place else printable(prediction.path), *cells] for place, cells in enumerate(best)]
    return markdown_table(["image", "class", "name", "probability %"], rows)


def _draw(path: Path, predictions: Sequence[Prediction], names: Sequence[str]) -> None:
    from zoo.data.reading import read_image
    from zoo.run.predictions import write_grid

    if len(predictions) > GRID_IMAGES:
        logger.warning("the grid shows the first %d of %d images; %s", GRID_IMAGES, len(predictions), printable(path))
    shown = predictions[:GRID_IMAGES]
    write_grid(path, [(read_image(Path(prediction.path)), _lines(prediction, names)) for prediction in shown])


def _lines(prediction: Prediction, names: Sequence[str]) -> list[str]:
    best = [f"{100 * entry['probability']:.1f} % {entry['name']}" for entry in _named(prediction, names)]
    return [printable(line) for line in ("/".join(Path(prediction.path).parts[-2:]), *best[:GRID_LINES])]
