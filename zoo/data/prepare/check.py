"""Checking a data set before a run: reads all images and label maps, and reports all faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tqdm import tqdm

from zoo.config import Experiment
from zoo.data.classes import check_same_classes
from zoo.data.folder import ImageFolder
from zoo.data.label_maps import LabeledImages, Split, find_labeled_images, read_pair
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
    num_images: int
    faults: list[str]


def check_data(config: Experiment, data: DataPath, workers: int) -> list[SplitReport]:
    """Return a report on each split of ``data``, after reading all images as a run of ``config`` would.

    All faults are reported, with two exceptions: ConfigError is raised if ``config`` and the data set have different
    numbers of classes, and Unreachable if a server fails while images are read.

    Args:
    - `workers`: number of threads.
    """
    reports: list[SplitReport] = []
    datasets: list[ImageFolder] = []
    num_classes = config.network.num_classes
    for split in SPLITS:
        faults: list[str] = []
        read: Callable[[int], object]
        try:
            if config.segmentation is None:
                dataset = _class_folders(config, data, split)
                datasets.append(dataset)
                num_images, read = len(dataset), partial(_read_image, dataset)
            else:
                layout, ignore_label = config.segmentation.layout, config.segmentation.ignore_label
                found, faults = find_labeled_images(require_local(data), split, layout, num_classes, ignore_label)
                num_images, read = len(found.images), partial(_read_pair, found)
        except DataError as error:
            reports.append(SplitReport(split, 0, [str(error)]))
            continue
        results = read_many(partial(_fault_of, read), range(num_images), workers)
        bar = tqdm(results, desc=split, total=num_images, unit="image", disable=None, leave=False)
        reports.append(SplitReport(split, num_images, [*faults, *filter(None, bar)]))
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


def _read_image(dataset: ImageFolder, index: int) -> None:
    decode_as(dataset.source.read(index), escape(dataset.file_name(index)), load_rgb, "an image")


def _read_pair(found: LabeledImages, index: int) -> None:
    read_pair(found.root / found.images[index], found.root / found.labels[index], found.table)


def _fault_of(read: Callable[[int], object], index: int) -> str | None:
    """Return the message of the DataError of ``read(index)``. Raises Unreachable, which is no fault of an image."""
    try:
        read(index)
    except Unreachable:  # every image of the shard would wait and fail in the same way
        raise
    except DataError as error:
        return str(error)
    return None
