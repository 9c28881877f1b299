"""A data set of images in class folders, whose augmentation depends on seed, epoch and index alone."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from zoo.data.sampler import Key
from zoo.data.scan import scan_folder
from zoo.data.seeding import seeded
from zoo.data.transforms import Transform, prepare
from zoo.errors import DataError

OnBadImage = Literal["stop", "skip"]


class Sample(NamedTuple):
    """One image: its tensor, class index and file. ``image`` is None where ``fault`` says why it is left out."""

    image: Tensor | None
    target: int
    path: str
    fault: str | None = None


class Batch(NamedTuple):
    """Images (N, ...), class indices (N,) int64, and one line per image left out: what is wrong, and its file.

    ``paths`` are the files of the images, in their order.
    """

    images: Tensor
    targets: Tensor
    skipped: list[str]
    paths: Sequence[str] = ()


class ImageFolder(Dataset[Sample]):
    """The images below ``root``, one folder per class; classes are numbered in the order of their names.

    Keys are (epoch, index). ``transform`` runs with the global generators of torch and ``random`` seeded by
    (seed, epoch, index), so that the result does not depend on who draws it. ``on_bad_image``: an image that
    cannot be read, or that ``transform`` cannot use, raises DataError ("stop") or becomes a sample without image
    ("skip").
    Raises DataError for a folder without usable content, see ``zoo.data.scan``.
    """

    def __init__(
        self,
        root: Path,
        transform: Transform,
        *,
        seed: int = 0,
        on_bad_image: OnBadImage = "stop",
        allow_empty_classes: bool = False,
    ) -> None:
        found = scan_folder(root, allow_empty_classes)
        self.root = root
        self.classes = found.classes
        self.transform = transform
        self.seed = seed
        self.on_bad_image = on_bad_image
        # Two arrays in place of a million Python objects: each worker that touches those gets a copy of their pages.
        self._names = np.array(found.names)
        self._targets = np.array(found.targets)

    def __len__(self) -> int:
        return len(self._names)

    def number_classes(self, numbers: Sequence[int]) -> None:
        """Give the images of class folder i the target ``numbers[i]`` in place of i; before any is drawn."""
        self._targets = np.array(numbers)[self._targets]

    def path(self, index: int) -> Path:
        """Return the file of image ``index``."""
        return self.root / os.fsdecode(self._names[index])

    def names_digest(self) -> str:
        """Return the sha256 of the names of classes and files, which tells most other data from this.

        Sizes and contents are left aside: asking a network storage for a million of them takes minutes.
        """
        digest = hashlib.sha256("\0".join(self.classes).encode("utf-8", errors="surrogateescape"))
        digest.update(self._names.tobytes())
        return digest.hexdigest()

    def __getitem__(self, key: Key) -> Sample:
        epoch, index = key
        path, target = self.path(index), int(self._targets[index])
        try:
            with seeded(self.seed, epoch, index):
                return Sample(prepare(path, self.transform), target, str(path))
        except DataError as error:
            if self.on_bad_image == "skip":
                return Sample(None, target, str(path), fault=str(error))
            hint = "replace or remove the file, or leave such images out with --on-bad-image skip"
            raise DataError(f"{error}; {hint}") from error

    def __getitems__(self, keys: Sequence[Key]) -> list[Sample] | DataError:
        """Return the samples of a batch, or the user's fault that prevents it.

        A loader's worker would wrap an exception into a page of traceback; as a value it arrives as it is, and
        ``zoo.data.loader.Loader`` raises it.
        """
        try:
            return [self[key] for key in keys]
        except DataError as error:
            return error


def collate(samples: list[Sample] | DataError, shape: tuple[int, ...]) -> Batch | DataError:
    """Return one Batch of ``samples``, those without image left out, or the fault itself.

    ``shape`` is that of one image; it is needed where none could be read.
    """
    if isinstance(samples, DataError):
        return samples
    good = [(sample.image, sample.target) for sample in samples if sample.image is not None]
    return Batch(
        images=torch.stack([image for image, _ in good]) if good else torch.empty(0, *shape),
        targets=torch.tensor([target for _, target in good], dtype=torch.int64),
        skipped=[sample.fault for sample in samples if sample.fault is not None],
        paths=[sample.path for sample in samples if sample.image is not None],
    )
