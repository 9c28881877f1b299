"""Batch normalisation and activation in one operation: statistics, synchronisation, running averages, output."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.ops.abn.autograd import ActivatedBatchNorm, Statistics
from zoo.ops.abn.backend import kernels_for
from zoo.ops.abn.reference import Form
from zoo.ops.abn.sync import gather_statistics
from zoo.ops.context import can_work_in_place, is_eager

INVERTIBLE_ACTIVATIONS = ("leaky_relu", "elu", "identity")


def check_activation(activation: str, activation_param: float, known: tuple[str, ...]) -> None:
    """Raise ValueError unless the activation is one of ``known`` and its slope or alpha is positive."""
    if activation not in known:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(known)}")
    # No math.isfinite: a graph of dynamic shape has a symbol for the number, which can only be compared.
    positive = isinstance(activation_param, (int, float)) and 0 < activation_param < math.inf
    if activation in ("leaky_relu", "elu") and not positive:
        raise ValueError(f"activation_param of {activation} must be positive, got {activation_param!r}")


def inplace_abn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool = True,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    *,
    inplace: bool = True,
    group: dist.ProcessGroup | None = None,
    shortcut: Tensor | None = None,
) -> Tensor:
    """Return f((|weight| + eps) (x - mean) / sqrt(var + eps) + bias + shortcut); if ``inplace``, overwrite x with it.

    x has shape (N, C, ...), ``shortcut`` the shape and dtype of x, the other tensors (C,).  Batch statistics are used
    when ``training`` or without running ones; in training the running ones move towards them: r + momentum (batch - r),
    variance unbiased.  ``activation`` is leaky_relu (slope ``activation_param``), elu (alpha) or identity.  With
    ``group`` the statistics are those of all processes of the group, at the cost of one all-gather in forward and one
    all-reduce in backward.

    Only the output and per-channel vectors are kept for backward, and ``shortcut``, which the producer of x usually
    keeps anyway: the residual sum before the activation is recovered.  x_hat is then recovered with an error of about
    u rms(sum) / (|weight| + eps), u being the rounding unit of the dtype of x: in half precision |weight| should be at
    least 0.01 rms(sum).  Where it could be nothing but rounding, at |weight| + eps < u |bias|, backward takes x_hat = 0
    (csrc/README.md).  Under torch.compile, and in a selective checkpoint, x is never overwritten.
    Raises ValueError for a wrong shape or activation, and where there are fewer than two values per channel to take
    statistics of.  Source: Rota Bulo et al., In-Place Activated BatchNorm, CVPR 2018, section 3.
    """
    check_activation(activation, activation_param, INVERTIBLE_ACTIVATIONS)
    check_input(x, [weight, bias, running_mean, running_var])
    check_shortcut(x, shortcut, inplace)
    check_overwritable(x, inplace)
    statistics = normalising_statistics(x, running_mean, running_var, training, momentum, group)
    return normalise(x, statistics, Form(weight, bias, eps, activation, activation_param), inplace, shortcut)


def normalise(x: Tensor, statistics: Statistics, form: Form, inplace: bool, shortcut: Tensor | None = None) -> Tensor:
    """Return f((|weight| + eps) x_hat + bias + shortcut), as `inplace_abn` does, with statistics taken before."""
    inplace = inplace and can_work_in_place()
    weight, bias, settings = form.weight, form.bias, form[2:]
    mean, var, count, group = statistics
    return ActivatedBatchNorm.apply(x, shortcut, weight, bias, mean, var, count, settings, inplace, group)


def normalising_statistics(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float | Tensor,
    group: dist.ProcessGroup | None,
) -> Statistics:
    """Return the statistics of the batch, over the group, or the running ones, which the former move in training.

    When it is which, and how they move, is said at `inplace_abn`.
    """
    if training and running_mean is not None and running_var is not None:
        return _tracked_statistics(x, running_mean, running_var, momentum, group)
    if running_mean is None or running_var is None:
        return Statistics(*_batch_statistics(x, group), group)
    # A copy of what backward keeps: a training batch in between may move the running statistics in place.
    return Statistics(running_mean, running_var.clone(), num_values=None, group=None)


def inplace_abn_sync(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool = True,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    group: dist.ProcessGroup | None = None,
    *,
    inplace: bool = True,
) -> Tensor:
    """Return what `inplace_abn` does with the statistics of the whole ``group`` (None: the default process group).

    Without an initialised process group, or in a group of one, it is `inplace_abn`.
    """
    return inplace_abn(
        x,
        weight,
        bias,
        running_mean,
        running_var,
        training,
        momentum,
        eps,
        activation,
        activation_param,
        inplace=inplace,
        group=synchronised_group(group) if training else None,
    )


def synchronised_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group to synchronise over, the default one for None; None where there is nobody else in it."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if group is None else group
    return group if dist.get_world_size(group) > 1 else None


def check_input(x: Tensor, vectors: list[Tensor | None]) -> None:
    """Raise ValueError unless x is a floating (N, C, ...) tensor and every given vector has C elements."""
    if x.dim() < 2 or not x.is_floating_point():
        raise ValueError(f"expected a floating-point tensor (N, C, ...), got {x.dtype} of shape {tuple(x.shape)}")
    channels = x.shape[1]
    for vector in vectors:
        if vector is not None and vector.numel() != channels:
            raise ValueError(f"the layer has {vector.numel()} channels, its input of shape {tuple(x.shape)} {channels}")


def check_shortcut(x: Tensor, shortcut: Tensor | None, inplace: bool) -> None:
    """Raise ValueError unless the shortcut has the shape and dtype of x, and survives the overwriting of x."""
    if shortcut is None:
        return
    if inplace and not torch.compiler.is_compiling() and torch._C._is_alias_of(x, shortcut):  # type: ignore[attr-defined]
        raise ValueError(
            f"x and the shortcut, of shape {tuple(x.shape)}, share memory, and backward needs the shortcut as it is; "
            "set inplace = False"
        )
    if (shortcut.shape, shortcut.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"the shortcut, {shortcut.dtype} of shape {tuple(shortcut.shape)}, has not the dtype and shape of the "
            f"normalised tensor, {x.dtype} of shape {tuple(x.shape)}"
        )


def check_overwritable(x: Tensor, inplace: bool) -> None:
    """Raise RuntimeError, before anything is touched, if x is to be overwritten and autograd does not allow it."""
    if inplace and torch.is_grad_enabled() and x.requires_grad and x.is_leaf and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"a leaf tensor that requires grad, of shape {tuple(x.shape)}, cannot be overwritten; put an operation "
            "before the norm, or set the norm's inplace = False"
        )


def values_per_channel(x: Tensor) -> int:
    """Return N times the spatial size of an (N, C, ...) tensor."""
    return x.numel() // x.shape[1] if x.shape[1] else 0


def check_count(x: Tensor, count: int | None = None) -> None:
    """Raise ValueError unless there are two values per channel: ``count`` of them, or those of x."""
    count = values_per_channel(x) if count is None else count
    if count < 2:
        raise ValueError(
            f"batch statistics need more than 1 value per channel, got {count} with an input of shape "
            f"{tuple(x.shape)}; use a larger batch, or evaluation mode"
        )


def _tracked_statistics(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float | Tensor,
    group: dist.ProcessGroup | None,
) -> Statistics:
    """Return the statistics of the batch, and move the running ones towards them."""
    at_once = getattr(kernels_for(x), "track_statistics", None)
    if at_once is None or not is_eager() or group is not None or isinstance(momentum, Tensor):
        mean, var, count = _batch_statistics(x, group)
        update_running(running_mean, running_var, mean, var, count, momentum)
        return Statistics(mean, var, count, group)
    check_count(x)
    mean, var = at_once(x.detach(), running_mean, running_var, momentum)
    return Statistics(mean, var, values_per_channel(x), None)


def _batch_statistics(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, int | Tensor]:
    """Return mean, biased variance and the number of values per channel, over the group where one is given."""
    local_count = values_per_channel(x)
    mean, var = kernels_for(x).statistics(x.detach())
    count: int | Tensor = local_count
    if group is not None:
        mean, var, count = gather_statistics(mean, var, local_count, group)
    # Two local values are enough for the whole group, so that the global count is waited for only without them; a
    # compiled graph cannot wait at all.
    if local_count < 2 and not (group is not None and torch.compiler.is_compiling()):
        check_count(x, int(count))
    return mean, var, count


@torch.no_grad()
def update_running(
    running_mean: Tensor,
    running_var: Tensor,
    mean: Tensor,
    var: Tensor,
    count: int | Tensor,
    momentum: float | Tensor,
) -> None:
    """Move the running statistics in place by ``momentum`` towards those of a batch of ``count`` values per channel.

    ``var`` is biased, the running variance unbiased: n / (n - 1).
    """
    unbiased = var * (count / (count - 1))
    for running, batch in ((running_mean, mean), (running_var, unbiased)):
        weight = momentum.to(running.dtype) if isinstance(momentum, Tensor) else momentum
        running.lerp_(batch.to(running.dtype), weight)
