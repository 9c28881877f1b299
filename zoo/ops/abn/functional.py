"""The activated batch norm as a function: checks, statistics, running averages, synchronization and output."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.ops.abn.autograd import ActivatedBatchNorm, EagerBatchNorm
from zoo.ops.abn.reference import NormSettings
from zoo.ops.abn.replica_group import Group, ReplicaGroup
from zoo.ops.abn.statistics import Statistics, take_statistics
from zoo.ops.context import can_work_in_place, is_eager
from zoo.torch_internals.data import has_repeated_elements, is_alias_of, is_read_only_view

INVERTIBLE_ACTIVATIONS = ("leaky_relu", "elu", "identity")


def inplace_abn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool = True,
    momentum: float | Tensor | None = 0.1,
    eps: float = 1e-5,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    *,
    inplace: bool = True,
    group: Group | None = None,
    shortcut: Tensor | None = None,
    num_batches: Tensor | None = None,
) -> Tensor:
    """Return f((|weight| + eps) (x - mean) / sqrt(var + eps) + bias + shortcut); overwrites x by default.

    Saves only the output, per-channel vectors and ``shortcut`` for backward; another operation usually saves
    ``shortcut`` anyway. Backward recovers the residual sum from the output, and x_hat with an error of about
    u rms(sum) / (|weight| + eps), where u is the unit roundoff of the dtype of x. In half precision, |weight| should
    therefore be at least 0.01 rms(sum). Where |weight| + eps < u |bias|, the recovered x_hat would be pure rounding
    error, and backward uses x_hat = 0 (csrc/README.md). Under torch.compile and in a selective checkpoint, x is never
    overwritten.

    Args:
    - `x`: the input, a floating-point tensor of shape (N, C, ...).
    - `weight`, `bias`: shape (C,), or None for 1 and 0.
    - `running_mean`, `running_var`: the running statistics, shape (C,), or None. In training they are updated in place:
      r becomes r + momentum (batch - r), with the unbiased variance of the batch.
    - `training`: use the statistics of the batch. They are also used without running statistics.
    - `momentum`: the weight of the batch in the running statistics, or None for 1 / ``num_batches``.
    - `eps`: added to the variance and to |weight|.
    - `activation`: leaky_relu, elu or identity.
    - `activation_param`: the slope of leaky_relu below 0, or the alpha of elu; positive.
    - `inplace`: overwrite x. Otherwise the output is a new tensor.
    - `group`: synchronize the statistics over this process group, with one all-gather in forward and one all-reduce in
      backward. None: use the statistics of this process.
    - `shortcut`: added before the activation; shape and dtype of x, or None.
    - `num_batches`: a zero-dimensional tensor that is incremented in place when the running statistics are updated, or
      None.

    Raises ValueError for a wrong shape or activation, and for batch statistics of fewer than two values per channel.
    Raises RuntimeError where autograd forbids overwriting x. Nothing is modified if an error is raised.

    Source: Rota Bulo et al., In-Place Activated BatchNorm, CVPR 2018, section 3.
    """
    check_activation(activation, activation_param, INVERTIBLE_ACTIVATIONS)
    _check_shortcut(x, shortcut, inplace)
    _check_overwritable(x, inplace, weight, bias)
    settings = NormSettings(weight, bias, eps, activation, activation_param)
    statistics = take_statistics(x, weight, bias, running_mean, running_var, training, momentum, num_batches, group)
    return normalize(x, statistics, settings, inplace, shortcut)


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
    group: Group | None = None,
    *,
    inplace: bool = True,
) -> Tensor:
    """`inplace_abn` with batch statistics synchronized over a process group.

    Args:
    - `group`: the process group, or None for the default one. Without an initialized process group, in a group of one
      process, and in evaluation this is `inplace_abn`.
    - All other arguments: see `inplace_abn`.
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
        group=group_to_synchronize(group, training),
    )


def normalize(
    x: Tensor, statistics: Statistics, settings: NormSettings, inplace: bool, shortcut: Tensor | None = None
) -> Tensor:
    """Return the output of `inplace_abn` for given statistics."""
    if is_eager():
        return EagerBatchNorm.apply(x, shortcut, *settings, *statistics, inplace)
    return ActivatedBatchNorm.apply(x, shortcut, *settings, *statistics, inplace and can_work_in_place())


def group_to_synchronize(group: Group | None, training: bool) -> Group | None:
    """Return the group over which to synchronize batch statistics; ``group=None`` means the default group.

    Returns None if there is nothing to synchronize: in evaluation, without an initialized process group, and in a group
    of one process.
    """
    if isinstance(group, ReplicaGroup):
        return group if training else None
    if not (training and dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if group is None else group
    return group if dist.get_world_size(group) > 1 else None


def check_activation(activation: str, activation_param: float, known: tuple[str, ...]) -> None:
    """Raise ValueError unless the activation is one of ``known`` and its slope or alpha is positive."""
    if activation not in known:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(known)}")
    # Not math.isfinite: in a graph with dynamic shapes the number is a symbol and supports comparisons only.
    positive = isinstance(activation_param, (int, float)) and 0 < activation_param < math.inf
    if activation in ("leaky_relu", "elu") and not positive:
        raise ValueError(f"activation_param of {activation} must be positive, got {activation_param!r}")


def _check_shortcut(x: Tensor, shortcut: Tensor | None, inplace: bool) -> None:
    """Raise ValueError unless the shortcut has the shape and dtype of x, and does not share memory overwritten in x."""
    if shortcut is None:
        return
    if inplace and not torch.compiler.is_compiling() and is_alias_of(x, shortcut):
        raise ValueError(
            f"x and the shortcut, of shape {tuple(x.shape)}, share memory, so overwriting x may modify the shortcut, "
            "which backward needs; set inplace = False"
        )
    if (shortcut.shape, shortcut.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"the shortcut is {shortcut.dtype} of shape {tuple(shortcut.shape)}; it must have the dtype and shape of "
            f"the normalized tensor, {x.dtype} of shape {tuple(x.shape)}"
        )


def _check_overwritable(x: Tensor, inplace: bool, *parameters: Tensor | None) -> None:
    """Raise RuntimeError if x would be overwritten although it is expanded or autograd forbids it."""
    if not inplace or torch.compiler.is_compiling():
        return
    what = "an expanded tensor, whose elements share memory," if has_repeated_elements(x) else ""
    if torch.is_grad_enabled():
        if x.requires_grad and x.is_leaf:
            what = "a leaf tensor that requires grad,"
        elif is_read_only_view(x) and any(each is not None and each.requires_grad for each in (x, *parameters)):
            what = "one of several views (chunk, split, unbind) or a view that was made without gradients,"
    if what:
        raise RuntimeError(
            f"{what} of shape {tuple(x.shape)}, cannot be overwritten; put an operation before the norm, or set the "
            "norm's inplace = False"
        )
