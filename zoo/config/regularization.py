"""The ``regularization`` section: mixed images, and the loss of soft targets.

Tested by tests/data/test_mixing.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from zoo.spec.limits import MAX_EPOCHS
from zoo.spec.section import Section

Alpha = Annotated[float, Field(ge=0, le=1000)]
Probability = Annotated[float, Field(ge=0, le=1)]


class Regularization(Section):
    """Mixed images and the loss, for classification. Label smoothing is optimizer.label_smoothing."""

    classification_only = ("mixup", "cutmix", "loss")

    mixup: Alpha = 0.0
    """Mixup (Zhang et al. 2018): the weight of each of two images is drawn from Beta(mixup, mixup); 0: none."""
    cutmix: Alpha = 0.0
    """CutMix (Yun et al. 2019): the area of the rectangle that comes from another image is drawn from Beta(cutmix,
    cutmix); 0: none."""
    mix_probability: Probability = 1.0
    """Probability that a batch is mixed."""
    switch_probability: Probability = 0.5
    """Probability of CutMix rather than mixup for a mixed batch, if both are set."""
    mix_off_epoch: Annotated[int, Field(ge=0, le=MAX_EPOCHS)] | None = None
    """Number of epochs with mixed images, after which images are not mixed; null: all."""
    loss: Literal["cross_entropy", "bce"] = "cross_entropy"
    """Training loss: cross-entropy, or binary cross-entropy of each class (bce)."""
    bce_target_threshold: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Targets above this become 1 and all others 0, after mixing and label smoothing; null: targets stay soft."""
    bce_sum: bool = False
    """Whether bce is summed over the classes; otherwise it is their mean."""

    @property
    def mixes(self) -> bool:
        """Whether batches are mixed."""
        return self.mixup > 0 or self.cutmix > 0

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield settings without effect."""
        unset = Regularization.model_fields
        if not self.mixes:
            for key in ("mix_probability", "mix_off_epoch"):
                if getattr(self, key) != unset[key].default:
                    yield key, "has no effect without mixup or cutmix; set one, or remove the key"
        if self.switch_probability != unset["switch_probability"].default and not (self.mixup and self.cutmix):
            yield (
                "switch_probability",
                "has no effect unless mixup and cutmix are both set; set both, or remove the key",
            )
        if self.loss != "bce":
            for key in ("bce_target_threshold", "bce_sum"):
                if getattr(self, key) != unset[key].default:
                    yield key, 'has no effect without loss "bce"; set it, or remove the key'
