"""Stopping before a network that has gone wrong is written down or trained any further."""

from __future__ import annotations

import math
from pathlib import Path

from torch import Tensor, nn

from zoo.engine.checkpoint import CHECKPOINT
from zoo.engine.meters import Reading
from zoo.engine.state import TrainState
from zoo.errors import NonFiniteLossError, printable


def checked_reading(state: TrainState, folder: Path) -> Reading:
    """Return the averages of the running epoch over all ranks; every rank has to call it, and waits.

    NonFiniteLossError, on every rank, if any loss was not finite; it names the checkpoint in ``folder``.
    """
    reading = state.meter.read(reduce=True)
    if reading["first_bad_step"] is not None:
        raise _error(f"the loss was not finite at step {reading['first_bad_step']}", folder)
    return reading


def check_finite(state: TrainState, folder: Path) -> None:
    """Raise NonFiniteLossError, on every rank, if a loss of the epoch or any weight is not finite.

    A finite loss can have gradients that are not, which only the next loss would show.
    """
    checked_reading(state, folder)
    tensors: list[Tensor] = [*state.model.parameters(), *state.model.buffers()]
    floating = [tensor.detach() for tensor in tensors if tensor.is_floating_point()]
    largest = nn.utils.get_total_norm(floating, norm_type=math.inf)
    if state.process.any_rank(not math.isfinite(largest)):
        raise _error(f"the weights are not finite after step {state.step}", folder)


def _error(what: str, folder: Path) -> NonFiniteLossError:
    path = folder / CHECKPOINT
    last_good = (
        f"the last good checkpoint is {printable(path)}"
        if path.exists()
        else f"{printable(folder)} has no checkpoint yet"
    )
    return NonFiniteLossError(
        f"{what}; {last_good}: lower optimizer.learning_rate, or set optimizer.clip or optimizer.schedule.warmup_epochs"
    )
