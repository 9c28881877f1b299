"""Checking a data set before a run: reads all images, counts classes and sizes, and reports all faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from zoo.config import Experiment
from zoo.data.classes import check_same_classes
from zoo.data.folder import ImageDataset, ImageFolder
from zoo.data.label_maps import Split, find_labeled_images, read_pair
from zoo.data.loader import build_train_loader, build_val_loader
from zoo.data.location import DataPath, require_local
from zoo.data.prepare.output import ShowProgress
from zoo.data.reading import decode_as, load_rgb, read_many
from zoo.data.remote import Unreachable
from zoo.data.transforms import ValTransform
from zoo.errors import DataError, escape

SPLITS: tuple[Split, ...] = ("train", "val")


@dataclass
class SplitReport:
    """The content of one split.

    Args:
    - `split`: "train" or "val".
    - `classes`: names of the classes.
    - `num_images`: number of images, including faulty ones.
    - `sizes`: number of images of each (width, height).
    - `images`: number of images of each class, or with a pixel of it, (classes,) int64.
    - `pixels`: number of pixels of each class, and of void pixels at the end, (classes + 1,) int64. None for images
      without label maps.
    - `faults`: a message for each fault, with the names of the files.
    """

    split: Split
    classes: Sequence[str] = ()
    num_images: int = 0
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    images: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    pixels: np.ndarray | None = None
    faults: list[str] = field(default_factory=list)


class _Content(NamedTuple):
    """The (width, height) of an image, and its pixels of each class or its one-hot class."""

    size: tuple[int, int]
    counts: np.ndarray


def check_data(config: Experiment, data: DataPath, workers: int, show_progress: ShowProgress) -> list[SplitReport]:
    """Return a report on each split of ``data``, after reading all images as a run of ``config`` would.

    All faults are reported, with two exceptions: ConfigError is raised if ``config`` and the data set have different
    numbers of classes, and Unreachable if a server fails while images are read.

    Args:
    - `workers`: number of threads.
    - `show_progress`: (split, number of images) -> context manager, whose `advance` is called for each image.
    """
    if config.segmentation is None:
        return _check_folders(config, data, workers, show_progress)
    return [_check_labeled(config, data, split, workers, show_progress) for split in SPLITS]


def _check_labeled(
    config: Experiment, data: DataPath, split: Split, workers: int, show_progress: ShowProgress
) -> SplitReport:
    settings, num_classes = config.segmentation, config.network.num_classes
    assert settings is not None
    try:
        root = require_local(data)
        found, faults = find_labeled_images(root, split, settings.layout, num_classes, settings.ignore_label)
    except DataError as error:
        return SplitReport(split, faults=[str(error)])

    def _read(index: int) -> _Content | str:
        try:
            image, classes = read_pair(found.root / found.images[index], found.root / found.labels[index], found.table)
        except DataError as error:
            return str(error)
        is_void = classes == settings.ignore_label
        numbers = np.where(is_void, num_classes, classes).ravel()
        return _Content(image.size, np.bincount(numbers, minlength=num_classes + 1))

    report = SplitReport(
        split,
        found.classes,
        len(found.images),
        images=np.zeros(num_classes, dtype=np.int64),
        pixels=np.zeros(num_classes + 1, dtype=np.int64),
        faults=faults,
    )
    for content in _contents(_read, report, workers, show_progress):
        report.images += content.counts[:-1] > 0
        report.pixels += content.counts
    if report.sizes and not report.images.any():
        report.faults.append(f"all pixels of the {sum(report.sizes.values()):,} readable label maps are void")
    return report


def _check_folders(config: Experiment, data: DataPath, workers: int, show_progress: ShowProgress) -> list[SplitReport]:
    reports, datasets = [], []
    for split in SPLITS:
        try:
            dataset = _class_folders(config, data, split)
        except DataError as error:
            reports.append(SplitReport(split, faults=[str(error)]))
            continue
        datasets.append(dataset)
        reports.append(_check_class_folders(dataset, split, workers, show_progress))
    if len(datasets) == len(SPLITS):
        try:
            check_same_classes(*datasets)
        except DataError as error:
            reports[-1].faults.insert(0, str(error))
    return reports


def _class_folders(config: Experiment, data: DataPath, split: Split) -> ImageFolder:
    dataset = _dataset(config, data, split)
    assert isinstance(dataset, ImageFolder), "classification trains on image folders"
    return dataset


def _dataset(config: Experiment, data: DataPath, split: Split) -> ImageDataset:
    if split == "train":
        return build_train_loader(data, config).dataset
    size = config.input
    transform = ValTransform(size.scale_val, size.crop_val, size.mean, size.std)
    return build_val_loader(data, transform, batch_size=1).dataset


def _check_class_folders(dataset: ImageFolder, split: Split, workers: int, show_progress: ShowProgress) -> SplitReport:
    def _read(index: int) -> _Content | str:
        one_hot = np.zeros(len(dataset.classes), dtype=np.int64)
        one_hot[dataset.source.targets[index]] = 1
        try:
            encoded = dataset.source.read(index)
            return _Content(decode_as(encoded, escape(dataset.file_name(index)), load_rgb, "an image").size, one_hot)
        except Unreachable:  # every image of the shard would wait and fail in the same way
            raise
        except DataError as error:
            return str(error)

    report = SplitReport(split, dataset.classes, len(dataset), images=np.zeros(len(dataset.classes), dtype=np.int64))
    for content in _contents(_read, report, workers, show_progress):
        report.images += content.counts
    return report


def _contents(
    read: Callable[[int], _Content | str], report: SplitReport, workers: int, show_progress: ShowProgress
) -> Iterator[_Content]:
    """Yield the contents of the usable images; add sizes and faults to ``report``."""
    with show_progress(report.split, report.num_images) as bar:
        for content in read_many(read, range(report.num_images), workers):
            bar.advance(1)
            if isinstance(content, str):
                report.faults.append(content)
                continue
            report.sizes[content.size] += 1
            yield content
