"""Classification: one class per image, top-1 and top-5 accuracy, centre crops and ten crops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.data.loader import NUM_CROPS, Loader, build_train_loader, build_val_loader
from zoo.data.location import DataPath
from zoo.data.sampler import TrainBatches, ValBatches
from zoo.engine.meters import Reading
from zoo.engine.task import Result, Task
from zoo.tasks.protocols import PROTOCOLS, Protocol, center_crop
from zoo.tasks.significance import standard_error

LABELS = {"top1": "top-1", "top5": "top-5"}
TOPS = {"top1": 1, "top5": 5}  # k of top-k: the target is among the k most likely classes


def _shown_labels(num_classes: int | None) -> Mapping[str, str]:
    """Return the labels without top-5 where it is always 100 %: with five classes or fewer."""
    return LABELS if num_classes is None else {name: LABELS[name] for name, top in TOPS.items() if top < num_classes}


@dataclass(frozen=True)
class ClassificationResult(Result):
    """The scores of a validation.

    Args:
    - `top1`: images whose class is the network's best, percent.
    - `top5`: images whose class is among the network's best five, percent.
    - `loss`: mean cross-entropy, nats per image.
    - `count`: number of images that were scored.
    - `skipped`: number of images that could not be read and are in no average.
    - `protocol`: name of the way in which the images were scaled and cropped.
    - `val`: the images that there are, see `Result`.
    - `num_classes`: outputs of the network; None where they are unknown.
    """

    labels = LABELS
    top1: float
    top5: float
    loss: float
    count: int
    skipped: int
    protocol: str
    val: Mapping[str, Any] | None = None
    num_classes: int | None = None

    @property
    def shown_labels(self) -> Mapping[str, str]:
        """Top-1, and top-5 with more than five classes."""
        return _shown_labels(self.num_classes)

    def record(self) -> dict[str, Any]:
        """Return what the base class does; the number of classes is not a score."""
        numbers = super().record()
        del numbers["num_classes"]
        return numbers

    def standard_errors(self) -> dict[str, float]:
        """Return the binomial standard errors of the accuracies, in points."""
        return {name: standard_error(score, self.count) for name, score in self.scores().items()}

    @property
    def expected_as(self) -> str:
        """The crop alone (``center32``): a score is expected at the scale of the experiment."""
        return self.protocol.partition("-")[0]


class ClassificationTask(Task):
    """The task of networks that give an image one class; its counts are those of top-1 and of top-5 hits."""

    labels = LABELS
    protocols = PROTOCOLS
    num_counts = 2

    @property
    def shown_labels(self) -> Mapping[str, str]:
        """Top-1, and top-5 with more than five classes."""
        return _shown_labels(self.config.network.num_classes)

    def build_train_loader(self, data: DataPath, **share: Any) -> Loader[TrainBatches]:
        """Return the loader of ``data``/train."""
        return build_train_loader(data, self.config, **share)

    def build_val_loader(
        self,
        data: DataPath,
        protocol: Protocol,
        *,
        batch_size: int | None = None,
        limit: int | None = None,
        world_size: int = 1,
        **share: Any,
    ) -> Loader[ValBatches]:
        """Return the loader of ``data``/val; of ten crops a batch has by default a tenth of the images."""
        default = self.config.optimizer.batch_size // (NUM_CROPS if protocol.ten_crops else 1) // world_size
        return build_val_loader(
            data,
            scale=protocol.scale,
            crop=protocol.crop,
            ten_crops=protocol.ten_crops,
            mean=self.config.input.mean,
            std=self.config.input.std,
            decoder=self.config.input.decoder_val,
            batch_size=batch_size or max(1, default),
            limit=limit,
            world_size=world_size,
            **share,
        )

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the images' cross-entropies, smoothed as configured; logits (N, classes), targets (N,)."""
        smoothing = self.config.optimizer.label_smoothing
        return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)

    def counts(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the number of top-1 and of top-5 hits; with fewer than five classes top-5 is among all of them."""
        hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == targets[:, None]
        return torch.stack([hits[:, 0].sum(), hits.sum()])

    def scored(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the cross-entropies, without smoothing, and the `counts`."""
        return F.cross_entropy(logits, targets, reduction="sum"), self.counts(logits, targets)

    def scores(self, reading: Reading) -> dict[str, float]:
        """Return top-1 and top-5 accuracy, percent."""
        images = reading.count or float("nan")
        return {name: 100 * hits / images for name, hits in zip(LABELS, reading.counts.tolist(), strict=True)}

    @property
    def own_protocol(self) -> Protocol:
        """The centre crop of the experiment's ``input`` section."""
        return center_crop(self.config)

    def result(self, reading: Reading, protocol: str) -> ClassificationResult:
        """Return the scores of a validation."""
        scores: dict[str, Any] = self.scores(reading)
        return ClassificationResult(**scores, loss=reading.loss, count=reading.count, skipped=reading.skipped,
                                    protocol=protocol, num_classes=self.config.network.num_classes)  # fmt: skip

    def next_commands(self, checkpoint: str, data: str) -> Mapping[str, str]:
        """Return the commands that score and use the network."""
        return {"score it": f"zoo validate {checkpoint} {data}", "use it": f"zoo predict {checkpoint} IMAGE"}
