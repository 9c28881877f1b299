"""``zoo predict``: what a network sees in pictures, by class names."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.cli.options import positive
from zoo.errors import ConfigError

if TYPE_CHECKING:
    from zoo.engine.predict import Prediction

GRID_LINES = 3
PNG = ".png"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``predict``."""
    parser = commands.add_parser("predict", help="name what is in pictures")
    parser.add_argument(
        "name",
        metavar="NAME",
        help="a model or experiment (zoo list), an experiment file, or a checkpoint of zoo train",
    )
    parser.add_argument("images", metavar="IMAGE", type=Path, nargs="+", help="picture files")
    parser.add_argument("--weights", metavar="FILE", type=Path, help="weights (default: the published ones)")
    parser.add_argument(
        "--classes", metavar="PATH", type=Path,
        help="names of the classes: the folder with the class folders (DATA/train), or a text file with a name per "
        "line (default: those that the weights file knows, of ImageNet for 1000 classes, otherwise numbers)",
    )  # fmt: skip
    parser.add_argument("--top", type=positive, default=5, metavar="K", help="classes per picture (default: 5)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--grid", metavar="FILE", type=Path, help="draw the pictures and predictions into a .png file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the best classes of each picture, and draw the grid; returns 0."""
    if args.grid is not None and args.grid.suffix.lower() != PNG:
        raise ConfigError(f"{args.grid} is not called {PNG}; --grid: the grid is written as PNG")
    from zoo.cli.scoring import load_subject
    from zoo.data.classes import class_names
    from zoo.data.transforms import val_transform
    from zoo.engine.predict import predict
    from zoo.engine.process import open_process

    with open_process() as process:
        subject = load_subject(args.name, args.weights)
        names = class_names(subject.experiment.network.classes, args.classes, subject.class_names)
        settings = subject.experiment.input
        # The numbers of the model's pretrained_cfg, which a network built from an experiment file does not carry.
        transform = val_transform(settings.scale_val, settings.crop_val, settings.mean, settings.std)
        predictions = predict(subject.model, args.images, transform, process.device, args.top)
    if not process.is_main:
        return 0
    if args.grid is not None:
        _draw(args.grid, predictions, names)
    print(_as_json(subject.title, predictions, names) if args.json else _as_table(predictions, names))
    return 0


def _as_json(title: str, predictions: Sequence[Prediction], names: Sequence[str]) -> str:
    entries = [{"network": title, "path": found.path, "predictions": _named(found, names)} for found in predictions]
    return json.dumps(entries, indent=2)


def _named(prediction: Prediction, names: Sequence[str]) -> list[dict[str, Any]]:
    best = zip(prediction.classes, prediction.probabilities, strict=True)
    return [{"class": index, "name": names[index], "probability": value} for index, value in best]


def _as_table(predictions: Sequence[Prediction], names: Sequence[str]) -> str:
    from zoo.report.tables import markdown_table

    rows = [
        [found.path if place == 0 else None, entry["class"], entry["name"], 100 * entry["probability"]]
        for found in predictions
        for place, entry in enumerate(_named(found, names))
    ]
    return markdown_table(["picture", "class", "name", "probability %"], rows)


def _draw(path: Path, predictions: Sequence[Prediction], names: Sequence[str]) -> None:
    from zoo.data.reading import read_picture
    from zoo.report.grid import write_grid

    write_grid(path, [(read_picture(Path(found.path)), _lines(found, names)) for found in predictions])


def _lines(prediction: Prediction, names: Sequence[str]) -> list[str]:
    best = [f"{100 * entry['probability']:.1f} % {entry['name']}" for entry in _named(prediction, names)]
    return ["/".join(Path(prediction.path).parts[-2:]), *best[:GRID_LINES]]
