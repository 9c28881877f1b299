"""WiderResNet (Wu et al. 2016): few and wide pre-activation blocks; plain, and the ``_a2`` form for segmentation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from zoo.errors import ConfigError
from zoo.layers.conv import conv2d
from zoo.layers.ends import max_pool
from zoo.layers.norm import NormFactory, out_of_place
from zoo.layers.residual import IdentityResidualBlock
from zoo.models.memory import build_stage
from zoo.models.network import Network

CHANNELS = ((128, 128), (256, 256), (512, 512), (512, 1024), (512, 1024, 2048), (1024, 2048, 4096))


class WiderResNet(Network):
    """``mod1`` (one 3x3 convolution) and six modules ``mod2`` to ``mod7``; pools before mod2 to mod6, no strides.

    ``memory`` says what is kept for backward.  "auto": of each block the norms' outputs, of the pools one byte each.
    "unwind": in each module without those of the blocks' first norms; "unwind_3x3": of bottlenecks without those of
    the last norms either (`UnwoundSequential`).  "checkpoint": the blocks' inputs; each is run again.
    "checkpoint_norms", "checkpoint_xhat": the norms' inputs, or x_hat: the paper's Figure 2 b and c, which hold as much
    as "auto", its Figure 2 d.  "plain": as "auto", but the pools are torch's.
    """

    def __init__(
        self,
        norm: NormFactory,
        classes: int,
        *,
        structure: Sequence[int],
        features_only: bool = False,
        memory: str,
    ) -> None:
        super().__init__(features_only)
        _add_modules(self, norm, classes, structure, memory, pooled=range(2, 7), strides={}, dilations={}, dropout={})


class WiderResNetA2(Network):
    """WiderResNet with two pools, strides in mod4 to mod6 and channel dropout in mod6 (0.3) and mod7 (0.5).

    ``dilation`` (a truth value, as published, but the number 1 is none) keeps the output at 1/8: mod5 and mod6 lose
    their strides, mod5 is dilated by 2, mod6 and mod7 by 4.  ``memory``: see `WiderResNet`; with
    "unwind_3x3" blocks with dropout keep their last norm's output.
    """

    def __init__(
        self,
        norm: NormFactory,
        classes: int,
        *,
        structure: Sequence[int],
        features_only: bool = False,
        dilation: bool | int | Sequence[int],
        memory: str,
    ) -> None:
        super().__init__(features_only)
        if not isinstance(dilation, (int, list, tuple)):
            raise ConfigError(f"dilation must be true, false, a number or a list of numbers, got {dilation!r}")
        dilated = dilation is True or (bool(dilation) and dilation != 1)
        strides = {4: 2} if dilated else {4: 2, 5: 2, 6: 2}
        dilations = {5: 2, 6: 4, 7: 4} if dilated else {}
        dropout = {6: 0.3, 7: 0.5}
        _add_modules(self, norm, classes, structure, memory, range(2, 4), strides, dilations, dropout)


def _add_modules(
    network: Network,
    norm: NormFactory,
    classes: int,
    structure: Sequence[int],
    memory: str,
    pooled: range,
    strides: dict[int, int],
    dilations: dict[int, int],
    dropout: dict[int, float],
) -> None:
    """Register mod1 to mod7, bn_out and the classifier; the dicts hold, per module number, what is not the default."""
    network.mod1 = nn.Sequential(OrderedDict(conv1=conv2d(3, 64, 3)))
    network._add_stage("mod1", channels=64, reduction=1)
    in_channels, reduction = 64, 1
    for number, (blocks, channels) in enumerate(zip(structure, CHANNELS, strict=True), start=2):
        module: OrderedDict[str, nn.Module] = OrderedDict()
        for block in range(1, blocks + 1):
            module[f"block{block}"] = IdentityResidualBlock(
                in_channels,
                channels,
                norm,
                stride=strides.get(number, 1) if block == 1 else 1,
                dilation=dilations.get(number, 1),
                dropout=dropout.get(number, 0.0),
            )
            in_channels = channels[-1]
        names = [f"mod{number}"]
        if number in pooled:
            names.insert(0, f"pool{number}")
            network.add_module(names[0], max_pool(memory))
            reduction *= 2
        reduction *= strides.get(number, 1)
        network.add_module(f"mod{number}", build_stage(module, memory))
        network._add_stage(*names, channels=in_channels, reduction=reduction)
    network.bn_out = out_of_place(norm(in_channels))
    network._add_classifier(classes)
