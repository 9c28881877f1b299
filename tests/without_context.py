"""What the context branches of DeepLab's head are worth: the quickstart of segmentation with a head of one branch.

``python -m tests.without_context --seed 0 1 2 --json FILE`` takes the arguments of ``zoo quickstart`` and trains the
same network with the same settings, but for the head: its 1x1 convolution sees one cell of the body's map at a time,
and there are neither dilated convolutions nor means of the map.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from zoo.cli import main
from zoo.cli.quickstart import LOG_DIRS
from zoo.layers import DeeplabV3


class PlainHead(DeeplabV3):
    """The head without its context branches. ``dilations`` is taken and not used."""

    def __init__(self, *channels: int, dilations: Sequence[int] = (), **others: Any) -> None:
        super().__init__(*channels, dilations=(), **others)
        del self.global_pooling_conv, self.global_pooling_bn, self.pool_red_conv

    def forward(self, x: Tensor) -> Tensor:
        """Return what the 1x1 branch makes of a map, (N, out_channels, H, W)."""
        return self.red_bn(self.red_conv(self.map_bn(self.map_convs[0](x))))


if __name__ == "__main__":
    folders = {"segmentation": Path("runs/quickstart-without-context")}
    with mock.patch("zoo.models.deeplab.DeeplabV3", PlainHead), mock.patch.dict(LOG_DIRS, folders):
        raise SystemExit(main(["quickstart", "--task", "segmentation", *sys.argv[1:]]))
