"""What happens to a picture between the file and the network, as the published networks were trained and scored.

Everything random draws from torch's global CPU generator, so that whoever seeds it decides the result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import transforms as tv

from zoo import registry
from zoo.config import Input
from zoo.data.color import ColorJitter, Lighting
from zoo.data.crop import Cutout, PadCrop
from zoo.data.reading import MAX_PIXELS, read_picture, to_rgb
from zoo.errors import ConfigError, DataError, printable

KEEP_SCALE = -1
BILINEAR = tv.InterpolationMode.BILINEAR

Transform = Callable[[Image.Image], Tensor]


def transforms(
    name_or_cfg: str | nn.Module | Mapping[str, Any], *, training: bool = False, ten_crops: bool = False
) -> Transform:
    """Return the preprocessing of a model: a callable from a PIL picture to a normalised (3, crop, crop) tensor.

    ``name_or_cfg``: a model's name, a model, or its ``pretrained_cfg``. ``training``: random resized crop and
    flip in place of resize and centre crop; colour jitter and lighting belong to an experiment, see
    ``train_transform``. ``ten_crops``: (10, 3, crop, crop), validation only. Raises ConfigError for an unknown
    name and for settings that do not go together.
    """
    cfg = _pretrained_cfg(name_or_cfg)
    if cfg["interpolation"] != "bilinear":
        raise ConfigError(f"interpolation is {cfg['interpolation']!r}; pretrained_cfg: only 'bilinear' is known")
    if training and ten_crops:
        raise ConfigError("ten crops are for validation; zoo.transforms: give training or ten_crops, not both")
    mean, std = list(cfg["mean"]), list(cfg["std"])
    if training:
        return train_transform(Input(crop_train=cfg["crop"], mean=mean, std=std))
    return val_transform(cfg["scale"], cfg["crop"], mean, std, ten_crops=ten_crops)


def train_transform(settings: Input) -> Transform:
    """Return the training transform of an experiment's ``input``: PIL picture -> normalised (3, crop, crop).

    [shorter side to scale_train] -> crop of 0.08..1 of the area and 3/4..4/3 in shape, resized -> mirrored in
    half of the cases -> [0, 1] -> [colour jitter] -> [lighting] -> normalised -> [cutout]. With ``pad_train``
    the crop is one of the padded picture, not resized, and comes after the normalisation.
    """
    steps: list[Callable[[Any], Any]] = [to_rgb, *_resize(settings.scale_train)]
    if settings.pad_train is None:
        steps += [tv.RandomResizedCrop(settings.crop_train, interpolation=BILINEAR)]
    steps += [tv.RandomHorizontalFlip(), tv.ToTensor()]
    if settings.color_jitter_train:
        steps += [ColorJitter()]
    if settings.lighting_train:
        steps += [Lighting()]
    steps += [tv.Normalize(settings.mean, settings.std)]
    if settings.pad_train is not None:
        steps += [PadCrop(settings.crop_train, settings.pad_train, settings.pad_mode_train)]
    if settings.cutout_train:
        steps += [Cutout(settings.cutout_train)]
    return tv.Compose(steps)


def val_transform(
    scale: int, crop: int, mean: Sequence[float], std: Sequence[float], ten_crops: bool = False
) -> Transform:
    """Return the validation transform: PIL picture -> normalised (3, crop, crop), or (10, 3, crop, crop).

    Shorter side to ``scale`` px (-1 keeps the size), then the centre of ``crop`` px, or four corners and centre
    and their mirror images. Raises ConfigError when the crop is larger than the scale; the transform raises
    DataError when it is larger than a picture that is not scaled (torchvision would pad it with black).
    """
    if scale != KEEP_SCALE and crop > scale:
        raise ConfigError(
            f"a crop of {crop} px does not fit into pictures scaled to {scale} px; crop and scale of validation: "
            f"scale to {crop} px or more, or crop {scale} px or less"
        )
    normalise = tv.Compose([tv.ToTensor(), tv.Normalize(list(mean), list(std))])
    cut = TenCrops(crop, normalise) if ten_crops else tv.Compose([tv.CenterCrop(crop), normalise])
    return tv.Compose([to_rgb, *_resize(scale), CheckSize(crop, scale), cut])


def prepare(path: Path, transform: Transform) -> Tensor:
    """Return what ``transform`` makes of the picture in ``path``; DataError that names the file where it cannot."""
    picture = read_picture(path)
    try:
        return transform(picture)
    except DataError as error:
        raise DataError(f"{printable(path)}: {error}") from error


class Resize:
    """Scales a picture until its shorter side has ``size`` px; DataError where it would have too many pixels then.

    A long and thin picture of a few bytes could fill the memory otherwise.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.resize = tv.Resize(size, interpolation=BILINEAR)

    def __call__(self, image: Image.Image) -> Image.Image:
        """Return the scaled ``image``."""
        shorter, longer = sorted(image.size)
        if self.size * (self.size * longer // shorter) > MAX_PIXELS:
            raise DataError(
                f"a picture of {image.width} x {image.height} px would be resized to {self.size} x "
                f"{self.size * longer // shorter} px, more than {MAX_PIXELS:,} px; scale: make it smaller, or cut the "
                "picture"
            )
        return self.resize(image)


class CheckSize:
    """Passes a PIL picture on, or raises DataError when a crop does not fit into it."""

    def __init__(self, crop: int, scale: int) -> None:
        self.crop = crop
        self.scale = scale

    def __call__(self, image: Image.Image) -> Image.Image:
        """Return ``image`` itself."""
        if min(image.size) < self.crop:
            width, height = image.size
            raise DataError(
                f"a crop of {self.crop} px does not fit into a picture of {width} x {height} px (scale "
                f"{self.scale}); validation: crop {min(image.size)} px or less, or scale to {self.crop} px or more"
            )
        return image


class TenCrops:
    """Cuts a PIL picture into four corners and centre and their mirror images, each made a tensor."""

    def __init__(self, crop: int, to_tensor: Callable[[Image.Image], Tensor]) -> None:
        self.cut = tv.TenCrop(crop)
        self.to_tensor = to_tensor

    def __call__(self, image: Image.Image) -> Tensor:
        """Return the crops, (10, 3, crop, crop)."""
        return torch.stack([self.to_tensor(part) for part in self.cut(image)])


def _resize(scale: int) -> list[Callable[[Image.Image], Image.Image]]:
    return [] if scale == KEEP_SCALE else [Resize(scale)]


def _pretrained_cfg(name_or_cfg: str | nn.Module | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(name_or_cfg, Mapping):
        return name_or_cfg
    if isinstance(name_or_cfg, str):
        # Without memory and initialisation, to look at its settings alone; a file's weights need memory to go to.
        with torch.device("cpu" if os.path.isfile(name_or_cfg) else "meta"):
            name_or_cfg = registry.get(name_or_cfg)
    cfg = getattr(name_or_cfg, "pretrained_cfg", None)
    if cfg is None:
        raise ConfigError(
            f"{type(name_or_cfg).__name__} has no pretrained_cfg; zoo.transforms: give a model of zoo.get, "
            "a name of zoo.list_models, or a mapping with mean, std, scale, crop and interpolation"
        )
    return dict(cfg)
