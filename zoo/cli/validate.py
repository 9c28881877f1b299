"""``zoo validate``: score weights on a folder of images, by a published protocol or any crop."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from zoo.cli.options import (
    Command,
    DataFolder,
    DataOptions,
    Positive,
    ProcessOptions,
    argument,
    check_writable,
    option,
    positive,
)
from zoo.config.limits import CropMode, Interpolation
from zoo.data.sources.location import DataName, require_local
from zoo.errors import ConfigError, join_names
from zoo.tasks.protocols import PROTOCOLS, WHOLE_IMAGES, CropProtocol, center_crop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zoo.engine._process import Process
    from zoo.registry.load_network import LoadedNetwork
    from zoo.run.scoring import Scores
    from zoo.tasks.prediction import Prediction, PredictionCollector

SetName = Literal["imagenet-a", "imagenet-r", "imagenet-v2", "imagenet-sketch", "imagenet-real"]
# Field -> option, for classification only.
CLASSIFICATION_OPTIONS = {"crop": "--crop", "scale": "--scale", "ten_crops": "--ten-crops",
                          "interpolation": "--interpolation", "crop_mode": "--crop-mode", "set_name": "--set",
                          "batch_size": "--batch-size", "predictions": "--predictions"}  # fmt: skip
PROTOCOL_OPTIONS = ("crop", "scale", "ten_crops", "interpolation", "crop_mode")  # fixed by a published protocol


def scale(text: str) -> int:
    """Parse a size in px, or -1."""
    return -1 if text == "-1" else positive(text)


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(DataOptions, ProcessOptions):
    """Options for scoring weights, and for the files to write."""

    protocol: str | None = option(choices=[*PROTOCOLS, *WHOLE_IMAGES], metavar=None)
    """Published protocol. Classification: center224 and tencrop224 (shorter side 256), center320 (shorter side 320; the
    original project does not document it). Segmentation: whole (images at one scale), whole-flip (probabilities
    averaged with the mirrored image)."""
    crop: Positive | None = option("-c", metavar="PX")
    """Side of the crop (default: the experiment's crop_val)."""
    scale: Annotated[int, scale] | None = option("-s", metavar="PX")
    """Shorter side before the crop, -1 to keep the size (default: the experiment's scale_val)."""
    ten_crops: bool = option("--ten_crops", "--ten-crops", default=False)
    """Average the logits of the four corners, the center and their mirror images."""
    interpolation: Interpolation | None = None
    """Interpolation before the crop (default: the experiment's interpolation_val)."""
    crop_mode: CropMode | None = option()
    """Sides that are resized before the crop: the shorter side (center), or both sides (squash) (default: the
    experiment's crop_mode_val)."""
    batch_size: Positive | None = None
    """Images per batch and process (default: the experiment's batch size over the number of processes, a tenth of it
    for ten crops)."""
    limit: Positive | None = None
    """Score only N images, spread evenly over the data."""
    json: Path | None = None
    """Write the scores to FILE."""
    confusion: tuple[Path, ...] = option(metavar="FILE")
    """Write the confusion matrix to one or more files: with precision, recall and F1 of each class as .json or .csv, or
    as a picture (.png, .pdf, .svg)."""
    predictions: Path | None = None
    """Write a CSV file with one line per image, sorted by path: path, true class, and the top five classes with their
    probabilities."""


@dataclass(frozen=True, kw_only=True)
class Validate(Command, ScoreOptions):
    """Score weights on DATA/val."""

    example = "zoo validate runs/mine/model_best.pth.tar DATA"
    name: str = argument("NAME")
    """Network (zoo list), experiment, experiment file, checkpoint of zoo train, or hf-hub:OWNER/NAME."""
    data: DataFolder = argument("DATA")
    """Folder with val/: one folder per class, or images/ and labels/ for segmentation (see segmentation.layout); or
    shards, also by URL (https://, s3://, gs://); or a data set by name, torchvision:CIFAR10 or hf:NAME."""
    weights: Path | None = None
    """Weights file or published name (default: the weights of NAME)."""
    set_name: SetName | None = option("--set")
    """Variant of ImageNet in DATA: imagenet-a, imagenet-r, imagenet-v2 and imagenet-sketch as unpacked, imagenet-real
    with val/ and real.json. Its classes are matched to the outputs of the network."""
    default_crop: CropProtocol | None = field(default=None, metadata={"hidden": True})
    """Protocol of a classifier without options for it (default: the experiment's)."""

    def run(self) -> int:
        from zoo.engine._process import open_process
        from zoo.files import write_json
        from zoo.registry.load_network import load_network
        from zoo.run.confusion_files import check_matrix_file, write_matrix
        from zoo.run.label_images import names_of
        from zoo.tasks.prediction import PredictionCollector

        self._check_protocol()
        with open_process(self.dist_backend) as process:
            matrices = self.confusion or ()
            process.on_main(lambda: check_writable(self.json, self.predictions, *matrices))
            for path in matrices:
                check_matrix_file(path)
            network = load_network(self.name, self.weights)
            self._check_task(network)
            # The items of a data set by name have no folder.
            folder = Path() if isinstance(self.data, DataName) else self.data
            collector = PredictionCollector(folder) if self.predictions else None
            scores = self._score(network, process, collector)
            shares = process.gather(collector.predictions) if collector else []
            if process.is_main:
                print(scores.table)
                if self.json is not None:
                    write_json(self.json, scores.content)
                for path in matrices:
                    assert scores.result is not None
                    names = names_of(network.experiment, network.class_names)
                    write_matrix(path, scores.result, names, network.title)
                if self.predictions is not None:
                    _write_predictions(self.predictions, [line for share in shares for line in share])
        return 0

    def _check_protocol(self) -> None:
        given = [CLASSIFICATION_OPTIONS[name] for name in PROTOCOL_OPTIONS if getattr(self, name)]
        if self.protocol and given:
            what = f"--protocol {self.protocol} fixes how images are resized and cropped"
            raise ConfigError(what, "command line", f"leave out {join_names(given)}, or --protocol")
        if self.set_name and self.confusion:
            what = f"--set {self.set_name} scores variants of ImageNet's classes, which have no confusion matrix"
            raise ConfigError(what, "command line", "leave out --confusion")

    def _check_task(self, network: LoadedNetwork) -> None:
        from zoo.tasks.confusion import MAX_CLASSES

        given = [option for name, option in CLASSIFICATION_OPTIONS.items() if getattr(self, name)]
        if given and network.experiment.task == "segmentation":
            what = f"{network.title} segments images: they are scored whole and one at a time"
            raise ConfigError(what, "command line", f"leave out {join_names(given)}")
        num_classes = network.experiment.network.num_classes
        if self.confusion and num_classes > MAX_CLASSES:
            what = f"--confusion is for at most {MAX_CLASSES:,} classes, and {network.title} has {num_classes:,}"
            raise ConfigError(what, "command line", "leave out --confusion")

    def _score(self, network: LoadedNetwork, process: Process, record: PredictionCollector | None) -> Scores:
        from zoo.run.robustness import score_set
        from zoo.run.scoring import score_data

        options: dict[str, Any] = {
            "process": process,
            "workers": self.workers,
            "batch_size": self.batch_size,
            "limit": self.limit,
            "log_every": self.log_every,
            "record": record,
        }
        protocol = _protocol(self, network)
        if self.set_name is None:
            return score_data(network, self.data, protocol, **options)
        return score_set(network, require_local(self.data), self.set_name, protocol, **options)


def _write_predictions(path: Path, predictions: Sequence[Prediction]) -> None:
    """Write a CSV file with a header and one line per image, sorted by path.

    Probabilities have six decimals; further digits depend on the device's order of summation.
    """
    from zoo.files import write_text

    lines = sorted(predictions, key=lambda prediction: prediction.path)
    places = range(1, 1 + max((len(line.classes) for line in lines), default=0))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["path", "target", *(f"class{n}" for n in places), *(f"probability{n}" for n in places)])
    for line in lines:
        writer.writerow([line.path, line.target, *line.classes, *(f"{value:.6f}" for value in line.probabilities)])
    write_text(path, text.getvalue())


def _protocol(options: Validate, network: LoadedNetwork) -> CropProtocol | str | None:
    """Return the requested protocol, or None for the protocol of the experiment."""
    default = options.default_crop if network.experiment.task == "classification" else None
    if options.protocol or not any(getattr(options, name) for name in PROTOCOL_OPTIONS):
        name: str | None = options.protocol
        return name or default
    default = default or center_crop(network.experiment)
    return CropProtocol(
        options.scale or default.scale,
        options.crop or default.crop,
        options.ten_crops,
        options.interpolation or default.interpolation,
        options.crop_mode or default.crop_mode,
    )
