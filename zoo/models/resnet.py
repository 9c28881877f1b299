"""ResNet v1 (He et al. 2016) and its residual block. Bottlenecks have their stride on the 3x3 convolution."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zoo.config.options import ModuleDilation, StochasticDepth
from zoo.layers.checkpointing import build_stage
from zoo.layers.conv import conv2d, drop_path, max_pool
from zoo.layers.norm import InPlaceABN, InPlaceABNSync, NormFactory, activate_
from zoo.models.base import Network, dilation_per_module
from zoo.models.family import CHECKPOINTED, family
from zoo.ops.context import is_fx_proxy
from zoo.torch_internals.data import is_plain

# The dilations of mod2 to mod5 for strides 32, 16 and 8 of the last feature map.
DILATIONS = {32: 1, 16: [1, 1, 1, 2], 8: [1, 1, 2, 4]}


class ResNetOptions(StochasticDepth):
    """Options of a ResNet."""

    dilation: ModuleDilation = 1
    """Dilations of mod2 to mod5. They replace strides: a number for all modules, or one per module ([1, 1, 2, 4]:
    output stride 8); set by output_stride."""


@family(
    "resnet",
    {
        "resnet18": {"structure": (2, 2, 2, 2), "bottleneck": False},
        "resnet34": {"structure": (3, 4, 6, 3), "bottleneck": False},
        "resnet50": {"structure": (3, 4, 6, 3), "bottleneck": True},
        "resnet101": {"structure": (3, 4, 23, 3), "bottleneck": True},
        "resnet152": {"structure": (3, 8, 36, 3), "bottleneck": True},
    },
    options=ResNetOptions,
    memory=CHECKPOINTED,
    dilations=DILATIONS,
    ignores_input_3x3=True,
)
class ResNet(Network):
    """Stem ``mod1`` and four modules of post-activation residual blocks, ``mod2`` to ``mod5``.

    Args:
    - `structure`: the number of blocks of each of the four modules.
    - `bottleneck`: blocks of three convolutions, with four times as many outer channels, instead of two.
    - `dilation`: a number for all modules, or one per module. A number other than 1 removes the module's stride (for
      mod2: the stem's pooling).
    - `memory`: what is saved for backward. "auto": the outputs of in-place norms; for the last norm of a block only the
      block's output, or both in half precision. "checkpoint": the blocks' inputs; backward recomputes each block.
      "plain": the outputs of all norms and blocks, and the input of torch's pooling.
    - All others: see `Network`.
    """

    def __init__(
        self,
        norm: NormFactory,
        num_classes: int,
        *,
        structure: Sequence[int],
        bottleneck: bool,
        features_only: bool = False,
        dilation: int | Sequence[int],
        memory: str,
    ) -> None:
        super().__init__(features_only)
        dilations = dilation_per_module(dilation)
        stem: OrderedDict[str, nn.Module] = OrderedDict(conv1=conv2d(3, 64, 7, stride=2), bn1=norm(64))
        if dilations[0] == 1:
            stem["pool1"] = max_pool(memory)
        self.mod1 = nn.Sequential(stem)
        reduction = 4 if dilations[0] == 1 else 2
        self._add_stage("mod1", channels=64, reduction=reduction)
        in_channels = 64
        for index, (blocks, module_dilation) in enumerate(zip(structure, dilations, strict=True)):
            width = 64 * 2**index
            channels = (width, width, 4 * width) if bottleneck else (width, width)
            stride = 2 if index > 0 and module_dilation == 1 else 1
            module = [ResidualBlock(in_channels, channels, norm, stride, module_dilation, memory)]
            in_channels, reduction = channels[-1], reduction * stride
            for _ in range(blocks - 1):
                module.append(ResidualBlock(in_channels, channels, norm, 1, module_dilation, memory))
            self.add_module(f"mod{index + 2}", build_stage(module, memory))
            self._add_stage(f"mod{index + 2}", channels=in_channels, reduction=reduction)
        self._add_classifier(num_classes)


class ResidualBlock(nn.Module):
    """Post-activation residual block, f(branch(x) + shortcut(x)) (He et al. 2016). Does not modify x.

    The last norms of branch and shortcut have no activation; f is the activation of the first norm.

    Args:
    - `in_channels`: channels of x.
    - `channels`: output channels of the convolutions: two for a basic block, three for a bottleneck.
    - `norm`: channels -> norm with activation.
    - `stride`: stride of the first 3x3 convolution.
    - `dilation`: dilation of the 3x3 convolutions.
    - `memory`: unless it is "plain", an in-place last norm adds the shortcut and applies the activation itself in
      single and double precision, so that its own output is not saved in addition to the result. A norm with hooks does
      not, and no norm does in half precision, where its gradient is accurate only if |weight| is at least 0.01
      rms(sum).

    The attribute ``drop_path`` is the probability that training drops the branch for an image; 0 by default.
    """

    drop_path = 0.0

    def __init__(
        self,
        in_channels: int,
        channels: Sequence[int],
        norm: NormFactory,
        stride: int = 1,
        dilation: int = 1,
        memory: str = "auto",
    ) -> None:
        super().__init__()
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if len(channels) == 3:  # a bottleneck
            layers["conv1"] = conv2d(in_channels, channels[0], 1)
            layers["bn1"] = norm(channels[0])
            layers["conv2"] = conv2d(channels[0], channels[1], 3, stride=stride, dilation=dilation)
            layers["bn2"] = norm(channels[1])
            layers["conv3"] = conv2d(channels[1], channels[2], 1)
            layers["bn3"] = _without_activation(norm(channels[2]))
        else:
            layers["conv1"] = conv2d(in_channels, channels[0], 3, stride=stride, dilation=dilation)
            layers["bn1"] = norm(channels[0])
            layers["conv2"] = conv2d(channels[0], channels[1], 3, dilation=dilation)
            layers["bn2"] = _without_activation(norm(channels[1]))
        self.convs = _Branch(layers)
        self.memory = memory
        self.has_projection = stride != 1 or in_channels != channels[-1]
        if self.has_projection:
            self.proj_conv = conv2d(in_channels, channels[-1], kernel_size=1, stride=stride)
            self.proj_bn = _without_activation(norm(channels[-1]))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output in a new tensor."""
        shortcut = self.proj_bn(self.proj_conv(x)) if self.has_projection else x
        first_norm: Any = self.convs.bn1
        activation = first_norm.activation, first_norm.activation_param
        return self.convs(x, shortcut, activation, self.memory, self.drop_path if self.training else 0.0)


class _Branch(nn.Sequential):
    """The layers of a post-activation branch. The last layer is a norm without activation."""

    def forward(  # type: ignore[override]
        self, x: Tensor, shortcut: Tensor, activation: tuple[str, float], memory: str, drop_probability: float
    ) -> Tensor:
        """Return f(layers(x) + shortcut) in a new tensor; layers(x) is dropped for random images (stochastic depth)."""
        *layers, norm = self
        for layer in layers:
            x = layer(x)
        if drop_probability:
            return activate_(drop_path(norm(x), drop_probability) + shortcut, *activation)
        if memory != "plain" and _can_fuse(norm, x, shortcut, activation):
            return norm(x, shortcut, activation)
        return activate_(norm(x) + shortcut, *activation)


def _can_fuse(norm: Any, x: Tensor, shortcut: Tensor, activation: tuple[str, float]) -> bool:
    """Return whether the norm can add the shortcut, activate the sum, and recover the sum precisely enough."""
    return (
        not is_fx_proxy(x)
        and is_plain(norm, InPlaceABN, InPlaceABNSync)  # hooks and other functions expect the norm's own output
        and norm.activation == "identity"
        and activation[0] in norm.activations
        and (x.shape, x.dtype) == (shortcut.shape, shortcut.dtype)
        and x.dtype in (torch.float32, torch.float64)
    )


def _without_activation(norm: Any) -> Any:
    if not hasattr(norm, "activation"):
        raise ValueError(
            f"{type(norm).__name__} has no attribute `activation`, which post-activation ResNets set to identity; use "
            "norms that have one (ABN, InPlaceABN, InPlaceABNSync)"
        )
    norm.activation = "identity"
    return norm
