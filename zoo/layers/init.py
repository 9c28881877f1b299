"""The published weight initialisations."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn

METHODS: dict[str, Callable[..., Tensor]] = {
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
    """Initialise the weights of all convolutions and linear layers in place; norms are left at weight 1 and bias 0.

    Convolutions are initialised by ``method``: xavier and orthogonal with ``gain_multiplier`` times the gain of the
    activation, kaiming with the slope of the activation (it ignores the multiplier). Linear layers get Xavier-uniform
    weights of gain 0.1, and all biases 0. The RevNets' "truncated_normal" and torch's own "torch" ignore multiplier and
    activation, and have their own rules for linear layers: see `_init_truncated` and `_init_as_torch`.
    """
    init_layer = _OWN.get(method)
    if init_layer is None:
        init_layer = _published(method, gain_multiplier, activation, activation_param)
    for layer in module.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
            init_layer(layer)


def _published(
    method: str, gain_multiplier: float, activation: str, activation_param: float
) -> Callable[[nn.Conv2d | nn.Linear], None]:
    fill = METHODS[method]
    if method.startswith("kaiming"):
        settings = {"a": 0.0 if activation in ("relu", "elu") else activation_param}
    else:
        settings = {"gain": gain_multiplier * _gain(activation, activation_param)}

    def init_layer(layer: nn.Conv2d | nn.Linear) -> None:
        if isinstance(layer, nn.Conv2d):
            fill(layer.weight, **settings)
        else:
            nn.init.xavier_uniform_(layer.weight, gain=0.1)

    return init_layer


def _init_truncated(layer: nn.Conv2d | nn.Linear) -> None:
    """Initialise a convolution from a normal distribution of std sqrt(2 / (k k out)), truncated at two std.

    A linear layer is initialised uniformly within sqrt(3 / in). Source: the public code of Gomez et al. 2017.
    """
    weight = layer.weight
    if isinstance(layer, nn.Conv2d):
        std = math.sqrt(2 / (weight[0, 0].numel() * weight.shape[0]))
        nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
    else:
        bound = math.sqrt(3 / weight.shape[1])
        nn.init.uniform_(weight, -bound, bound)


def _init_as_torch(layer: nn.Conv2d | nn.Linear) -> None:
    """Initialise weights and biases uniformly within 1 / sqrt(fan in), as torch does when it makes a layer."""
    layer.reset_parameters()


_OWN: dict[str, Callable[[nn.Conv2d | nn.Linear], None]] = {
    "truncated_normal": _init_truncated,
    "torch": _init_as_torch,
}


def _gain(activation: str, activation_param: float) -> float:
    if activation == "leaky_relu":
        return nn.init.calculate_gain("leaky_relu", activation_param)
    return nn.init.calculate_gain("relu") if activation in ("relu", "elu") else 1.0
