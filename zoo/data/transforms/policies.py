"""Automatic augmentation and color jitter of 8-bit images by torchvision and timm."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import AutoAugmentPolicy, InterpolationMode, v2

from zoo.config.experiment import TIMM_POLICY, Input
from zoo.data.seeding import seed_global_generators
from zoo.errors import ConfigError

POLICIES: dict[str, Callable[..., Any]] = {
    "randaugment": v2.RandAugment,
    "trivialaugment": v2.TrivialAugmentWide,
    "autoaugment": v2.AutoAugment,
    "augmix": v2.AugMix,
}


class Policy:
    """Applies the transform of ``augment_train``, then the one of a number in ``color_jitter_train``, to PIL images.

    These transforms draw from the global generators; a call seeds and then restores them. Raises ConfigError for a
    policy of timm if timm is not installed or rejects it.
    """

    def __init__(self, settings: Input) -> None:
        self.transforms: list[Callable[[Image.Image], Image.Image]] = []
        if settings.augment_train is not None:
            self.transforms.append(_augmentation(settings.augment_train, settings))
        if settings.color_jitter_train and settings.color_jitter_train is not True:
            self.transforms.append(v2.ColorJitter(*[settings.color_jitter_train] * 3))

    def __call__(self, pixels: Tensor, generator: Random) -> Tensor:
        """Return the augmented image (3, h, w), uint8. Floating-point pixels from 0 to 1 are rounded to 8 bits."""
        if pixels.is_floating_point():
            pixels = pixels.mul(255).round().to(torch.uint8)
        image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
        with seed_global_generators(generator):
            for transform in self.transforms:
                image = transform(image)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _augmentation(name: str, settings: Input) -> Callable[[Image.Image], Image.Image]:
    if name in POLICIES:
        params = settings.augment_params_train
        words = {"interpolation": InterpolationMode, "policy": AutoAugmentPolicy}
        try:
            arguments = {key: words.get(key, type(value))(value) for key, value in params.items()}
            transform: Callable[[Image.Image], Image.Image] = POLICIES[name](**arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                error, f"input.augment_params_train = {params}", "see torchvision.transforms.v2"
            ) from error
        return transform
    where = f"input.augment_train = {name}"
    if find_spec("timm") is None:
        raise ConfigError("policies of timm need that package", where, "pip install timm")
    # timm scales translations by the size of the image, and fills gaps with the mean color.
    try:
        _, policy, _ = import_module("timm.data").create_transform(
            settings.crop_train,
            is_training=True,
            separate=True,
            auto_augment=name.removeprefix(TIMM_POLICY),
            color_jitter=None,
            interpolation=settings.interpolation_train,
            mean=tuple(settings.mean),
            std=tuple(settings.std),
        )
    except (AssertionError, LookupError, ValueError) as error:
        what = f"timm rejects the policy ({type(error).__name__}: {error})"
        raise ConfigError(what, where, "write it as timm's --aa, for example timm:rand-m9-mstd0.5-inc1") from error
    return policy
