"""Classifies single images: `predict`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from zoo.data.classes import class_names
from zoo.data.sources.scan import find_images
from zoo.data.transforms.classification import ValTransform
from zoo.engine._process import Process
from zoo.errors import ConfigError, DataError, join_names
from zoo.registry.load_network import LoadedNetwork, as_loaded
from zoo.run.console import Progress, console, environment_rank
from zoo.run.scoring import single_process
from zoo.tasks.prediction import BATCH_SIZE, DEFAULT_TOP
from zoo.tasks.prediction import predict as predict_files

ImagePath = str | os.PathLike[str]


@dataclass(frozen=True)
class ClassProbability:
    """A class of an image: its index, its name, and its probability (0 to 1)."""

    index: int
    name: str
    probability: float


class ImagePrediction(NamedTuple):
    """The most likely classes of one image, best first."""

    path: str
    classes: tuple[ClassProbability, ...]


def predict(
    network: LoadedNetwork | ImagePath,
    images: ImagePath | Iterable[ImagePath],
    *,
    weights: ImagePath | None = None,
    top: int = DEFAULT_TOP,
    process: Process | None = None,
    verbose: bool = True,
) -> list[ImagePrediction]:
    """Return the most likely classes of each image.

    >>> import zoo
    >>> for path, classes in zoo.predict("runs/mine/checkpoint.pth.tar", "data/val/class0", top=1):
    ...     print(path, classes[0].name in ("class0", "class1"))
    data/val/class0/0.png True
    data/val/class0/2.png True
    data/val/class0/4.png True
    data/val/class0/6.png True

    Args:
    - `network`: a name as `zoo.load_network` takes it, or its result, whose model is moved to the device of
      ``process``.
    - `images`: image files, and folders, which are searched recursively; one, or several.
    - `weights`: weights file or published name; default: the weights of ``network``.
    - `top`: number of classes per image.
    - `process`: this process; default: a single one, on a CUDA device if available.
    - `verbose`: whether progress and warnings are shown.

    Raises ConfigError for a network that segments, and DataError for images that cannot be read.
    """
    predictions, faults = predict_each(network, images, weights=weights, top=top, process=process, verbose=verbose)
    if faults:
        what = f"{len(faults)} of {len(faults) + len(predictions)} images could not be read ({join_names(faults, 3)})"
        raise DataError(what, remedy="correct the paths, or repair or remove the files")
    return predictions


def predict_each(
    network: LoadedNetwork | ImagePath,
    images: ImagePath | Iterable[ImagePath],
    *,
    weights: ImagePath | None = None,
    top: int = DEFAULT_TOP,
    process: Process | None = None,
    verbose: bool = True,
) -> tuple[list[ImagePrediction], list[str]]:
    """Return the results of `predict` for all readable images, and an error message for each other image."""
    if top < 1:
        raise ConfigError(f"top = {top}: give a number of classes of at least 1")
    with console(environment_rank() if process is None else process.rank, verbose):
        process = process or single_process()
        network = as_loaded(network, weights)
        if network.experiment.task == "segmentation":
            what = f"{network.title} predicts a class for each pixel, and predict returns classes of whole images"
            raise ConfigError(what, remedy="zoo segment, or zoo.segment, writes label maps and overlays")
        names = class_names(network.experiment.network.num_classes, network.class_names)
        settings = network.experiment.input
        transform = ValTransform(
            settings.scale_val, settings.crop_val, settings.mean, settings.std,
            interpolation=settings.interpolation_val, crop_mode=settings.crop_mode_val,
        )  # fmt: skip
        given = [images] if isinstance(images, (str, os.PathLike)) else list(images)
        # In the order of the arguments; files of a folder in the order of a data set.
        paths = [path for each in given for path in (find_images(Path(each)) if os.path.isdir(each) else [Path(each)])]
        with Progress("predict", math.ceil(len(paths) / BATCH_SIZE), show=process.is_main) as progress:
            found, faults = predict_files(network.model, paths, transform, process.device, top, progress.advance)
    predictions = [
        ImagePrediction(
            each.path,
            tuple(
                ClassProbability(index, names[index], value)
                for index, value in zip(each.classes, each.probabilities, strict=True)
            ),
        )
        for each in found
    ]
    return predictions, faults
