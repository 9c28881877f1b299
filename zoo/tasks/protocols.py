"""The protocols by which networks are scored: the views of an image that they are given, and what becomes of these."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # commands that only list the protocols do not wait for torch
    from torch import Tensor

    from zoo.config import Experiment
    from zoo.engine.task import Forward


class Protocol(NamedTuple):
    """Of classification: shorter side resized to ``scale`` px (-1 keeps it), then one crop or ten of ``crop`` px."""

    scale: int
    crop: int
    ten_crops: bool

    @property
    def name(self) -> str:
        """The published name, or a name such as ``tencrop32-scale36`` for other sizes."""
        for name, protocol in PROTOCOLS.items():
            if protocol == self:
                return name
        scale = "original" if self.scale == -1 else str(self.scale)
        return f"{'tencrop' if self.ten_crops else 'center'}{self.crop}-scale{scale}"

    def logits(self, forward: Forward, images: Tensor) -> Tensor:
        """Return the logits (N, classes) of images (N, 3, h, w), or as published the mean over (N, 10, 3, h, w)."""
        if not self.ten_crops:
            return forward(images)
        return forward(images.flatten(0, 1)).unflatten(0, images.shape[:2]).mean(dim=1)


def center_crop(config: Experiment) -> Protocol:
    """Return the protocol that an experiment validates with: the centre crop of its ``input`` section."""
    return Protocol(config.input.scale_val, config.input.crop_val, ten_crops=False)


#: The three columns of the published table. The original project documents nowhere how images were resized for the 320
#: column; this is the usual convention of its time (shorter side 320, centre crop 320). ``--crop 320`` with the
#: original's default scale of 256 would have padded the images with black instead.
PROTOCOLS = {
    "center224": Protocol(scale=256, crop=224, ten_crops=False),
    "tencrop224": Protocol(scale=256, crop=224, ten_crops=True),
    "center320": Protocol(scale=320, crop=320, ten_crops=False),
}


class WholeImage(NamedTuple):
    """Of segmentation: the whole image at one scale, alone or with its mirror image (``flip``)."""

    flip: bool

    @property
    def name(self) -> str:
        """``whole`` or ``whole-flip``."""
        return "whole-flip" if self.flip else "whole"

    def logits(self, forward: Forward, images: Tensor) -> Tensor:
        """Return the logits (N, C, h, w) of images (N, 3, h, w); with ``flip`` logarithms of the mean probabilities."""
        logits = forward(images)
        if not self.flip:
            return logits
        mirrored = forward(images.flip(-1)).flip(-1)
        # The factor of 1/2 is the same for all classes, and changes neither their order nor the loss.
        return logits.log_softmax(dim=1).logaddexp(mirrored.log_softmax(dim=1))


#: The ways to score a segmentation by their names, which are those in the ``expected`` blocks of experiments.
WHOLE_IMAGES = {protocol.name: protocol for protocol in (WholeImage(flip=False), WholeImage(flip=True))}
