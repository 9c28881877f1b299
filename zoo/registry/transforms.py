"""`zoo.transforms`: the preprocessing of a network, for images, arrays and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from zoo.config.parse import parse_experiment
from zoo.data.transforms.classification import TrainTransform, Transform, ValTransform
from zoo.errors import ConfigError, join_names
from zoo.registry.open import find_network
from zoo.registry.preprocessing import describe_images, preprocessing_of

CFG_KEYS = ("mean", "std", "scale", "crop", "interpolation")


def transforms(
    name_or_cfg: str | nn.Module | Mapping[str, Any],
    *,
    training: bool = False,
    ten_crops: bool = False,
    scale: int | None = None,
    crop: int | None = None,
) -> Transform:
    """Return the preprocessing of a model: a callable from an image to a normalized (3, crop, crop) tensor.

    Args:
    - `name_or_cfg`: a model's name, a model, or its ``pretrained_cfg``.
    - `training`: random resized crop and flip in place of resize and center crop; for color jitter and lighting
      see `zoo.data.transforms.classification.TrainTransform`.
    - `ten_crops`: return (10, 3, crop, crop); validation only.
    - `scale`, `crop`: shorter side of the resized image (-1: not resized; validation only) and side of the crop, in px,
      in place of the model's.

    The callable takes a PIL image, a uint8 array (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), which is converted as PIL
    does, or a tensor (C, H, W) of 1 or 3 channels: uint8, or floating-point with values in [0, 1]. A batch of tensors
    (N, C, H, W) gives (N, 3, crop, crop); in training, each image is cropped and flipped independently. The published
    scores are for PIL images. Tensors are resized in float32 (bilinear, antialiased), without PIL's rounding to 8
    bits: their values differ by up to 1/255 before the normalization.

    Raises ConfigError for an unknown name, for settings that exclude each other, and for a segmentation network without
    scale and crop, because it takes whole images. The callable raises DataError for anything but an image, and for an
    image that is smaller than the crop.
    """
    cfg = _cfg_of(name_or_cfg)
    if training and ten_crops:
        raise ConfigError("ten crops are for validation", "zoo.transforms", "give training or ten_crops, not both")
    if training and scale is not None:
        raise ConfigError(
            f"scale={scale!r} belongs to validation", "zoo.transforms", "give training or scale, not both"
        )
    crop, scale = cfg["crop"] if crop is None else crop, cfg["scale"] if scale is None else scale
    if crop is None or (scale is None and not training):
        raise ConfigError(
            "segmentation networks take whole images and have no scale and crop",
            "zoo.transforms",
            "give scale and crop, or normalize whole images by the mean and std of pretrained_cfg, as zoo segment does",
        )
    sizes = {"crop_train": crop} if training else {"crop_val": crop, "scale_val": scale}
    if not training:
        sizes |= {"interpolation_val": cfg["interpolation"], "crop_mode_val": cfg.get("crop_mode") or "center"}
    content = {"input": {**sizes, "mean": list(cfg["mean"]), "std": list(cfg["std"])}}
    settings = parse_experiment(content, "zoo.transforms").input
    if training:
        return TrainTransform(settings)
    return ValTransform(
        settings.scale_val, settings.crop_val, settings.mean, settings.std, ten_crops,
        settings.interpolation_val, settings.crop_mode_val,
    )  # fmt: skip


def _cfg_of(source: str | nn.Module | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the ``pretrained_cfg`` of a name or model, or the mapping. Raises ConfigError if keys are missing."""
    if isinstance(source, str):
        opened = find_network(source)
        source = describe_images(opened.network.model_copy(update={"preprocessing": preprocessing_of(opened)}))
    cfg = source if isinstance(source, Mapping) else getattr(source, "pretrained_cfg", None) or {}
    if missing := [key for key in CFG_KEYS if key not in cfg]:
        what = "the mapping has no" if source is cfg else f"{type(source).__name__} has no pretrained_cfg with"
        remedy = f"give a model of zoo.get, a name of zoo.list_models, or a mapping with {join_names(CFG_KEYS)}"
        raise ConfigError(f"{what} {join_names(missing)}", "zoo.transforms", remedy)
    return cfg
