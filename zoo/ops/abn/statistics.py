"""The statistics of a norm: batch statistics, local or synchronized over a process group, or running statistics."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.ops.abn.kernels import kernels_for
from zoo.ops.abn.reference import update_running, values_per_channel
from zoo.ops.abn.replica_group import Group, ReplicaGroup
from zoo.ops.context import is_eager
from zoo.ops.operators import accumulate_dtype
from zoo.torch_internals.data import ALL_GATHER


class Statistics(NamedTuple):
    """Mean and biased variance, shape (C,), with the number of values behind them.

    ``num_values`` is the number of values per channel: an int, or in a synchronized layer a zero-dimensional tensor;
    None for running statistics, which do not depend on the input. ``group`` is the group of synchronized
    statistics, or None.
    """

    mean: Tensor
    var: Tensor
    num_values: int | Tensor | None
    group: Group | None


def take_statistics(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float | Tensor | None,
    num_batches: Tensor | None,
    group: Group | None,
) -> Statistics:
    """Return batch statistics in training or without running statistics, otherwise the running statistics.

    In training the running statistics are updated in place. See `inplace_abn` for the arguments. Raises ValueError,
    before anything is modified, if x does not match the vectors, or for batch statistics of fewer than two values per
    channel. With a group, the number of values is checked after the statistics have been gathered.
    """
    check_input(x, [weight, bias, running_mean, running_var])
    if not training and running_mean is not None and running_var is not None:
        # Backward saves the variance, and a training batch may update the running variance in place before backward.
        return Statistics(running_mean, running_var.clone(), num_values=None, group=None)
    if group is None:
        check_num_values(x)
    if running_mean is None or running_var is None:
        return _batch_statistics(x, group)
    momentum = next_momentum(momentum, num_batches, running_mean.dtype)
    if isinstance(momentum, Tensor) or (group is None and not is_eager()):
        batch = _batch_statistics(x, group)
        assert batch.num_values is not None
        update_running(running_mean, running_var, batch.mean, batch.var, batch.num_values, momentum)
        return batch
    if group is not None:
        return _gather_statistics(x, group, (running_mean, running_var), momentum)
    mean, var = kernels_for(x).track_statistics(x.detach(), running_mean, running_var, momentum)
    return Statistics(mean, var, values_per_channel(x), None)


def next_momentum(momentum: float | Tensor | None, num_batches: Tensor | None, dtype: torch.dtype) -> float | Tensor:
    """Increment ``num_batches``, if given; return the momentum, or 1 / ``num_batches`` if it is None.

    Must be called after all checks, but not at the end of the forward pass: the recomputation of a checkpoint stops at
    the last tensor it needs, and would update the running statistics without counting the batch.
    """
    if num_batches is None:
        if momentum is None:
            raise ValueError("momentum=None needs num_batches; pass num_batches or a momentum")
        return momentum
    num_batches.add_(1)
    return num_batches.to(dtype).reciprocal() if momentum is None else momentum


def check_input(x: Tensor, vectors: list[Tensor | None]) -> None:
    """Raise ValueError unless x is a floating-point (N, C, ...) tensor and each vector has C elements or is None."""
    if x.dim() < 2 or not x.is_floating_point():
        raise ValueError(f"expected a floating-point tensor (N, C, ...), got {x.dtype} of shape {tuple(x.shape)}")
    channels = x.shape[1]
    for vector in vectors:
        if vector is not None and vector.numel() != channels:
            raise ValueError(
                f"the layer has {vector.numel()} channels, but its input of shape {tuple(x.shape)} has {channels}"
            )


def check_num_values(x: Tensor, num_values: int | None = None) -> int:
    """Return the number of values per channel (default: of x). Raises ValueError if it is less than two."""
    num_values = values_per_channel(x) if num_values is None else num_values
    if num_values < 2:
        raise ValueError(
            f"batch statistics need more than 1 value per channel, got {num_values} with an input of shape "
            f"{tuple(x.shape)}; use a larger batch, or evaluation mode"
        )
    return num_values


def _batch_statistics(x: Tensor, group: Group | None) -> Statistics:
    """Return the statistics of the batch, synchronized over the group if given."""
    if group is not None:
        return _gather_statistics(x, group)
    mean, var = kernels_for(x).statistics(x.detach())
    return Statistics(mean, var, values_per_channel(x), None)


def _gather_statistics(
    x: Tensor,
    group: Group,
    running: tuple[Tensor | None, Tensor | None] = (None, None),
    momentum: float = 0.0,
) -> Statistics:
    """Return the statistics over the values of all processes or replicas of a group, identical in each of them.

    Uses one all-gather of 2 C + 1 numbers. Processes may have different numbers of values, including 0 (mean and var
    must then be finite, but do not matter). The numbers are sent in float64, so counts are exact and the sums of
    squares do not cancel: n = sum n_k, m = sum n_k m_k / n, v = sum n_k (v_k + (m_k - m)^2) / n. The number of values
    stays a tensor on the device, which avoids a synchronization. ``running`` statistics are updated.
    """
    kernels = kernels_for(x)
    packed = kernels.local_statistics(x.detach())
    if isinstance(group, ReplicaGroup):
        gathered = group.gather(packed)
    else:
        world_size = dist.get_world_size(group)
        gathered = packed.new_empty(world_size * packed.numel())
        getattr(dist, ALL_GATHER)(gathered, packed, group=group)
        gathered = gathered.view(world_size, -1)
    # Two local values are enough for the group. Only with fewer does the host wait for the number of the group; a
    # compiled graph cannot wait.
    if values_per_channel(x) < 2 and not torch.compiler.is_compiling():
        check_num_values(x, int(gathered[:, -1].sum()))
    return Statistics(*kernels.group_statistics(gathered, accumulate_dtype(x.dtype), *running, momentum), group)


def means_over_group(sums: Tensor, num_values: int | Tensor, group: Group | None) -> tuple[Tensor, Tensor]:
    """Return the two sums of backward, (2, C), over the group, divided by the number of values.

    Processes add the sums in one all-reduce, which overwrites them. Replicas gather them, and add them in the order of
    the replicas: an all-reduce has an order that depends on the number of processes.
    """
    if isinstance(group, ReplicaGroup):
        sums = group.gather(sums).double().sum(0).to(sums.dtype)
    elif group is not None:
        dist.all_reduce(sums, group=group)
    mean_dy, mean_dy_xhat = sums / num_values
    return mean_dy, mean_dy_xhat
