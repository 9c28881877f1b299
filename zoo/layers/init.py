"""The published weight initialisation."""

from __future__ import annotations

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
    """
    fill = METHODS[method]
    if method.startswith("kaiming"):
        settings = {"a": 0.0 if activation in ("relu", "elu") else activation_param}
    else:
        settings = {"gain": gain_multiplier * _gain(activation, activation_param)}
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            fill(layer.weight, **settings)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight, gain=0.1)
            nn.init.zeros_(layer.bias)


def _gain(activation: str, activation_param: float) -> float:
    if activation == "leaky_relu":
        return nn.init.calculate_gain("leaky_relu", activation_param)
    return nn.init.calculate_gain("relu") if activation in ("relu", "elu") else 1.0
