"""Data sets of images. A sample depends on seed, epoch and index only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from zoo.data.reading import Unreachable
from zoo.data.sampler import Key
from zoo.data.seeding import random_of
from zoo.data.sources.folder import FolderSource, sizes_digest, source_digest
from zoo.data.sources.location import DataPath, RemoteFolder
from zoo.data.sources.remote import RemoteShards
from zoo.data.sources.scan import class_folders
from zoo.data.sources.shards import Shards, shard_files
from zoo.data.transforms.augmentation import Normalization, finish
from zoo.data.transforms.classification import Drawn, Transform, prepare
from zoo.errors import DataError, escape, join_names

Source = FolderSource | Shards


class Sample(NamedTuple):
    """One image, its target and its file.

    Args:
    - `drawn`: the crop, and the operations to apply to it later on the device.
    - `target`: a class index, or the class indices of the pixels (H, W), int64.
    - `path`: the file.
    """

    drawn: Drawn
    target: int | Tensor
    path: str


class Batch(NamedTuple):
    """A batch of images; `on` returns the input of the network.

    Args:
    - `images`: (N, ...), uint8, or float32 if they are finished.
    - `targets`: class indices (N,), or class indices of pixels (N, H, W), int64.
    - `paths`: the files of the images.
    - `colors`, `normalization`: applied on the device, see `zoo.data.transforms.augmentation.finish`.
    """

    images: Tensor
    targets: Tensor
    paths: Sequence[str] = ()
    colors: Tensor | None = None
    normalization: Normalization | None = None

    def on(self, device: torch.device) -> Tensor:
        """Return the input of the network on ``device``: float32, with changed colors, normalized."""
        return self.finished(self.images.to(device, non_blocking=True))

    def finished(self, images: Tensor) -> Tensor:
        """Change colors and normalize ``images``, all or some of the batch, on any device.

        A batch with color changes can only be finished as a whole, because each image has its own changes.
        """
        if self.normalization is None:
            return images
        colors = None if self.colors is None else self.colors.to(images.device, non_blocking=True)
        return finish(images, colors, self.normalization)


class ImageDataset(Dataset[Sample]):
    """Base class of the data sets, see `zoo.data.sampler.Key`. Samples do not depend on the process.

    Subclasses define `_draw`, which may use random numbers, and `remap_targets`. In messages, `class_kind` names the
    classes, `class_unit` the items that have a class, and `remedy` says what to do about an unusable image.

    Args:
    - `root`: the folder of the images.
    - `classes`: names of the classes, in the order of their numbers.
    - `names`: the files of the images, relative to ``root``, (n,) bytes; an array, see
      `zoo.data.sources.folder.FolderSource`.
    - `seed`: seed of the random numbers.
    """

    class_kind: ClassVar[str] = "class folders"
    class_unit: ClassVar[str] = "image"
    remedy: str = FolderSource.remedy

    def __init__(self, root: DataPath, classes: list[str], names: np.ndarray, *, seed: int) -> None:
        self.root = root
        self.classes = classes
        self.seed = seed
        self._names = names

    def __len__(self) -> int:
        return len(self._names)

    def remap_targets(self, numbers: Sequence[int]) -> None:
        """Set the target of class i to ``numbers[i]``, before any image is drawn."""
        raise NotImplementedError

    def file_name(self, index: int) -> str:
        """Return the file name of image ``index`` as str: Path interns its parts, and memory would grow with each."""
        return os.path.join(self.root, os.fsdecode(self._names[index]))

    def targets(self) -> np.ndarray:
        """Return the class of each image, (n,) int64, without reading an image; DataError if that is impossible."""
        raise DataError("the classes of the images are not known before they are read", self.root)

    def names_digest(self) -> str:
        """Return the sha256 of the names of classes and files, see `zoo.data.sources.folder.source_digest`."""
        return source_digest(self.classes, self._names)

    def digests(self) -> dict[str, str]:
        """Return SHA-256 digests that identify the images: of their names, and of the details that a subclass adds."""
        return {"names": self.names_digest()}

    def classes_in(self, index: int, sample: Sample) -> np.ndarray:
        """Return the classes of image ``index``; ``sample`` was drawn from it."""
        return np.array([sample.target])

    def describe_absent(self, counts: Sequence[int]) -> str:
        """Return a message that names the classes whose count is 0; "" if there are none.

        ``counts`` are numbers of images or pixels by class.
        """
        absent = [name for name, count in zip(self.classes, counts, strict=True) if not count]
        if not absent:
            return ""
        return f"{len(absent)} of {len(self.classes)} classes have no {self.class_unit}: {join_names(absent)}"

    def _draw(self, index: int, epoch: int, generator: Random) -> Sample:
        """Draw sample ``index`` with random numbers from ``generator``. Raises DataError if it is unusable."""
        raise NotImplementedError

    def __getitem__(self, key: Key) -> Sample:
        epoch, index = key[:2]
        try:
            return self._draw(index, epoch, random_of(self.seed, *key))
        except Unreachable:
            raise
        except DataError as error:
            raise DataError(f"{error}; {self.remedy}") from error

    def __getitems__(self, keys: Sequence[Key]) -> list[Sample] | DataError:
        """Return the samples of a batch, or the DataError that prevents it.

        `zoo.data.loader.Loader` raises the returned error. If a worker raised it, torch would add the worker's
        traceback.
        """
        try:
            return [self[key] for key in keys]
        except DataError as error:
            return error


class ImageFolder(ImageDataset):
    """Classified images: a folder per class, numbered in sorted order, or shards.

    Raises DataError if ``root`` has no usable content, see `open_source`.

    Args:
    - `root`: folder with one folder of images per class, or with shards, local or remote.
    - `transform`: image -> tensor. Its generator is seeded by the seed and the key, so the result does not depend on
      the process.
    - `seed`: seed of the augmentation.
    - `allow_empty_classes`: whether class folders may be empty.
    """

    def __init__(
        self,
        root: DataPath,
        transform: Transform,
        *,
        seed: int = 0,
        allow_empty_classes: bool = False,
    ) -> None:
        self.source = open_source(root, allow_empty_classes)
        super().__init__(root, self.source.classes, self.source.names, seed=seed)
        self.transform = transform
        self.remedy = self.source.remedy
        self._outputs = np.arange(len(self.classes))

    def file_name(self, index: int) -> str:
        """Return the file name of image ``index``, or the name of the sample in its shard."""
        return os.path.join(self.source.root, os.fsdecode(self._names[index]))

    def remap_targets(self, numbers: Sequence[int]) -> None:
        """Set the target of class folder i to ``numbers[i]``, before any image is drawn."""
        self._outputs = np.array(numbers)[self._outputs]

    def targets(self) -> np.ndarray:
        """Return the class of each image."""
        return self._outputs[self.source.targets].astype(np.int64)

    def names_digest(self) -> str:
        """Return the sha256 of the names and of the details of the source."""
        return source_digest(self.classes, self._names, self.source.details)

    def digests(self) -> dict[str, str]:
        """Return the digest of the names (for shards, also of their contents), and of the sizes of some files."""
        if not isinstance(self.source, FolderSource):
            return super().digests()
        return {**super().digests(), "sizes": sizes_digest(self.file_name, len(self))}

    def _draw(self, index: int, epoch: int, generator: Random) -> Sample:
        name, encoded = self.file_name(index), self.source.read(index)
        drawn = prepare(encoded, escape(name), self.transform, generator)
        return Sample(drawn, int(self._outputs[self.source.targets[index]]), name)


def open_source(root: DataPath, allow_empty_classes: bool = False) -> Source:
    """Open the images in ``root``: local or remote tar files, or one folder per class.

    Raises DataError for tar files beside folders, and the errors of the sources.
    """
    if isinstance(root, RemoteFolder):
        return RemoteShards(root, allow_empty_classes)
    return (Shards if _is_sharded(root) else FolderSource)(root, allow_empty_classes)


def open_classes(root: DataPath) -> list[str]:
    """Return the classes in ``root`` like `open_source`, but without listing the images of class folders."""
    if isinstance(root, RemoteFolder) or _is_sharded(root):
        return open_source(root, allow_empty_classes=True).classes
    return class_folders(root) or open_source(root).classes  # open_source raises if there are no classes


def _is_sharded(root: Path) -> bool:
    """Return whether ``root`` contains tar files. Raises DataError if it also contains folders."""
    if not shard_files(root):
        return False
    folders = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    if folders:
        what = f"there are tar files and folders such as {folders[0]}"
        raise DataError(what, root, "keep either the shards or the class folders")
    return True


def collate(samples: list[Sample] | DataError) -> Batch | DataError:
    """Collate ``samples`` into a Batch; return a DataError unchanged.

    Raises RuntimeError in a worker if its shared memory has no room for the batch.
    """
    if isinstance(samples, DataError):
        return samples
    first = samples[0]
    for sample in samples:
        found, expected = (each.drawn.pixels for each in (sample, first))
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            kinds = (f"{each.dtype} of shape {tuple(each.shape)}" for each in (found, expected))
            what = f"its image is {next(kinds)}, but the image of {escape(first.path)} is {next(kinds)}"
            return DataError(what, sample.path, "give all images the same size and type")
    colors = [sample.drawn.colors for sample in samples if sample.drawn.colors is not None]
    # In a worker, default_collate stacks into shared memory. Otherwise a thread of the worker's queue would copy the
    # batch there. If that failed, the thread would drop the batch, and the trainer would wait for it forever.
    return Batch(
        images=default_collate([sample.drawn.pixels for sample in samples]),
        targets=default_collate([torch.as_tensor(sample.target) for sample in samples]),
        paths=[sample.path for sample in samples],
        colors=default_collate([torch.tensor(color) for color in colors]) if colors else None,
        normalization=samples[0].drawn.normalization,
    )
