"""Statistics of a batch that is spread over the processes of a group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def gather_statistics(mean: Tensor, var: Tensor, count: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, biased variance and count of the union of all processes' values, equal on every process.

    One all-gather of 2 C + 1 numbers.  Processes may hold different counts, 0 included (then mean and var must be
    finite, and do not matter).  Sent in float64, so that any count is exact and the sums of squares do not cancel:
    n = sum n_k, m = sum n_k m_k / n, v = sum n_k (v_k + (m_k - m)^2) / n.  The count is a tensor without dimensions,
    on the device: nothing waits for it.
    """
    mine = torch.cat([mean.double(), var.double(), mean.new_full((1,), count, dtype=torch.float64)])
    world_size = dist.get_world_size(group)
    gathered = mine.new_empty(world_size * mine.numel())
    dist.all_gather_into_tensor(gathered, mine, group=group)
    channels = mean.numel()
    means, variances, counts = gathered.view(world_size, -1).split([channels, channels, 1], dim=1)
    total = counts.sum()
    divisor = total.clamp(min=1)  # nobody has a value: the caller reports it, not a division by zero
    global_mean = (counts * means).sum(0) / divisor
    global_var = (counts * (variances + (means - global_mean).square())).sum(0) / divisor
    return global_mean.to(mean.dtype), global_var.to(var.dtype), total.to(mean.dtype)
