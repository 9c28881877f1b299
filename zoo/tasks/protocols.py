"""The protocols of classification: how an image is scaled and cropped before it is scored."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # commands that only list the protocols do not wait for torch
    from torch import Tensor

    from zoo.engine.task import Forward


class Protocol(NamedTuple):
    """Shorter side resized to ``scale`` px (-1 keeps it), then one centre crop or ten of ``crop`` px."""

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


#: The three columns of the published table. The original project documents nowhere how images were resized for the 320
#: column; this is the usual convention of its time (shorter side 320, centre crop 320). ``--crop 320`` with the
#: original's default scale of 256 would have padded the images with black instead.
PROTOCOLS = {
    "center224": Protocol(scale=256, crop=224, ten_crops=False),
    "tencrop224": Protocol(scale=256, crop=224, ten_crops=True),
    "center320": Protocol(scale=320, crop=320, ten_crops=False),
}
