"""Checking a data set before a run: reads all images and label maps, and reports all faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tqdm import tqdm

from zoo.config import Experiment
from zoo.data.classes import check_same_classes
from zoo.data.folder import ImageFolder
from zoo.data.label_maps import Split, find_labeled_images, read_pair
from zoo.data.loader import build_train_loader, build_val_loader
from zoo.data.location import DataPath, require_local
from zoo.data.reading import decode_as, load_rgb, read_many
from zoo.data.remote import Unreachable
from zoo.data.transforms import ValTransform
from zoo.errors import DataError, escape

SPLITS: tuple[Split, ...] = ("train", "val")


@dataclass
class SplitReport:
    """The number of images of a split, including faulty ones, and a message for each fault that names the files."""

    split: Split
    num_images: int = 0
    faults: list[str] = field(default_factory=list)

    def add_faults(self, read: Callable[[int], object], workers: int) -> None:
        """Add the DataErrors of ``read(index)`` for all images. Raises Unreachable, which is no fault of an image."""

        def fault_of(index: int) -> str | None:
            try:
                read(index)
            except Unreachable:  # every image of the shard would wait and fail in the same way
                raise
            except DataError as error:
                return str(error)
            return None

        found = read_many(fault_of, range(self.num_images), workers)
        bar = tqdm(found, desc=self.split, total=self.num_images, unit="image", disable=None, leave=False)
        self.faults += [fault for fault in bar if fault is not None]


def check_data(config: Experiment, data: DataPath, workers: int) -> list[SplitReport]:
    """Return a report on each split of ``data``, after reading all images as a run of ``config`` would.

    All faults are reported, with two exceptions: ConfigError is raised if ``config`` and the data set have different
    numbers of classes, and Unreachable if a server fails while images are read.

    Args:
    - `workers`: number of threads.
    """
    if config.segmentation is None:
        return _check_folders(config, data, workers)
    return [_check_labeled(config, data, split, workers) for split in SPLITS]


def _check_labeled(config: Experiment, data: DataPath, split: Split, workers: int) -> SplitReport:
    settings, num_classes = config.segmentation, config.network.num_classes
    assert settings is not None
    try:
        root = require_local(data)
        found, faults = find_labeled_images(root, split, settings.layout, num_classes, settings.ignore_label)
    except DataError as error:
        return SplitReport(split, faults=[str(error)])

    def read(index: int) -> None:
        read_pair(found.root / found.images[index], found.root / found.labels[index], found.table)

    report = SplitReport(split, len(found.images), faults)
    report.add_faults(read, workers)
    return report


def _check_folders(config: Experiment, data: DataPath, workers: int) -> list[SplitReport]:
    reports, datasets = [], []
    for split in SPLITS:
        try:
            dataset = _class_folders(config, data, split)
        except DataError as error:
            reports.append(SplitReport(split, faults=[str(error)]))
            continue
        datasets.append(dataset)
        reports.append(_check_class_folders(dataset, split, workers))
    if len(datasets) == len(SPLITS):
        try:
            check_same_classes(*datasets)
        except DataError as error:
            reports[-1].faults.insert(0, str(error))
    return reports


def _class_folders(config: Experiment, data: DataPath, split: Split) -> ImageFolder:
    size = config.input
    transform = ValTransform(size.scale_val, size.crop_val, size.mean, size.std)
    is_train = split == "train"
    dataset = (build_train_loader(data, config) if is_train else build_val_loader(data, transform, 1)).dataset
    assert isinstance(dataset, ImageFolder), "classification trains on image folders"
    return dataset


def _check_class_folders(dataset: ImageFolder, split: Split, workers: int) -> SplitReport:
    def read(index: int) -> None:
        decode_as(dataset.source.read(index), escape(dataset.file_name(index)), load_rgb, "an image")

    report = SplitReport(split, len(dataset))
    report.add_faults(read, workers)
    return report
