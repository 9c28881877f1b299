"""Meters of a training run: sums of loss and scores, and the reconstruction error of reversible chains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zoo.config import Training
from zoo.errors import ConfigError
from zoo.ops.context import RandomState, restored_buffers

COUNT, SKIPPED, FIRST_BAD = -3, -2, -1  # indices behind the counts of the task
NO_BAD_STEP = -1


@dataclass(frozen=True, eq=False)
class Reading:
    """Sums over the images that a `Meter` has seen.

    Args:
    - `loss_sum`: the loss, nats.
    - `counts`: the integers from which the task computes its scores, int64, on the CPU.
    - `count`: number of images.
    - `skipped`: number of unreadable images.
    - `first_bad_step`: the first step whose loss was not finite, or None.
    """

    loss_sum: float
    counts: Tensor
    count: int
    skipped: int
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
            self.skipped - before.skipped,
            self.first_bad_step,
        )


class Meter:
    """Sums of the loss, the task's counts and the number of images since the last `reset`.

    The sums stay on ``device``; only `read` waits for them. Counts are int64 and the loss is float64, so that the sums
    over a whole data set are exact. (MPS has no float64 and sums the loss in float32.)

    Args:
    - `device`: device of the batches.
    - `num_counts`: number of integers that the task counts.
    """

    def __init__(self, device: torch.device | str, num_counts: int) -> None:
        self.device = torch.device(device)
        loss_dtype = torch.float32 if self.device.type == "mps" else torch.float64
        self._loss = torch.zeros((), dtype=loss_dtype, device=self.device)
        self._counts = torch.zeros(num_counts - COUNT, dtype=torch.int64, device=self.device)
        self.reset()

    def reset(self) -> None:
        """Forget everything seen so far."""
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
        self._loss += loss_sum
        self._counts[:COUNT] += counts
        self._counts[COUNT] += num_images
        first_bad = self._counts[FIRST_BAD]
        is_first_bad = ~torch.isfinite(loss_sum) & (first_bad == NO_BAD_STEP)
        first_bad.masked_fill_(is_first_bad, step)

    def skip(self, count: int) -> None:
        """Count ``count`` unreadable images, which enter no average."""
        if count:
            self._counts[SKIPPED] += count

    def read(self, reduce: bool = False) -> Reading:
        """Return the sums so far, over all ranks if ``reduce`` (one all-reduce); waits for the device."""
        loss, first_bad = self._loss.item(), int(self._counts[FIRST_BAD])
        sums, losses, first_bads = self._counts[:FIRST_BAD], [loss], [first_bad]
        if reduce and dist.is_initialized() and dist.get_world_size() > 1:
            sums, losses, first_bads = _of_all_ranks(sums, loss, first_bad)
        *_, count, skipped = sums[-2:].tolist()
        return Reading(
            loss_sum=sum(losses),
            counts=sums[:-2].to("cpu", copy=True),
            count=count,
            skipped=skipped,
            first_bad_step=min((step for step in first_bads if step != NO_BAD_STEP), default=None),
        )

    def state(self) -> dict[str, Tensor]:
        """Return copies of the sums on the CPU, for a checkpoint."""
        return {"loss": self._loss.to("cpu", copy=True), "counts": self._counts.to("cpu", copy=True)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load what `state` returned; ValueError for the sums of another task."""
        if state["counts"].shape != self._counts.shape:
            raise ValueError(f"meter.counts has shape {tuple(state['counts'].shape)}, not {tuple(self._counts.shape)}")
        self._loss.copy_(state["loss"])
        self._counts.copy_(state["counts"])


def _of_all_ranks(sums: Tensor, loss: float, first_bad: int) -> tuple[Tensor, list[float], list[int]]:
    """Return the ``sums`` over all ranks, and the losses and first bad steps in rank order, by one all-reduce.

    Only integers are added, so that no bit is lost: each rank writes the bits of its loss, and its step, to elements
    where all other ranks have 0.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = sums.new_zeros(2, world_size)
    own[0, rank] = int(torch.tensor(loss, dtype=torch.float64).view(torch.int64))
    own[1, rank] = first_bad
    packed = torch.cat([own.flatten(), sums])
    dist.all_reduce(packed)
    losses, first_bads = packed[: 2 * world_size].cpu().view(2, world_size)
    return packed[2 * world_size :], losses.view(torch.float64).tolist(), first_bads.tolist()


def check_meters(model: nn.Module, settings: Training) -> None:
    """Raise ConfigError if a meter of reconstruction is on but ``model`` reconstructs nothing."""
    if not all(chain.store for chain in _chains(model).values()):
        return
    for meter in ("reconstruction_meter", "gradient_angle_meter"):
        if every_steps := getattr(settings, meter):
            raise ConfigError(
                f"training.{meter} = {every_steps}, but this network reconstructs no activations: remove the key, or "
                'use a revnet*, irevnet* or revnext* with network.memory "auto"'
            )


def _chains(model: nn.Module) -> dict[str, Any]:
    """Return the chains of reversible blocks or invertible layers in ``model`` by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "meter")}


@contextmanager
def reconstruction_errors(model: nn.Module) -> Iterator[dict[str, float]]:
    """Yield a dict that backward fills with the relative error of each block's reconstructed input.

    Keys are "chain/index": the name of the reversible chain in ``model`` and the index of the block; "index" alone if
    ``model`` is the chain. Chains that store activations report nothing. Inside this context backward takes the memory
    of stored activations, to compare with, and waits for the device.
    """
    errors: dict[str, float] = {}
    chains = _chains(model)
    # A chain may report the parts of a block from the last to the first. The first part's input, which is reported
    # last and overwrites the others, is the input of the block.
    for name, chain in chains.items():
        prefix = f"{name}/" if name else ""
        chain.meter = lambda index, error, prefix=prefix: errors.__setitem__(f"{prefix}{index}", error)
    try:
        yield errors
    finally:
        for chain in chains.values():
            chain.meter = None


def gradients(model: nn.Module, losses: Callable[[], Iterable[Tensor]], *, store: bool) -> list[Tensor]:
    """Return the gradient of the sum of ``losses`` with respect to each trained parameter; ``model`` is unchanged.

    Running statistics and random generators are restored. With ``store`` the reversible chains store activations,
    without it they do as in training. ``losses`` runs the model and yields losses with a graph of their own.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    chains, random_state = _chains(model).values(), RandomState.now(parameters[0])
    stores = [chain.store for chain in chains]
    total: list[Tensor] = []
    try:
        with restored_buffers(model):
            for chain in chains:
                chain.store = chain.store or store
            for loss in losses():
                of_loss = torch.autograd.grad(loss, parameters, materialize_grads=True)
                total = [a + b for a, b in zip(total, of_loss, strict=True)] if total else list(of_loss)
    finally:
        for chain, stored in zip(chains, stores, strict=True):
            chain.store = stored
        random_state.restore()
    return total


def angle_between(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Return the angle in degrees between two vectors, each given as a list of tensors; NaN if one is 0 or not finite.

    Computes 2 arcsin(|u - v| / 2) of the unit vectors in float64, which is accurate for small angles too.
    """
    pairs = [(u.detach().cpu().double(), v.detach().cpu().double()) for u, v in zip(first, second, strict=True)]
    u_norm, v_norm = (
        math.sqrt(sum(float(part.square().sum()) for part in parts)) for parts in zip(*pairs, strict=True)
    )
    if not 0 < u_norm * v_norm < math.inf:
        return math.nan
    distance = math.sqrt(sum(float((u / u_norm - v / v_norm).square().sum()) for u, v in pairs))
    return math.degrees(2 * math.asin(min(1.0, distance / 2)))
