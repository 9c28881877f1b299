"""DenseNet-BC (Huang et al. 2017) with growth 32 and compression 0.5."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from zoo.config.options import ModuleDilation, StemOptions
from zoo.layers.checkpointing import checkpoint
from zoo.layers.conv import build_stem, conv2d
from zoo.layers.dense import DenseModule, NormConv
from zoo.layers.norm import NormFactory, out_of_place
from zoo.models.base import Network, dilation_per_module
from zoo.models.family import CHECKPOINTED, family
from zoo.models.resnet import DILATIONS
from zoo.ops.abn.norm_act_conv import join
from zoo.ops.context import is_fx_proxy
from zoo.ops.pooling import mean_pool2d
from zoo.torch_internals.data import is_plain

GROWTH = 32


class DenseNetOptions(StemOptions):
    """Options of a DenseNet."""

    dilation: ModuleDilation = 1
    """Dilations of mod2 to mod5. They replace the pools before these modules: a number for all
    modules, or one per module ([1, 1, 2, 4]: output stride 8); set by output_stride."""


@family(
    "densenet",
    {
        "densenet121": {"structure": (6, 12, 24, 16)},
        "densenet169": {"structure": (6, 12, 32, 32)},
        "densenet201": {"structure": (6, 12, 48, 32)},
        "densenet264": {"structure": (6, 12, 64, 48)},
    },
    options=DenseNetOptions,
    memory=CHECKPOINTED,
    dilations=DILATIONS,
)
class DenseNet(Network):
    """Stem ``mod1``, dense modules ``mod2`` to ``mod5`` with transitions ``tra2`` to ``tra4``, last norm ``bn_out``.

    Args:
    - `structure`: the number of layers of each of the four modules.
    - `input_3x3`: make the stem of three 3x3 convolutions instead of one 7x7.
    - `dilation`: a number for all dense modules, or one number per module. A dilation other than 1 removes the pooling
      before the module.
    - `memory`: what is saved for backward, see `DenseModule`. It applies to transitions, too. "auto" and "checkpoint"
      save neither the concatenated outputs of modules nor the pools' inputs.
    - All others: see `Network`.
    """

    def __init__(
        self,
        norm: NormFactory,
        num_classes: int,
        *,
        structure: Sequence[int],
        features_only: bool = False,
        input_3x3: bool,
        dilation: int | Sequence[int],
        memory: str,
    ) -> None:
        super().__init__(features_only)
        self.memory = memory
        channels, reduction = 2 * GROWTH, 4
        self.mod1 = build_stem(channels, norm, input_3x3, memory)
        self._add_stage("mod1", channels=channels, reduction=reduction)
        for number, (layers, module_dilation) in enumerate(
            zip(structure, dilation_per_module(dilation), strict=True), start=2
        ):
            names = [f"mod{number}"]
            if number > 2:
                names.insert(0, f"tra{number - 1}")
                pool = module_dilation == 1
                self.add_module(names[0], _Transition(channels, channels // 2, norm, pool, memory))
                channels, reduction = channels // 2, reduction * (2 if pool else 1)
            module = DenseModule(channels, GROWTH, layers, norm, module_dilation, memory)
            channels = module.out_channels
            self.add_module(f"mod{number}", module)
            self._add_stage(*names, channels=channels, reduction=reduction)
        self.bn_out = out_of_place(norm(channels))
        self._add_classifier(num_classes)

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last feature map (N, num_features, H, W), normalized and activated.

        The next layer concatenates the maps of a module, so that they are saved only once. A changed module
        concatenates them itself, because hooks and replaced functions expect its output.
        """
        if self.memory == "plain":
            return super().forward_features(x)
        maps = [self.mod1(x)]
        for *transition, name in self._stages[1:]:
            for step in transition:
                maps = [self._run_transition(getattr(self, step), maps)]
            module = getattr(self, name)
            maps = module.maps(*maps) if is_plain(module, DenseModule) else [module(join(maps))]
        return self.bn_out(join(maps))

    def _run_stage(self, stage: tuple[str, ...], x: Tensor) -> Tensor:
        *transition, name = stage
        for step in transition:
            x = self._run_transition(getattr(self, step), [x])
        return getattr(self, name)(x)

    def _run_transition(self, transition: nn.Module, maps: list[Tensor]) -> Tensor:
        if not is_plain(transition, _Transition):
            maps = [join(maps)]
        if self.memory == "checkpoint" and not is_fx_proxy(maps[0]):
            return checkpoint(transition, *maps)
        return transition(*maps)


class _Transition(NormConv):
    """Norm and 1x1 convolution of the concatenated inputs, then, with ``pool``, 2x2 mean pooling."""

    def __init__(self, in_channels: int, out_channels: int, norm: NormFactory, pool: bool, memory: str) -> None:
        bn = out_of_place(norm(in_channels))  # forward may return its input as a feature
        super().__init__(bn, conv2d(in_channels, out_channels, 1), recompute=memory == "auto")
        self.pool, self.memory = pool, memory

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return (N, out_channels, H, W), or with pooling half that size, in a new tensor."""
        x = super().forward(*inputs)
        if not self.pool:
            return x
        return F.avg_pool2d(x, 2) if self.memory == "plain" else mean_pool2d(x)
