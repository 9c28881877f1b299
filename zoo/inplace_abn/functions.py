"""The norm as a function, and the names of activations of releases 0.x."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import layers

__all__ = ["ACT_ELU", "ACT_LEAKY_RELU", "ACT_NONE", "ACT_RELU", "inplace_abn", "inplace_abn_sync"]

ACT_RELU = "relu"
ACT_LEAKY_RELU = "leaky_relu"
ACT_ELU = "elu"
ACT_NONE = "none"


def inplace_abn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str = ACT_LEAKY_RELU,
    activation_param: float = 0.01,
) -> Tensor:
    """Call `zoo.layers.inplace_abn`; "none" means "identity", and leaky_relu with slope 0 means ReLU."""

    def norm(each: tuple[str, float]) -> Tensor:
        return layers.inplace_abn(x, weight, bias, running_mean, running_var, training, momentum, eps, *each)

    return normalize_and_activate(norm, (activation, activation_param))


def inplace_abn_sync(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str = ACT_LEAKY_RELU,
    activation_param: float = 0.01,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Call `zoo.layers.inplace_abn_sync` with the activations of `inplace_abn`."""

    def norm(each: tuple[str, float]) -> Tensor:
        vectors = weight, bias, running_mean, running_var
        return layers.inplace_abn_sync(x, *vectors, training, momentum, eps, *each, group)

    return normalize_and_activate(norm, (activation, activation_param))


def activation_arguments(activation: Any) -> dict[str, Any]:
    """Convert an activation, a name or a module, to arguments of a norm in `zoo.layers`.

    Raises TypeError unless the activation is a name, None, or a module LeakyReLU, ELU, ReLU or Identity.
    """
    if activation is None or isinstance(activation, str):
        return {"activation": activation or "identity"}
    # Subclasses may compute something else.
    if type(activation) is nn.LeakyReLU:
        return {"activation": ACT_LEAKY_RELU, "activation_param": activation.negative_slope}
    if type(activation) is nn.ELU:
        return {"activation": ACT_ELU, "activation_param": activation.alpha}
    if type(activation) in (nn.ReLU, nn.Identity):
        return {"activation": ACT_RELU if type(activation) is nn.ReLU else "identity"}
    raise TypeError(
        f"activation={activation!r} is neither a name nor a module LeakyReLU, ELU, ReLU or Identity; "
        'give "identity" and call the activation after the norm'
    )


def rename_activation(activation: str | None, activation_param: float) -> tuple[str, float] | None:
    """Return name and parameter of an activation in `zoo.layers`; None if they do not change."""
    if activation in (ACT_NONE, None):
        return "identity", activation_param
    return (ACT_RELU, 0.0) if activation == ACT_LEAKY_RELU and activation_param == 0 else None


def normalize_and_activate(norm: Callable[[tuple[str, float]], Tensor], activation: tuple[str, float]) -> Tensor:
    """Call ``norm`` with the renamed activation. ReLU has no inverse, so it follows the norm in a new tensor."""
    other = rename_activation(*activation)
    if other and other[0] == ACT_RELU:
        return F.relu(norm(("identity", 0.0)))
    return norm(other or activation)
