"""Loaders of images and label maps. Batches are bit-identical with any number of workers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from random import Random

import numpy as np
from PIL import Image
from torch import Tensor

from zoo.config.experiment import Experiment
from zoo.config.segmentation_section import Segmentation
from zoo.data.dataset import ImageDataset, Sample
from zoo.data.loader import DEFAULT_OPTIONS, Loader, LoaderOptions, loader_of_crops, val_batches
from zoo.data.sampler import TrainBatches, ValBatches
from zoo.data.segmentation.class_uniform import ClassUniform, draw_pixel, load_class_index
from zoo.data.segmentation.label_maps import LabeledImages, Split, labeled_images, read_label, read_pair
from zoo.data.segmentation.transforms import Pixel, SegmentationTrain, SegmentationVal
from zoo.data.sources.folder import sizes_digest
from zoo.data.sources.location import DataPath, require_local
from zoo.data.transforms.classification import Drawn
from zoo.errors import DataError, escape

MASK_VALUE = 255  # value of the foreground in masks that many tools write
MASK_HINT = f"{MASK_VALUE} is void: write 1 in place of {MASK_VALUE} in masks of 0 and {MASK_VALUE}"

PairTransform = Callable[[Image.Image, np.ndarray, Pixel | None, Random], tuple[Tensor, Tensor]]


class LabeledFolder(ImageDataset):
    """Images and their label maps, with keys (epoch, index).

    Args:
    - `found`: the files, see `zoo.data.segmentation.label_maps.labeled_images`.
    - `transform`: (image, classes, pixel that the crop must contain, generator) -> tensor and target. The generator is
      seeded by (seed, epoch, index).
    - `ignore_label`: the target of void pixels.
    - `uniform`: draws the image of each sample from the same generator; None uses image ``index``.
    - `seed`: seed of the random numbers.
    """

    class_kind = "classes of the label maps"
    class_unit = "pixel"

    def __init__(
        self,
        found: LabeledImages,
        transform: PairTransform,
        *,
        ignore_label: int,
        uniform: ClassUniform | None = None,
        seed: int = 0,
    ) -> None:
        names = np.array([os.fsencode(name) for name in found.images])
        super().__init__(found.root, found.classes, names, seed=seed)
        self.transform = transform
        self.uniform = uniform
        self._ignore_label = ignore_label
        self._labels = np.array([os.fsencode(name) for name in found.labels])
        self._table = found.table

    def remap_targets(self, numbers: Sequence[int]) -> None:
        """Set the target of class i to ``numbers[i]``, before any image is drawn."""
        is_class = (self._table >= 0) & (self._table != self._ignore_label)
        self._table = self._table.copy()
        self._table[is_class] = np.array(numbers)[self._table[is_class]]

    def classes_in(self, index: int, sample: Sample) -> np.ndarray:
        """Return the classes that occur in the whole label map of image ``index``, without void."""
        classes = np.unique(read_label(os.path.join(self.root, os.fsdecode(self._labels[index])), self._table))
        return classes[classes != self._ignore_label]

    def describe_absent(self, counts: Sequence[int]) -> str:
        """Return a message that names the classes without pixels, and the remedy for masks of 0 and 255."""
        what = super().describe_absent(counts)
        is_mask = len(self.classes) == 2 and self._table[MASK_VALUE] == self._ignore_label
        return f"{what}; {MASK_HINT}" if what and is_mask else what

    def names_digest(self) -> str:
        """Return the sha256 of the names of classes, images and label maps, and of the table of ids."""
        digest = hashlib.sha256(super().names_digest().encode())
        digest.update(self._labels.tobytes())
        digest.update(self._table.tobytes())
        return digest.hexdigest()

    def digests(self) -> dict[str, str]:
        """Return the digest of the names, and of the sizes of some images and label maps."""
        files = [os.path.join(self.root, os.fsdecode(name)) for name in (*self._names, *self._labels)]
        return {**super().digests(), "sizes": sizes_digest(files.__getitem__, len(files))}

    def _draw(self, index: int, epoch: int, generator: Random) -> Sample:
        pixel = number = None
        if self.uniform is not None:
            number, index = self.uniform.draw(generator)
        name, label = self.file_name(index), os.path.join(self.root, os.fsdecode(self._labels[index]))
        image, classes = read_pair(name, label, self._table)
        if number is not None:
            pixel = draw_pixel(classes, number, generator)
            if pixel is None:
                what = f"a label map changed during training: it no longer has class {self.classes[number]}"
                raise DataError(what, label)
        try:
            tensor, target = self.transform(image, classes, pixel, generator)
        except DataError as error:
            raise DataError(f"{escape(name)}: {error}") from error
        return Sample(Drawn(tensor), target, name)


def build_segmentation_train_loader(
    data: DataPath,
    config: Experiment,
    options: LoaderOptions = DEFAULT_OPTIONS,
) -> Loader[TrainBatches]:
    """Return the loader of training crops for one process. Its ``batch_sampler`` holds the epoch and the position.

    Images are (N, 3, crop, crop); targets are (N, crop, crop), with the ignore label in void and padded pixels. Raises
    DataError for missing files, and ConfigError unless the network has as many classes as the data.
    """
    settings = _settings(config)
    found = _found(data, "train", config)
    uniform = None
    if settings.class_uniform:
        uniform = ClassUniform(found, load_class_index(found, workers=options.workers))
    dataset = LabeledFolder(
        found,
        SegmentationTrain(config.input, settings.scale_range, settings.ignore_label),
        ignore_label=settings.ignore_label,
        uniform=uniform,
        seed=config.seed,
    )
    return loader_of_crops(dataset, config, options)


def build_segmentation_val_loader(
    data: DataPath,
    config: Experiment,
    options: LoaderOptions = DEFAULT_OPTIONS,
    *,
    limit: int | None = None,
) -> Loader[ValBatches]:
    """Return the loader of validation images for one process, one whole image (1, 3, h, w) at a time.

    The target (1, H, W) has the resolution of the label map. h and w differ from it only if
    ``segmentation.longest_side_val`` is set. ``batch_sampler.num_images`` counts the images of all processes. Raises
    the errors of `build_segmentation_train_loader`.
    """
    settings = _settings(config)
    dataset = LabeledFolder(
        _found(data, "val", config),
        SegmentationVal(config.input.mean, config.input.std, settings.longest_side_val),
        ignore_label=settings.ignore_label,
    )
    return Loader(dataset, val_batches(dataset, 1, options, limit), options)


def _found(data: DataPath, split: Split, config: Experiment) -> LabeledImages:
    settings = _settings(config)
    return labeled_images(
        require_local(data), split, settings.layout, config.network.num_classes, settings.ignore_label
    )


def _settings(config: Experiment) -> Segmentation:
    assert config.segmentation is not None, "only segmentation experiments are loaded here"
    return config.segmentation
