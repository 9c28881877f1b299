"""Wall-clock and GPU seconds of a run.

Tested by tests/run/test_run_log.py.
"""

from __future__ import annotations

import time
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
