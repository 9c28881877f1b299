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
    """Overwrite the weights of all convolutions and linear layers; norms have theirs (scale 1, shift 0) from birth.

    Convolutions: ``method`` with ``gain_multiplier`` times the gain of the activation for xavier and orthogonal, and
    the activation's slope for kaiming (which ignores the multiplier).  Linear layers: Xavier-uniform, gain 0.1, bias 0.
    The RevNets' "truncated_normal" and torch's own "torch" use neither: see `_init_truncated` and `_init_as_torch`.
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
    """Convolutions: normal of std sqrt(2 / (k k out)), cut at two of them; linear: uniform within sqrt(3 / in).

    Source: the public code of Gomez et al. 2017.
    """
    weight = layer.weight
    if isinstance(layer, nn.Conv2d):
        std = math.sqrt(2 / (weight[0, 0].numel() * weight.shape[0]))
        nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
    else:
        bound = math.sqrt(3 / weight.shape[1])
        nn.init.uniform_(weight, -bound, bound)


def _init_as_torch(layer: nn.Conv2d | nn.Linear) -> None:
    """Weights and biases uniform within 1 / sqrt(fan in), as torch's layers are born."""
    layer.reset_parameters()


_OWN: dict[str, Callable[[nn.Conv2d | nn.Linear], None]] = {
    "truncated_normal": _init_truncated,
    "torch": _init_as_torch,
}


def _gain(activation: str, activation_param: float) -> float:
    if activation == "leaky_relu":
        return nn.init.calculate_gain("leaky_relu", activation_param)
    return nn.init.calculate_gain("relu") if activation in ("relu", "elu") else 1.0
