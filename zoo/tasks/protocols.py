"""Evaluation protocols: which views of an image the network sees, and how their logits are combined."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from zoo.config.limits import CropMode, Interpolation

if TYPE_CHECKING:  # commands that only list protocols do not import torch
    from torch import Tensor

    from zoo.config.experiment import Experiment
    from zoo.engine._task import Forward

Fusion = Literal["mean", "voting", "max"]  # fusion of the views of an image, see `zoo.tasks.tta`


class CropProtocol(NamedTuple):
    """Evaluation of a classifier: resizes the shorter side to ``scale`` px (-1: no resize), takes 1 or 10 crops.

    For ``interpolation`` and ``crop_mode`` see `zoo.config.network.Preprocessing`.
    """

    scale: int
    crop: int
    ten_crops: bool
    interpolation: Interpolation = "bilinear"
    crop_mode: CropMode = "center"

    @property
    def name(self) -> str:
        """Published name; a name such as ``tencrop32-scale36`` or ``center288-scale288-bicubic`` for others."""
        for name, protocol in PROTOCOLS.items():
            if protocol == self:
                return name
        scale = "original" if self.scale == -1 else str(self.scale)
        other = [each for each in (self.interpolation, self.crop_mode) if each not in ("bilinear", "center")]
        return "-".join([f"{'tencrop' if self.ten_crops else 'center'}{self.crop}", f"scale{scale}", *other])

    def logits(self, forward: Forward, images: Tensor) -> Tensor:
        """Return the logits (N, classes) of images (N, 3, h, w), or the mean logits of ten crops (N, 10, 3, h, w)."""
        if not self.ten_crops:
            return forward(images)
        return forward(images.flatten(0, 1)).unflatten(0, images.shape[:2]).mean(dim=1)


def center_crop(config: Experiment) -> CropProtocol:
    """Return the protocol of an experiment's own validation: the center crop of its ``input`` section."""
    images = config.input
    return CropProtocol(images.scale_val, images.crop_val, False, images.interpolation_val, images.crop_mode_val)


#: The three columns of the published table. The original project does not document the resizing for the 320 column;
#: shorter side 320 and center crop 320 were the usual convention of the time. ``--crop 320`` at the original's default
#: scale of 256 would have padded the images with black.
PROTOCOLS = {
    "center224": CropProtocol(scale=256, crop=224, ten_crops=False),
    "tencrop224": CropProtocol(scale=256, crop=224, ten_crops=True),
    "center320": CropProtocol(scale=320, crop=320, ten_crops=False),
}


class WholeImage(NamedTuple):
    """Evaluation of a segmentation: the whole image at one scale, with ``flip`` also mirrored."""

    flip: bool

    @property
    def name(self) -> str:
        """``whole`` or ``whole-flip``."""
        return "whole-flip" if self.flip else "whole"

    def logits(self, forward: Forward, images: Tensor) -> Tensor:
        """Return the logits (N, C, h, w) of images (N, 3, h, w); with ``flip`` the log of the summed probabilities."""
        logits = forward(images)
        if not self.flip:
            return logits
        mirrored = forward(images.flip(-1)).flip(-1)
        # The factor 1/2 of the mean is omitted: it changes neither the order of the classes nor the loss.
        return logits.log_softmax(dim=1).logaddexp(mirrored.log_softmax(dim=1))


#: Segmentation protocols by name, as in the ``expected`` blocks of experiments.
WHOLE_IMAGES = {protocol.name: protocol for protocol in (WholeImage(flip=False), WholeImage(flip=True))}
