"""The preprocessing of the images of a network: from its record, its package, or its architecture."""

from __future__ import annotations

from typing import Any

from zoo.config.architectures import ARCHITECTURES
from zoo.config.record import NetworkRecord, Preprocessing
from zoo.models.external import own_preprocessing
from zoo.registry.open import Opened, default_preprocessing
from zoo.weights import digests_of


def preprocessing_of(opened: Opened) -> Preprocessing:
    """Return the preprocessing of a network; for a network of another package, the preprocessing of its weights.

    Raises ConfigError as `own_preprocessing` does.
    """
    if images := opened.network.preprocessing or default_preprocessing(opened.spec):
        return images
    sha256 = None if opened.weights is None else digests_of(opened.weights.path)["sha256"]
    return own_preprocessing(opened.spec.arch, sha256)


def describe_images(record: NetworkRecord, in_chans: int = 3) -> dict[str, Any]:
    """Return the preprocessing of a record with the keys of `zoo.transforms` and of timm (input_size, crop_pct).

    Segmentation networks take whole images and have no sizes. The dict is empty if the preprocessing is unknown.
    """
    images = record.preprocessing
    if images is None:  # an external network, whose package may know it
        return {}
    cfg = {"mean": tuple(images.mean), "std": tuple(images.std), "interpolation": images.interpolation_val,
           "crop_mode": images.crop_mode_val}  # fmt: skip
    arch = ARCHITECTURES.get(record.spec.arch)  # None for an external network, which classifies
    if arch is not None and arch.task != "classification":
        return {**cfg, "scale": None, "crop": None}
    scale, crop = images.scale_val, images.crop_val
    crop_pct = 1.0 if scale == -1 else crop / scale
    return {**cfg, "scale": scale, "crop": crop, "input_size": (in_chans, crop, crop), "crop_pct": crop_pct}
