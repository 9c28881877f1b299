"""Wall-clock and GPU seconds of a run.

Tested by tests/reproduce/test_training_runs.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch


class CostMeter:
    """Measures how long a run takes, starting when the meter is created.

    Args:
    - `device`: the device that does the work.
    - `num_processes`: number of processes that share the work, each with its own GPU on CUDA.
    """

    def __init__(self, device: torch.device, num_processes: int = 1) -> None:
        self._start_s = time.monotonic()
        self._num_gpus = num_processes if device.type == "cuda" else 0

    def read(self) -> dict[str, Any]:
        """Return the elapsed ``seconds``, and ``gpu_seconds`` (seconds times GPUs, None without a GPU), for JSON."""
        seconds = time.monotonic() - self._start_s
        gpu_seconds = round(seconds * self._num_gpus, 1) if self._num_gpus else None
        return {"seconds": round(seconds, 1), "gpu_seconds": gpu_seconds}


def total_cost(costs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sum of several `CostMeter.read` results; an entry is None if it is None in any of them."""

    def total(key: str) -> float | None:
        values = [cost[key] for cost in costs]
        return None if None in values else round(sum(values), 1)

    return {key: total(key) for key in ("seconds", "gpu_seconds")}
