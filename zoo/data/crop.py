"""How small images are cropped and blanked for training: without resizing, on normalised values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.errors import DataError
from zoo.limits import MAX_PIXELS

MODES = {"zeros": "constant", "reflect": "reflect"}  # of an experiment -> of torch


@dataclass(frozen=True)
class PadCrop:
    """Pads an image by ``pad`` px on each side and cuts ``crop`` x ``crop`` px out of it at random.

    ``mode`` "zeros" fills with the mean colour, as values are normalised; "reflect" mirrors the image at its edges.
    """

    crop: int
    pad: int
    mode: str

    def __call__(self, image: Tensor) -> Tensor:
        """Return (C, crop, crop) of ``image`` (C, h, w); DataError where it is too small, or too large once padded."""
        height, width = image.shape[-2:]
        self._check(height, width)
        image = F.pad(image, [self.pad] * 4, MODES[self.mode])
        top, left = (_below(side + 2 * self.pad - self.crop + 1) for side in (height, width))
        return image[:, top : top + self.crop, left : left + self.crop]

    def _check(self, height: int, width: int) -> None:
        side = min(height, width)
        if (height + 2 * self.pad) * (width + 2 * self.pad) > MAX_PIXELS:
            raise DataError(
                f"an image of {width} x {height} px with {self.pad} px on each side would have more than "
                f"{MAX_PIXELS:,} px; input: a smaller pad_train"
            )
        if side + 2 * self.pad < self.crop:
            raise DataError(
                f"a crop of {self.crop} px does not fit into an image of {width} x {height} px with {self.pad} px on "
                "each side; input: a smaller crop_train, a larger pad_train, or images scaled by scale_train"
            )
        if self.mode == "reflect" and self.pad >= side:
            raise DataError(
                f"an image of {width} x {height} px cannot be reflected by {self.pad} px; input: a pad_train below "
                f"{side}, or images scaled by scale_train"
            )


@dataclass(frozen=True)
class Cutout:
    """Sets a square of ``side`` px, placed at random inside an image, to 0, the mean colour of normalised values."""

    side: int

    def __call__(self, image: Tensor) -> Tensor:
        """Return a copy of ``image`` (C, h, w) with the square blanked."""
        top, left = (_below(length - self.side + 1) for length in image.shape[-2:])
        image = image.clone()
        image[:, top : top + self.side, left : left + self.side] = 0
        return image


def _below(end: int) -> int:
    return int(torch.randint(end, ()))
