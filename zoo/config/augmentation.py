"""Parameters of the augmentations that ``input.augment_train`` names, as in torchvision.transforms.v2.

Tested by tests/data/test_policies.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from zoo.spec.limits import MAX_BLOCKS
from zoo.spec.section import Section

TIMM_POLICY = "timm:"  # the beginning of a policy of timm

PolicyInterpolation = Literal["nearest", "bilinear", "bicubic"]
Count = Annotated[int, Field(ge=1, le=MAX_BLOCKS)]
NumBins = Annotated[int, Field(ge=2, le=MAX_BLOCKS)]


class RandAugmentParams(Section):
    """Parameters of RandAugment (Cubuk et al. 2020)."""

    num_ops: Count = 2
    """Number of operations, one after the other."""
    magnitude: Annotated[int, Field(ge=0, le=MAX_BLOCKS)] = 9
    """Strength of the operations, less than num_magnitude_bins."""
    num_magnitude_bins: NumBins = 31
    """Number of strengths."""
    interpolation: PolicyInterpolation = "nearest"
    """Interpolation of rotations, translations and shears; torchvision's training script uses bilinear."""


class TrivialAugmentParams(Section):
    """Parameters of TrivialAugment (Müller and Hutter 2021), in its wide form."""

    num_magnitude_bins: NumBins = 31
    """Number of strengths."""
    interpolation: PolicyInterpolation = "nearest"
    """Interpolation of rotations, translations and shears; torchvision's training script uses bilinear."""


class AutoAugmentParams(Section):
    """Parameters of AutoAugment (Cubuk et al. 2019)."""

    policy: Literal["imagenet", "cifar10", "svhn"] = "imagenet"
    """Data set that the policy was found on."""
    interpolation: PolicyInterpolation = "nearest"
    """Interpolation of rotations, translations and shears; torchvision's training script uses bilinear."""


class AugMixParams(Section):
    """Parameters of AugMix (Hendrycks et al. 2020)."""

    severity: Annotated[int, Field(ge=1, le=10)] = 3
    """Strength of the operations."""
    mixture_width: Count = 3
    """Number of chains of operations that are mixed."""
    chain_depth: Annotated[int, Field(ge=-1, le=MAX_BLOCKS)] = -1
    """Number of operations of a chain; -1: 1 to 3 at random."""
    alpha: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Parameter of the Beta and Dirichlet distributions that the weights are drawn from."""
    all_ops: bool = True
    """Whether brightness, contrast, saturation and sharpness are among the operations."""
    interpolation: PolicyInterpolation = "bilinear"
    """Interpolation of rotations, translations and shears."""


#: The augmentations of torchvision.transforms.v2, and their parameters.
AUGMENT_PARAMS: dict[str, type[Section]] = {
    "randaugment": RandAugmentParams,
    "trivialaugment": TrivialAugmentParams,
    "autoaugment": AutoAugmentParams,
    "augmix": AugMixParams,
}
