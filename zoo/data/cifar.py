"""CIFAR-10 and CIFAR-100, as their owners distribute them for Python, turned into class folders."""

from __future__ import annotations

import io
import pickle
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from zoo.data.archives import check_free, check_md5, complete_folder, read_all
from zoo.data.check import ShowProgress
from zoo.errors import DataError, listed, printable

SIDE = 32

T = TypeVar("T")


@dataclass(frozen=True)
class CifarRelease:
    """The files of a data set, with the md5 digests that its owners and torchvision publish.

    Args:
    - `archive`, `archive_md5`: the archive's name.
    - `folder`: the one folder in the archive, which torchvision leaves unpacked beside it.
    - `train`, `val`: the md5 of the files in the folder that hold the images, by name and in their order.
    - `meta`: the same of the file with the names of the classes.
    - `names_key`, `labels_key`: where the files have the names of the classes and the classes of the images.
    - `num_classes`: number of classes.
    - `per_class`: number of images of each class in train and in val.
    """

    archive: str
    archive_md5: str
    folder: str
    train: Mapping[str, str]
    val: Mapping[str, str]
    meta: Mapping[str, str]
    names_key: bytes
    labels_key: bytes
    num_classes: int
    per_class: tuple[int, int]


CIFAR = {
    "cifar10": CifarRelease(
        archive="cifar-10-python.tar.gz",
        archive_md5="c58f30108f718f92721af3b95e74349a",
        folder="cifar-10-batches-py",
        train={
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        },
        val={"test_batch": "40351d587109b95175f43aff81a1287e"},
        meta={"batches.meta": "5ff9c542aee3614f3951f8cda6e48888"},
        names_key=b"label_names",
        labels_key=b"labels",
        num_classes=10,
        per_class=(5000, 1000),
    ),
    "cifar100": CifarRelease(
        archive="cifar-100-python.tar.gz",
        archive_md5="eb9058c3a382ffc7106e4002c42a8d85",
        folder="cifar-100-python",
        train={"train": "16019d7e3df5f24257cddd939b257f8d"},
        val={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        meta={"meta": "7973b15100ade9c7d40fb424638fde48"},
        names_key=b"fine_label_names",
        labels_key=b"fine_labels",
        num_classes=100,
        per_class=(500, 100),
    ),
}


def unpack_cifar(release: CifarRelease, source: Path, out: Path, show_progress: ShowProgress) -> dict[str, str]:
    """Write ``out``/train/CLASS/*.png and ``out``/val/CLASS/*.png; return the md5 of each file that was read.

    ``source`` is the archive, the unpacked folder, or a folder that holds one of these. An image is called by its
    number in the owners' order. ``out`` is complete or not there at all. Raises DataError for files that are missing or
    not those that the owners distribute, and if there is something at ``out`` already.
    """
    check_free(out)
    files, digests = _checked_files(release, source)
    (names,) = (_read(files[name], name, partial(_class_names, release)) for name in release.meta)
    splits = zip(("train", "val"), (release.train, release.val), release.per_class, strict=True)
    with complete_folder(out) as folder:
        for split, batches, per_class in splits:
            for name in names:
                (folder / split / name).mkdir(parents=True)
            labels: list[int] = []
            with show_progress(split, per_class * len(names)) as bar:
                for batch in batches:
                    images, classes = _read(files[batch], batch, partial(_images, release))
                    for index, (image, label) in enumerate(zip(images, classes, strict=True), len(labels)):
                        image.save(folder / split / names[label] / f"{index:05d}.png")
                        bar.advance(1)
                    labels += classes
            if Counter(labels) != dict.fromkeys(range(len(names)), per_class):
                raise DataError(
                    f"{split} has not {per_class:,} images of each class; {printable(source)}: download it again"
                )
    return digests


def _checked_files(release: CifarRelease, source: Path) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the contents of the release's files, and the md5 of each file that these were read from."""
    md5s = {**release.train, **release.val, **release.meta}
    first = next(iter(md5s))
    folder = next((place for place in (source, source / release.folder) if (place / first).exists()), None)
    if folder is not None:
        for name, md5 in md5s.items():
            check_md5(folder / name, md5)
        return {name: (folder / name).read_bytes() for name in md5s}, md5s
    archive = source / release.archive if source.is_dir() else source
    if not archive.exists():
        raise DataError(
            f"there is neither {release.archive} nor {release.folder}/; {printable(source)}: SOURCE is one of these, "
            "or a folder that holds one"
        )
    check_md5(archive, release.archive_md5)
    contents = read_all(archive, [f"{release.folder}/{name}" for name in md5s])
    return {Path(name).name: content for name, content in contents.items()}, {release.archive: release.archive_md5}


class _Kept:
    """Stands in for what numpy would be called for by a pickle: keeps the arguments and the state, and calls nothing.

    A pickle is a program that may call anything. What these files need is in these two attributes.
    """

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _DataUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists and dictionaries; arrays become `_Kept`, and all else is refused."""

    KNOWN = (("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype"))

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for parts of arrays; UnpicklingError for anything else."""
        if (module, name) in self.KNOWN:
            return _Kept
        raise pickle.UnpicklingError(f"it would call {module}.{name}")


def _read(content: bytes, name: str, take: Callable[[dict[bytes, Any]], T]) -> T:
    """Return what ``take`` finds in the dictionary of a pickle of Python 2, whose texts are bytes."""
    try:
        return take(_DataUnpickler(io.BytesIO(content), encoding="bytes").load())
    except Exception as error:  # a damaged pickle raises nearly anything, and so does one of something else
        reason = printable(error) or type(error).__name__
        raise DataError(f"{name} cannot be read: {reason}: download the data again") from error


def _class_names(release: CifarRelease, content: dict[bytes, Any]) -> list[str]:
    """Return the names of the classes; ValueError for one that could lead out of a folder."""
    names = [name.decode("ascii") for name in content[release.names_key]]
    if len(set(names)) != release.num_classes or not all(re.fullmatch(r"\w+", name) for name in names):
        raise ValueError(f"{listed(names)} are not names of {release.num_classes} classes")
    return names


def _images(release: CifarRelease, content: dict[bytes, Any]) -> tuple[list[Image.Image], list[int]]:
    """Return the images of one file and their classes."""
    labels = list(content[release.labels_key])
    _, _, dtype, is_fortran, raw = content[b"data"].state
    if dtype.args[0] != b"u1" or is_fortran or not set(labels) <= set(range(release.num_classes)):
        raise ValueError("its images are not in 8 bits, or of other classes")
    pixels = np.frombuffer(raw, np.uint8).reshape(len(labels), 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    return [Image.fromarray(image) for image in pixels], labels
