"""DenseNet-BC (Huang et al. 2017) with growth 32 and compression 0.5."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from torch import nn

from zoo.layers.conv import conv2d
from zoo.layers.dense import DenseModule
from zoo.layers.norm import NormFactory, out_of_place
from zoo.layers.stem import build_stem
from zoo.models.network import Network, dilation_per_module

GROWTH = 32


class DenseNet(Network):
    """Stem ``mod1``, dense modules ``mod2`` to ``mod5`` with transitions ``tra2`` to ``tra4`` between, ``bn_out``.

    ``input_3x3`` makes the stem of three 3x3 convolutions instead of one 7x7.  ``dilation`` is an int for all dense
    modules or one int per module; the pooling before a module with a dilation other than 1 is left out.
    """

    def __init__(
        self,
        norm: NormFactory,
        classes: int,
        *,
        structure: Sequence[int],
        features_only: bool = False,
        input_3x3: bool = False,
        dilation: int | Sequence[int] = 1,
    ) -> None:
        super().__init__(features_only)
        dilations = dilation_per_module(dilation, any_number=True)
        channels, reduction = 2 * GROWTH, 4
        self.mod1 = build_stem(channels, norm, input_3x3)
        self._add_stage("mod1", channels=channels, reduction=reduction)
        for number, (layers, module_dilation) in enumerate(zip(structure, dilations, strict=True), start=2):
            names = [f"mod{number}"]
            if number > 2:
                names.insert(0, f"tra{number - 1}")
                pool = module_dilation == 1
                self.add_module(names[0], _transition(channels, channels // 2, norm, pool))
                channels, reduction = channels // 2, reduction * (2 if pool else 1)
            module = DenseModule(channels, GROWTH, layers, norm, module_dilation)
            channels = module.out_channels
            self.add_module(f"mod{number}", module)
            self._add_stage(*names, channels=channels, reduction=reduction)
        self.bn_out = out_of_place(norm(channels))
        self._add_classifier(classes)


def _transition(in_channels: int, out_channels: int, norm: NormFactory, pool: bool) -> nn.Sequential:
    bn = out_of_place(norm(in_channels))  # reads a stage's output, which may be a returned feature
    layers: OrderedDict[str, nn.Module] = OrderedDict(bn=bn, conv=conv2d(in_channels, out_channels, 1))
    if pool:
        layers["pool"] = nn.AvgPool2d(2)
    return nn.Sequential(layers)


ARCHITECTURES = {
    "densenet121": partial(DenseNet, structure=(6, 12, 24, 16)),
    "densenet169": partial(DenseNet, structure=(6, 12, 32, 32)),
    "densenet201": partial(DenseNet, structure=(6, 12, 48, 32)),
    "densenet264": partial(DenseNet, structure=(6, 12, 64, 48)),
}
