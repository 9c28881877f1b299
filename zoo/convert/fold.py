"""Folds evaluation-mode norms into the convolutions before them, for inference."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from zoo.convert.norm_conversion import NormPlan, apply_plans, replace_modules
from zoo.convert.trace import Trace
from zoo.layers.invertible import InvertibleNorm
from zoo.layers.norm import ABN, InPlaceABN, activate_
from zoo.torch_internals import forward_hooks


class Activation(nn.Module):
    """Activation of a folded norm; overwrites its input, the convolution's output.

    Args:
    - `activation`: activation of the norm; residual blocks read this attribute.
    - `activation_param`: slope of leaky_relu or alpha of elu.
    """

    def __init__(self, activation: str = "identity", activation_param: float = 0.01) -> None:
        super().__init__()
        self.activation = activation
        self.activation_param = activation_param

    def forward(self, x: Tensor) -> Tensor:
        """Overwrite x with its activation and return it."""
        return activate_(x, self.activation, self.activation_param)

    def extra_repr(self) -> str:
        """Return the name of the activation, with its parameter if it has one."""
        return self.activation + (f"[{self.activation_param}]" if self.activation in ("leaky_relu", "elu") else "")


@torch.no_grad()
def fold_network(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` for inference whose norms are folded into the convolutions before them.

    A norm with scale g, shift b, running mean m and running variance v multiplies the filters before it by
    g / sqrt(v + eps), and the bias becomes b + (bias - m) g / sqrt(v + eps). A norm is folded if it directly follows a
    convolution whose output nothing else reads, and has no forward hooks. Other in-place norms become `ABN` (out of
    place); the norms of `InvertibleNorm` are unchanged. The copy is in evaluation mode; ``model`` is not modified.
    Raises ConversionError if it cannot be traced.
    """
    folded = copy.deepcopy(model).eval().requires_grad_(False)
    parts = dict(folded.named_modules())
    invertible = {id(part.norm) for part in parts.values() if isinstance(part, InvertibleNorm)}
    in_place = {n: part for n, part in parts.items() if isinstance(part, InPlaceABN) and id(part) not in invertible}
    plans = [NormPlan(name, norm, norm.activation, norm.activation_param, True) for name, norm in in_place.items()]
    apply_plans(folded, plans, "standard")
    trace = Trace(folded)
    modules: dict[str, Any] = trace.modules
    norms = {n: part for n, part in modules.items() if type(part) is nn.BatchNorm2d or isinstance(part, ABN)}
    norms = {name: n for name, n in norms.items() if n.running_mean is not None and not forward_hooks(n)}
    convolutions = {name: conv for name in norms if (conv := trace.convolution_before(name)) is not None}
    replaced: dict[int, nn.Module] = {}
    for name, conv in convolutions.items():
        norm = norms[name]
        _fold_into(trace.modules[conv], norm)
        replaced[id(norm)] = (
            Activation(norm.activation, norm.activation_param) if isinstance(norm, ABN) else Activation()
        )
    replace_modules(folded, replaced)
    return folded


def _fold_into(conv: Any, norm: Any) -> None:
    """Change filters and bias of ``conv`` in place so that it computes conv followed by ``norm``."""
    factor = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        factor = factor * norm.weight.double()
    bias = -norm.running_mean.double() if conv.bias is None else conv.bias.double() - norm.running_mean.double()
    bias = bias * factor if norm.bias is None else bias * factor + norm.bias.double()
    dtype = conv.weight.dtype
    conv.weight.copy_((conv.weight.double() * factor.view(-1, *[1] * (conv.weight.dim() - 1))).to(dtype))
    conv.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
