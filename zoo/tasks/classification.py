"""Classification: one class per image, top-1 and top-5 accuracy, center crops and ten crops."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.data.loader import Loader, LoaderOptions, build_train_loader, build_val_loader
from zoo.data.map_dataset import Datasets
from zoo.data.sampler import TrainBatches, ValBatches
from zoo.data.sources.location import DataPath
from zoo.data.targets import class_weights
from zoo.data.transforms.classification import ValTransform
from zoo.engine._meters import Reading
from zoo.engine._task import Result, Task
from zoo.tasks.protocols import PROTOCOLS, CropProtocol, center_crop

NUM_CROPS = 10
LABELS = {"top1": "top-1", "top5": "top-5"}
TOP_K = {"top1": 1, "top5": 5}  # name -> k: the target is among the k most likely classes


def standard_error(percent: float, count: int) -> float | None:
    """Return the binomial standard error, in percentage points, of ``percent`` of ``count`` independent images.

    Returns None at 0 and 100 percent, where the formula gives 0 for any number of images.
    """
    share = percent / 100
    if share in (0, 1):
        return None
    return 100 * math.sqrt(share * (1 - share) / count)


@dataclass(frozen=True)
class ClassificationResult(Result):
    """Result of a validation.

    Args:
    - `top1`: top-1 accuracy, percent.
    - `top5`: top-5 accuracy, percent.
    - `loss`: mean cross-entropy, nats per image.
    - `count`, `protocol`, `val`: see `Result`.
    - `confusion`: images by label (rows) and most likely class (columns), see `ConfusionMatrix`; None during training,
      and with more than `MAX_CLASSES` classes.
    """

    labels = LABELS
    top1: float
    top5: float
    loss: float
    count: int
    protocol: str
    val: Mapping[str, Any] | None = None
    confusion: list[list[int]] | None = field(default=None, compare=False, repr=False)

    def record(self) -> dict[str, Any]:
        """Return the fields of a line of the metrics file, without the confusion matrix."""
        numbers = super(ClassificationResult, replace(self, confusion=None)).record()
        del numbers["confusion"]
        return numbers

    def standard_errors(self) -> dict[str, float | None]:
        """Return the binomial standard errors of the accuracies, in percentage points; see `standard_error`."""
        return {name: standard_error(score, self.count) for name, score in self.scores().items()}

    @property
    def expected_as(self) -> str:
        """The crop without the scale, such as ``center32``: expected scores are for the experiment's scale."""
        return self.protocol.partition("-")[0]


class ClassificationTask(Task):
    """Task of image classifiers; `counts` are the numbers of top-1 and top-5 hits."""

    labels = LABELS
    protocols = PROTOCOLS
    num_counts = 2
    _class_weights: Tensor | None = None

    @property
    def shown_labels(self) -> Mapping[str, str]:
        """Top-1, and top-5 unless five classes or fewer make it always 100 %."""
        return {name: LABELS[name] for name, top in TOP_K.items() if top < self.config.network.num_classes}

    def build_train_loader(self, data: DataPath | Datasets, options: LoaderOptions) -> Loader[TrainBatches]:
        """Return the loader of ``data``/train, or of ``data.train``.

        Also sets the class weights of `loss`, which may depend on the number of images of each class.
        """
        loader = build_train_loader(data, self.config, options)
        setting = self.config.regularization.class_weights
        if setting is not None:
            self._class_weights = class_weights(setting, loader.dataset.targets, self.config.network.num_classes)
        return loader

    def build_val_loader(
        self,
        data: DataPath | Datasets,
        protocol: CropProtocol,
        options: LoaderOptions,
        *,
        batch_size: int | None = None,
        limit: int | None = None,
        split: str = "val",
    ) -> Loader[ValBatches]:
        """Return the loader of ``data``/``split``, or of ``data.val``. Ten crops use a tenth of the default batch."""
        config = self.config
        transform = ValTransform(
            protocol.scale,
            protocol.crop,
            config.input.mean,
            config.input.std,
            protocol.ten_crops,
            protocol.interpolation,
            protocol.crop_mode,
        )
        default = config.optimizer.batch_size // (NUM_CROPS if protocol.ten_crops else 1)
        return build_val_loader(
            data,
            transform,
            batch_size or max(1, default // (options.replicas or options.world_size)),
            options,
            split=split,
            limit=limit,
            num_classes=config.network.num_classes,
        )

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss of the images, with the configured label smoothing; logits (N, classes).

        Targets are classes (N,), or shares of the classes (N, classes) if the images are mixed. Classes are
        weighted once `build_train_loader` has been called.
        """
        smoothing, settings = self.config.optimizer.label_smoothing, self.config.regularization
        if targets.dim() == 2:
            targets = targets.to(logits.dtype)
        if settings.loss == "cross_entropy":
            if self._class_weights is not None:
                self._class_weights = self._class_weights.to(logits)
            return F.cross_entropy(logits, targets, self._class_weights, reduction="sum", label_smoothing=smoothing)
        num_classes = logits.shape[1]
        shares = targets if targets.dim() == 2 else F.one_hot(targets, num_classes).to(logits.dtype)
        shares = shares * (1 - smoothing) + smoothing / num_classes
        if settings.bce_target_threshold is not None:
            shares = shares.gt(settings.bce_target_threshold).to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits, shares, reduction="sum") / num_classes

    def counts(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the numbers of top-1 and top-5 hits. With fewer than five classes, every target is a top-5 hit.

        The target of a mixed image is the class with the largest share, as in torchvision's training script.
        """
        if targets.dim() == 2:
            targets = targets.argmax(dim=1)
        hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == targets[:, None]
        return torch.stack([hits[:, 0].sum(), hits.sum()])

    def scored(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summed cross-entropy without label smoothing, and the `counts`."""
        return F.cross_entropy(logits, targets, reduction="sum"), self.counts(logits, targets)

    def scores(self, reading: Reading) -> dict[str, float]:
        """Return top-1 and top-5 accuracy, percent; NaN without images."""
        images = reading.count or float("nan")
        return {name: 100 * hits / images for name, hits in zip(LABELS, reading.counts.tolist(), strict=True)}

    @property
    def own_protocol(self) -> CropProtocol:
        """The center crop of the experiment's ``input`` section."""
        return center_crop(self.config)

    def result(self, reading: Reading, protocol: str) -> ClassificationResult:
        """Return the result of a validation."""
        scores: dict[str, Any] = self.scores(reading)
        return ClassificationResult(**scores, loss=reading.loss, count=reading.count, protocol=protocol)
