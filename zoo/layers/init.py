"""The published weight initializations."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn

INIT_METHODS: dict[str, Callable[..., Tensor]] = {
    "xavier_normal": nn.init.xavier_normal_,
    "xavier_uniform": nn.init.xavier_uniform_,
    "kaiming_normal": nn.init.kaiming_normal_,
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "orthogonal": nn.init.orthogonal_,
}


def init_weights(
    module: nn.Module,
    method: str = "xavier_normal",
    gain_multiplier: float = 1.0,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
) -> None:
    """Initialize all convolutions and linear layers in place; norms are unchanged.

    ``method`` initializes the convolutions: xavier and orthogonal with ``gain_multiplier`` times the gain of the
    activation, kaiming with the slope of the activation (it ignores the multiplier). Linear layers get Xavier-uniform
    weights with gain 0.1. Biases are 0. The RevNets' "truncated_normal" and torch's own "torch" ignore multiplier and
    activation, and initialize linear layers differently: see `_init_truncated` and `reset_parameters`.
    """
    settings = _settings(method, gain_multiplier, activation, activation_param)
    for layer in module.modules():
        if not isinstance(layer, (nn.Conv2d, nn.Linear)):
            continue
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
        if method == "torch":
            layer.reset_parameters()
        elif method == "truncated_normal":
            _init_truncated(layer)
        elif isinstance(layer, nn.Conv2d):
            INIT_METHODS[method](layer.weight, **settings)
        else:
            nn.init.xavier_uniform_(layer.weight, gain=0.1)


def _settings(method: str, gain_multiplier: float, activation: str, activation_param: float) -> dict[str, float]:
    """Return the arguments of the function of a published method."""
    if method.startswith("kaiming"):
        return {"a": 0.0 if activation in ("relu", "elu") else activation_param}
    return {"gain": gain_multiplier * _gain(activation, activation_param)}


def _init_truncated(layer: nn.Conv2d | nn.Linear) -> None:
    """Initialize a convolution from a normal distribution with std sqrt(2 / (k k out)), truncated at two std.

    A linear layer is initialized uniformly within sqrt(3 / in). Source: the public code of Gomez et al. 2017.
    """
    weight = layer.weight
    if isinstance(layer, nn.Conv2d):
        std = math.sqrt(2 / (weight[0, 0].numel() * weight.shape[0]))
        nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
    else:
        bound = math.sqrt(3 / weight.shape[1])
        nn.init.uniform_(weight, -bound, bound)


def _gain(activation: str, activation_param: float) -> float:
    if activation == "leaky_relu":
        return nn.init.calculate_gain("leaky_relu", activation_param)
    return nn.init.calculate_gain("relu") if activation in ("relu", "elu") else 1.0
