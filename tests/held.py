"""Bytes that a network holds for backward, for the tests that compare them."""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch import Tensor

from zoo.memory.allocations import summarize
from zoo.remat._step_log import StorageLog


def held_bytes(forward: Callable[[], Tensor], warmup: int = 0) -> int:
    """Return the bytes that are held once ``forward`` has returned the loss: `count_memory`'s, without a backward pass.

    With parameters and images on the meta device nothing is computed.

    Args:
    - `warmup`: number of calls before the counted one: 1 for lean training.
    """
    for _ in range(warmup):
        forward()
    gc.collect()  # nothing older may be freed during the step
    with StorageLog() as log:
        loss = forward()
        changes = list(log.changes)
    del loss
    return summarize(changes, len(changes), set()).held
