"""What is measured during training: loss and accuracy, and how exactly reversible chains reconstruct activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zoo.errors import ConfigError

TOP1, TOP5, COUNT, SKIPPED, FIRST_BAD = range(5)
NO_BAD_STEP = -1


class Reading(TypedDict):
    """Averages over the images that a `Meter` has seen.

    ``loss`` is in nats per image, ``top1`` and ``top5`` in percent. ``count`` images are averaged over, ``skipped``
    ones could not be read. ``first_bad_step`` is the first step whose loss was not finite, None if there was none.
    """

    loss: float
    top1: float
    top5: float
    count: int
    skipped: int
    first_bad_step: int | None


class Meter:
    """Sums of loss, top-1 hits, top-5 hits and images since the last `reset`.

    The sums are kept on ``device`` and the host waits for them only in `read`. Hits and images are int64 and the loss
    is float64, so that the sums of a whole data set are exact. MPS has no float64 and sums the loss in float32.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        loss_dtype = torch.float32 if self.device.type == "mps" else torch.float64
        self._loss = torch.zeros((), dtype=loss_dtype, device=self.device)
        self._counts = torch.zeros(5, dtype=torch.int64, device=self.device)
        self.reset()

    def reset(self) -> None:
        """Forget everything seen so far."""
        self._loss.zero_()
        self._counts.zero_()
        self._counts[FIRST_BAD].fill_(NO_BAD_STEP)

    @torch.no_grad()
    def update(self, loss_sum: Tensor, logits: Tensor, targets: Tensor, step: int) -> None:
        """Add one batch without waiting for the device.

        ``loss_sum``: the loss summed over the images (nats), 0-d. ``logits``: (N, classes).
        ``targets``: (N,). ``step``: the number remembered if this is the first loss that is not finite.
        With fewer than five classes top-5 means "among all of them", that is 100 percent.
        """
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices
        hits = best == targets[:, None]
        self._loss += loss_sum
        self._counts[TOP1] += hits[:, 0].sum()
        self._counts[TOP5] += hits.sum()
        self._counts[COUNT] += len(targets)
        first_bad = self._counts[FIRST_BAD]
        is_first_bad = ~torch.isfinite(loss_sum) & (first_bad == NO_BAD_STEP)
        first_bad.masked_fill_(is_first_bad, step)

    def skip(self, count: int) -> None:
        """Count ``count`` images that could not be read; they enter no average."""
        if count:
            self._counts[SKIPPED] += count

    def read(self, reduce: bool = False) -> Reading:
        """Return the averages so far, over all processes if ``reduce`` (one all-reduce, on every rank).

        This waits for the device. The averages are NaN when no image was seen.
        """
        rows = [[self._loss.item(), *self._counts.tolist()]]
        if reduce and dist.is_initialized() and dist.get_world_size() > 1:
            rows = self._rows_of_all_ranks(rows[0])
        loss, top1, top5, count, skipped = (sum(column) for column in list(zip(*rows, strict=True))[:-1])
        bad_steps = [int(row[-1]) for row in rows if row[-1] != NO_BAD_STEP]
        images = count or float("nan")
        return Reading(
            loss=loss / images,
            top1=100 * top1 / images,
            top5=100 * top5 / images,
            count=int(count),
            skipped=int(skipped),
            first_bad_step=min(bad_steps, default=None),
        )

    def _rows_of_all_ranks(self, row: list[float]) -> list[list[float]]:
        """Return the rows of all ranks: each fills its own line of a matrix of zeros, which is then summed.

        A plain sum could not carry the first bad step, of which the minimum is needed. float64 holds every count below
        2**53 exactly.
        """
        table = torch.zeros(dist.get_world_size(), len(row), dtype=torch.float64, device=self.device)
        table[dist.get_rank()] = torch.tensor(row, dtype=torch.float64, device=self.device)
        dist.all_reduce(table)
        rows: list[list[float]] = table.tolist()
        return rows

    def state(self) -> dict[str, Tensor]:
        """Return copies of the sums on the CPU, for a checkpoint."""
        return {"loss": self._loss.to("cpu", copy=True), "counts": self._counts.to("cpu", copy=True)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from what `state` returned."""
        self._loss.copy_(state["loss"])
        self._counts.copy_(state["counts"])


def check_meter(model: nn.Module, every_steps: int) -> None:
    """Raise ConfigError if reconstruction errors are to be measured in a ``model`` that reconstructs nothing.

    ``every_steps``: they are measured in every so many steps, or never if it is 0.
    """
    if every_steps and not any(hasattr(module, "meter") and not module.store for module in model.modules()):
        raise ConfigError(
            f"training.reconstruction_meter = {every_steps}: this network reconstructs no activations; remove the key, "
            'or use a revnet*, irevnet* or revnext* with network.memory "auto"'
        )


@contextmanager
def reconstruction_errors(model: nn.Module) -> Iterator[dict[str, float]]:
    """Yield a dictionary that a backward pass fills with the relative error of each block's reconstructed input.

    Its keys are "chain/index", with the name of the reversible chain in ``model`` and the index of the block in the
    chain, or "index" alone if ``model`` is the chain. Chains that store their activations report nothing. Inside this
    context a backward pass needs the memory of stored activations, to compare with, and waits for the device.
    """
    errors: dict[str, float] = {}
    chains: dict[str, Any] = {name: module for name, module in model.named_modules() if hasattr(module, "meter")}
    # A chain may report the parts of a block one by one, from the last to the first. The first part's input, which is
    # reported last and stays, is the input of the block.
    for name, chain in chains.items():
        prefix = f"{name}/" if name else ""
        chain.meter = lambda index, error, prefix=prefix: errors.__setitem__(f"{prefix}{index}", error)
    try:
        yield errors
    finally:
        for chain in chains.values():
            chain.meter = None
