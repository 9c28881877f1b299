"""Semantic segmentation: loss of the hardest pixels, and scores from a confusion matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zoo.config.experiment import Experiment
from zoo.config.segmentation_section import Segmentation
from zoo.data.loader import Loader, LoaderOptions
from zoo.data.map_dataset import Datasets
from zoo.data.sampler import TrainBatches, ValBatches
from zoo.data.segmentation.loader import build_segmentation_train_loader, build_segmentation_val_loader
from zoo.data.sources.location import DataPath
from zoo.engine._meters import Reading
from zoo.engine._task import Result, Task
from zoo.errors import ConfigError, DataError
from zoo.ops.upsampling import upsample
from zoo.remat._lean import is_lean, lean
from zoo.tasks.confusion import ConfusionMatrix, confusion_counts
from zoo.tasks.protocols import WHOLE_IMAGES, WholeImage

LABELS = {
    "miou": "mIoU",
    "pixel_accuracy": "pixel accuracy",
    "mean_class_accuracy": "class accuracy",
    "frequency_weighted_iou": "weighted IoU",
}


@dataclass(frozen=True)
class SegmentationResult(Result):
    """Result of a validation, see `ConfusionMatrix`.

    Scores have no standard errors: the pixels of an image are not independent, and the confusion matrix of all images
    does not determine the variance between images.

    Args:
    - `miou`: mean over the classes of intersection over union, percent.
    - `pixel_accuracy`: share of pixels with the right class, percent.
    - `mean_class_accuracy`: mean over the classes of the pixel accuracy, percent.
    - `frequency_weighted_iou`: mean of intersection over union, weighted with the pixels of each class, percent.
    - `iou`: intersection over union of each class, percent; None for a class that is neither labeled nor predicted.
    - `loss`: mean cross-entropy, nats per labeled pixel, averaged over the images.
    - `count`, `val`: see `Result`.
    - `protocol`: ``whole`` or ``whole-flip``.
    - `confusion`: pixels by label (rows) and prediction (columns).
    """

    labels = LABELS
    miou: float
    pixel_accuracy: float
    mean_class_accuracy: float
    frequency_weighted_iou: float
    iou: list[float | None]
    loss: float
    count: int
    protocol: str
    confusion: list[list[int]]
    val: Mapping[str, Any] | None = None

    def class_counts(self) -> list[int]:
        """Return the number of labeled pixels of each class."""
        return list(map(sum, self.confusion))

    def record(self) -> dict[str, Any]:
        """Return the fields of a line of the metrics file, without the confusion matrix."""
        numbers = super().record()
        del numbers["confusion"]
        return numbers

    def to_json(self, weights_md5: str | None, environment: dict[str, Any]) -> dict[str, Any]:
        """Return the content of a result file, with the confusion matrix."""
        return {**super().to_json(weights_md5, environment), "confusion": self.confusion}


class SegmentationTask(Task):
    """Task of semantic segmentation networks; `counts` is the flattened confusion matrix, (C * C,)."""

    labels = LABELS
    protocols = WHOLE_IMAGES

    def __init__(self, config: Experiment) -> None:
        super().__init__(config)
        self.num_counts = config.network.num_classes**2

    @cached_property
    def _settings(self) -> Segmentation:
        assert self.config.segmentation is not None
        return self.config.segmentation

    def build_train_loader(self, data: DataPath | Datasets, options: LoaderOptions) -> Loader[TrainBatches]:
        """Return the loader of training crops and their label maps."""
        return build_segmentation_train_loader(self._folder(data), self.config, options)

    def build_val_loader(
        self,
        data: DataPath | Datasets,
        protocol: WholeImage,
        options: LoaderOptions,
        *,
        batch_size: int | None = None,
        limit: int | None = None,
        split: str = "val",
    ) -> Loader[ValBatches]:
        """Return the loader of whole images. Raises ConfigError for a ``batch_size``."""
        if batch_size is not None:
            raise ConfigError(
                f"batch_size = {batch_size}: {self.config.network.arch} is a segmentation network, and images of "
                "different sizes are scored one at a time",
                remedy="remove the batch size",
            )
        return build_segmentation_val_loader(self._folder(data), self.config, options, limit=limit)

    def _folder(self, data: DataPath | Datasets) -> DataPath:
        if isinstance(data, Datasets):
            what = f"{self.config.network.arch} segments images"
            raise ConfigError(what, data, "give a folder with images and label maps")
        return data

    def trained_network(self, model: nn.Module) -> nn.Module:
        """Return the model without its last upsampling; `bootstrapped_loss` upsamples in less memory."""
        return MapLogits(model) if hasattr(model, "forward_logits") else model

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the `bootstrapped_loss` of the experiment."""
        return bootstrapped_loss(
            logits,
            targets,
            hard_pixels=self._settings.hard_pixels,
            ignore_label=self._settings.ignore_label,
            label_smoothing=self.config.optimizer.label_smoothing,
        )

    def counts(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the confusion matrix of logits (N, C, h, w), upsampled to the size of the targets (N, H, W).

        Upsamples one image at a time; all at once would take more memory than the training step.
        """
        num_classes, ignore_label = logits.shape[1], self._settings.ignore_label
        counts = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=logits.device)
        for image_logits, image_targets in zip(logits.split(1), targets.split(1), strict=True):
            predictions = _at_size_of(image_targets, image_logits).argmax(dim=1)
            counts += confusion_counts(image_targets, predictions, num_classes, ignore_label)
        return counts.flatten()

    def scored(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean cross-entropy over the labeled pixels, summed over the images, and the `counts`."""
        logits = _at_size_of(targets, logits)
        ignore_label = self._settings.ignore_label
        losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=ignore_label).flatten(1)
        num_labeled = (targets != ignore_label).flatten(1).sum(dim=1).clamp(min=1)
        return (losses.sum(dim=1) / num_labeled).sum(), self.counts(logits, targets)

    def scores(self, reading: Reading) -> dict[str, float]:
        """Return the scores of the confusion matrix, percent."""
        confusion = self._confusion(reading)
        return {name: getattr(confusion, name) for name in LABELS}

    def class_counts(self, reading: Reading) -> list[int]:
        """Return the number of labeled pixels of each class."""
        labeled: list[int] = self._confusion(reading).counts.sum(1).tolist()
        return labeled

    @property
    def own_protocol(self) -> WholeImage:
        """The whole image at one scale, not mirrored."""
        return WholeImage(flip=False)

    def result(self, reading: Reading, protocol: str) -> SegmentationResult:
        """Return the result of a validation. Raises DataError if no pixel has a label."""
        confusion = self._confusion(reading)
        if confusion.pixels == 0:
            raise DataError(
                f"no pixel of {reading.count} label maps has a class",
                "validation data",
                "use label maps with classes, and describe their values in segmentation.layout",
            )
        scores: dict[str, Any] = self.scores(reading)
        return SegmentationResult(
            **scores,
            iou=confusion.iou,
            loss=reading.loss,
            count=reading.count,
            protocol=protocol,
            confusion=confusion.counts.tolist(),
        )

    def _confusion(self, reading: Reading) -> ConfusionMatrix:
        num_classes = self.config.network.num_classes
        return ConfusionMatrix(reading.counts.view(num_classes, num_classes))


def bootstrapped_loss(
    logits: Tensor, targets: Tensor, *, hard_pixels: float, ignore_label: int, label_smoothing: float = 0.0
) -> Tensor:
    """Return the mean cross-entropy of the hardest pixels of each image, summed over the images, 0-d.

    The loss of an image with P pixels is the mean of its k = ceil(hard_pixels * P) largest pixel losses. Pixels with
    the ignore label have a loss of 0 and count in P and k, so an image without labels has a loss of 0. This is loss
    max-pooling with p = 1 and m = hard_pixels (Rota Bulo et al., CVPR 2017), as used in section 4.2 of CVPR 2018.

    Implementations differ. The paper only states the mean over the hardest 25 %. The later code of its authors selects
    pixels per image, with unlabeled pixels at 0. detectron2 selects 20 % of the whole batch. mmsegmentation selects all
    pixels whose true class has a probability below 0.7, at least 100,000, and divides by all or by the selected pixels.
    This function follows the authors' later code: no other implementation is known to be closer to the published runs,
    and a sum over images makes a step independent of the number of processes.

    Only the logits are saved for backward. Tensors at the size of the targets are larger by the square of the output
    stride; they exist for one image at a time, in forward and again in backward.

    Args:
    - `logits`: (N, C, h, w), at least float32; upsampled to the size of the targets first.
    - `targets`: (N, H, W), int64, classes or ``ignore_label``.
    - `hard_pixels`: share of the pixels that enter the mean, above 0 and at most 1.
    - `ignore_label`: label of pixels without a class.
    - `label_smoothing`: share of a target that is spread over all classes.
    """
    num_pixels = targets[0].numel()
    num_hard = math.ceil(Fraction(str(hard_pixels)) * num_pixels)  # exact: in floats, 0.07 of 100 pixels are 8

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(
            _at_size_of(targets, logits),
            targets,
            reduction="none",
            ignore_index=ignore_label,
            label_smoothing=label_smoothing,
        ).flatten(1)
        return (losses.topk(num_hard, dim=1, sorted=False).values if num_hard < num_pixels else losses).mean(dim=1)

    images = zip(logits.split(1), targets.split(1), strict=True)
    return torch.cat(
        [checkpoint(loss_of, *image, use_reentrant=False, preserve_rng_state=False) for image in images]
    ).sum()


class MapLogits(nn.Module):
    """Wraps a segmentation network to return its logits before the last upsampling."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        if is_lean(network):
            lean(self)  # forward_logits does not run the network's own hooks

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (N, classes, h, w)."""
        logits: Tensor = self.network.forward_logits(images)  # type: ignore[operator]
        return logits


def _at_size_of(targets: Tensor, logits: Tensor) -> Tensor:
    """Return the logits (N, C, h, w) at the size of the targets (N, H, W), upsampled if necessary."""
    size = targets.shape[1:]
    return logits if logits.shape[2:] == size else upsample(logits, size)
