"""The ``regularization`` section: mixed images, and the loss of soft targets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from zoo.config.section import Section

Alpha = Annotated[float, Field(ge=0, le=1000)]
ClassWeights = Literal["balanced"] | list[Annotated[float, Field(ge=0, le=1e6)]]
Probability = Annotated[float, Field(ge=0, le=1)]


class Regularization(Section):
    """Mixed images and the loss, for classification. Label smoothing is optimizer.label_smoothing."""

    classification_only = ("mixup", "cutmix", "loss", "class_weights")

    mixup: Alpha = 0.0
    """Mixup (Zhang et al. 2018): the weight of each of two images is drawn from Beta(mixup, mixup); 0: none. With mixup
    and cutmix, half of the mixed batches get each."""
    cutmix: Alpha = 0.0
    """CutMix (Yun et al. 2019): the area of the rectangle that comes from another image is drawn from Beta(cutmix,
    cutmix); 0: none."""
    mix_probability: Probability = 1.0
    """Probability that a batch is mixed."""
    loss: Literal["cross_entropy", "bce"] = "cross_entropy"
    """Training loss: cross-entropy, or the mean over the classes of binary cross-entropy (bce)."""
    bce_target_threshold: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Targets above this become 1 and all others 0, after mixing and label smoothing; null: targets stay soft."""

    class_weights: ClassWeights | None = None
    """Weight of the loss of each class, as torch's CrossEntropyLoss has it, but divided by the number of images, not by
    the sum of their weights; "balanced": n / (C n_c) for a class with n_c of the n images in C classes; null: 1.
    Validation is not weighted."""

    @property
    def mixes(self) -> bool:
        """Whether batches are mixed."""
        return self.mixup > 0 or self.cutmix > 0

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield settings without effect."""
        if self.mix_probability != 1 and not self.mixes:
            yield "mix_probability", "has no effect without mixup or cutmix; set one, or remove the key"
        if self.bce_target_threshold is not None and self.loss != "bce":
            yield "bce_target_threshold", 'has no effect without loss "bce"; set it, or remove the key'
        if self.class_weights is not None:
            if self.mixes:
                yield (
                    "class_weights",
                    "has no meaning with mixup or cutmix, whose images have several classes; remove one",
                )
            if self.loss != "cross_entropy":
                yield "class_weights", 'is for the loss "cross_entropy"; remove one'
            if isinstance(self.class_weights, list) and not any(self.class_weights):
                yield "class_weights", "should have a weight above 0"
