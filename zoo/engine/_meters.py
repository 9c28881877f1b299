"""The meter of a training run: sums of loss and scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

COUNT, FIRST_BAD = -2, -1  # indices of the elements after the task's counts
LOSS_GRID = 2.0**24  # losses are rounded to multiples of 2^-24, whose sums are exact in float64 below 2^29
NO_BAD_STEP = -1


@dataclass(frozen=True, eq=False)
class Reading:
    """Sums over the images that a `Meter` has seen.

    Args:
    - `loss_sum`: the loss, nats.
    - `counts`: the integers from which the task computes its scores, int64, on the CPU.
    - `count`: number of images.
    - `first_bad_step`: the first step whose loss was not finite, or None.
    """

    loss_sum: float
    counts: Tensor
    count: int
    first_bad_step: int | None

    @property
    def loss(self) -> float:
        """The mean loss per image in nats, NaN without images."""
        return self.loss_sum / (self.count or math.nan)

    def since(self, before: Reading) -> Reading:
        """Return the sums over the images seen after ``before``, an earlier reading of the same meter."""
        return Reading(
            self.loss_sum - before.loss_sum,
            self.counts - before.counts,
            self.count - before.count,
            self.first_bad_step,
        )


class Meter:
    """Sums of the loss, the task's counts and the number of images since the last `reset`.

    The sums stay on ``device``; only `read` synchronizes. Counts are int64, and losses are rounded to a grid on which
    float64 adds them exactly, so that sums over a whole data set do not depend on the order.

    Args:
    - `device`: device of the batches.
    - `num_counts`: number of integers that the task counts.
    """

    def __init__(self, device: torch.device | str, num_counts: int) -> None:
        self.device = torch.device(device)
        self._loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self._counts = torch.zeros(num_counts - COUNT, dtype=torch.int64, device=self.device)
        self.reset()

    def reset(self) -> None:
        """Set all sums to zero."""
        self._loss.zero_()
        self._counts.zero_()
        self._counts[FIRST_BAD].fill_(NO_BAD_STEP)

    @torch.no_grad()
    def update(self, loss_sum: Tensor, counts: Tensor, num_images: int, step: int) -> None:
        """Add one batch without waiting for the device.

        Args:
        - `loss_sum`: the loss summed over the images, nats, 0-d.
        - `counts`: the task's counts, (num_counts,).
        - `num_images`: number of images.
        - `step`: the step to report if this is the first loss that is not finite.
        """
        self._loss += (loss_sum.double() * LOSS_GRID).round() / LOSS_GRID
        self._counts[:COUNT] += counts
        self._counts[COUNT] += num_images
        first_bad = self._counts[FIRST_BAD]
        is_first_bad = ~torch.isfinite(loss_sum) & (first_bad == NO_BAD_STEP)
        first_bad.masked_fill_(is_first_bad, step)

    def read(self, reduce: bool = False) -> Reading:
        """Return the sums so far, over all ranks if ``reduce`` (one all-reduce); waits for the device."""
        loss, first_bad = self._loss.item(), int(self._counts[FIRST_BAD])
        sums, losses, first_bads = self._counts[:FIRST_BAD], [loss], [first_bad]
        if reduce and dist.is_initialized() and dist.get_world_size() > 1:
            sums, losses, first_bads = _of_all_ranks(sums, loss, first_bad)
        return Reading(
            loss_sum=sum(losses),
            counts=sums[:-1].to("cpu", copy=True),
            count=int(sums[-1]),
            first_bad_step=min((step for step in first_bads if step != NO_BAD_STEP), default=None),
        )

    def state(self) -> dict[str, Tensor]:
        """Return copies of the sums on the CPU, for a checkpoint."""
        return {"loss": self._loss.to("cpu", copy=True), "counts": self._counts.to("cpu", copy=True)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load the result of `state`. Raises ValueError for sums of another task."""
        if state["counts"].shape != self._counts.shape:
            raise ValueError(f"meter.counts has shape {tuple(state['counts'].shape)}, not {tuple(self._counts.shape)}")
        self._loss.copy_(state["loss"])
        self._counts.copy_(state["counts"])


def merge_states(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the sum of the states of all ranks' meters. None of them may have a bad loss."""
    counts = torch.stack([state["counts"] for state in states]).sum(dim=0)
    counts[FIRST_BAD] = NO_BAD_STEP
    return {"loss": torch.stack([state["loss"] for state in states]).sum(), "counts": counts}


def _of_all_ranks(sums: Tensor, loss: float, first_bad: int) -> tuple[Tensor, list[float], list[int]]:
    """Return the ``sums`` over all ranks, and the losses and first bad steps in rank order, by one all-reduce.

    Adds integers only, so that no bit is lost: each rank writes the bits of its loss, and its step, to elements where
    all other ranks have 0.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = sums.new_zeros(2, world_size)
    own[0, rank] = int(torch.tensor(loss, dtype=torch.float64).view(torch.int64))
    own[1, rank] = first_bad
    packed = torch.cat([own.flatten(), sums])
    dist.all_reduce(packed)
    losses, first_bads = packed[: 2 * world_size].cpu().view(2, world_size)
    return packed[2 * world_size :], losses.view(torch.float64).tolist(), first_bads.tolist()
