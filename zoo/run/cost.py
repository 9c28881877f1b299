"""What a piece of work costs: seconds, seconds of GPUs, and joules where the machine counts them."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

POWERCAP = Path("/sys/class/powercap")
MOST_W = 1000.0  # more than a CPU package takes: how fast its counter may run round
NO_COUNTER = "not recorded: there is no counter that this process can read"
TOO_SELDOM = "not recorded: the counter could not be read often enough"


class CostMeter:
    """Counts, from when it is made, what this process has cost.

    A CPU is counted by Linux's RAPL where its files can be read, with all that the machine did at the same time. A
    counter of RAPL begins again after some minutes: `update` has to be called more often, or nothing is recorded. A GPU
    is counted by NVML if the package pynvml is installed. Joules are never estimated.

    Args:
    - `device`: the device that does the work.
    - `num_processes`: how many processes share the work, each with a GPU of its own on CUDA.
    """

    def __init__(self, device: torch.device, num_processes: int = 1) -> None:
        self._begin_s = time.monotonic()
        self._num_gpus = num_processes if device.type == "cuda" else 0
        self._counter: Callable[[], float | None] = _no_joules
        self._counted = NO_COUNTER
        if device.type == "cuda" and num_processes > 1:
            self._counted = "not recorded: the processes have a GPU each, and only the first one counts"
        elif device.type == "cuda":
            self._counter, self._counted = _gpu_counter(device)
        elif device.type == "cpu":
            self._counter, self._counted = _cpu_counter(POWERCAP)

    def update(self) -> None:
        """Read the counter, so that it can be told how often it has begun again."""
        self._counter()

    def read(self) -> dict[str, Any]:
        """Return the cost so far, ready for JSON.

        - `seconds`: by the clock.
        - `gpu_seconds`: the same times the number of GPUs; None without one.
        - `joules`: None where they are not counted, or were read too seldom.
        - `joules_of`: what was counted, or why nothing was.
        """
        seconds, joules = time.monotonic() - self._begin_s, self._counter()
        is_lost = joules is None and self._counter is not _no_joules
        return {
            "seconds": round(seconds, 1),
            "gpu_seconds": round(seconds * self._num_gpus, 1) if self._num_gpus else None,
            "joules": None if joules is None else round(joules, 1),
            "joules_of": TOO_SELDOM if is_lost else self._counted,
        }


def total_cost(costs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sum of what `CostMeter.read` returned for parts of a work; None where a part does not know."""

    def total(key: str) -> float | None:
        values = [cost[key] for cost in costs]
        return None if None in values else round(sum(values), 1)

    return {**{key: total(key) for key in ("seconds", "gpu_seconds", "joules")}, "joules_of": costs[-1]["joules_of"]}


def _no_joules() -> float | None:
    return None


def _gpu_counter(device: torch.device) -> tuple[Callable[[], float | None], str]:
    """Return a function that returns the joules of a GPU since now, and what is counted."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return _no_joules, "not recorded: the package pynvml is not installed"
    try:
        nvml.nvmlInit()
        gpu = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        begin_mj = nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
    except nvml.NVMLError as error:
        return _no_joules, f"not recorded: {error}"

    def joules() -> float | None:
        try:
            return float(nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) - begin_mj) / 1e3
        except nvml.NVMLError:
            return None

    return joules, "the GPU, by NVML"


def _cpu_counter(powercap: Path) -> tuple[Callable[[], float | None], str]:
    """Return a function that returns the joules of all CPU packages since now, and what is counted."""
    try:
        zones = [zone for zone in powercap.glob("intel-rapl:*") if (zone / "name").read_text().startswith("package")]
        packages = [_Package(zone) for zone in zones]
    except (OSError, ValueError):  # only root may read them on most systems
        packages = []
    if not packages:
        return _no_joules, NO_COUNTER

    def joules() -> float | None:
        values = [package.joules() for package in packages]
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(values) else None

    return joules, f"all that ran on {len(packages)} CPU package{'s' * (len(packages) > 1)}, by RAPL"


class _Package:
    """The counter of one CPU package: microjoules, which begin again at 0 after their largest value."""

    def __init__(self, zone: Path) -> None:
        self._file = zone / "energy_uj"
        self._range_uj = int((zone / "max_energy_range_uj").read_text()) + 1
        self._last_uj, self._last_s = int(self._file.read_text()), time.monotonic()
        self._total_uj: int | None = 0

    def joules(self) -> float | None:
        """Return the joules since this object was made; None for ever once a reading failed or came too late."""
        now_s = time.monotonic()
        if self._total_uj is None or (now_s - self._last_s) * MOST_W * 1e6 >= self._range_uj:
            self._total_uj = None
            return None
        try:
            now_uj = int(self._file.read_text())
        except (OSError, ValueError):
            self._total_uj = None
            return None
        self._total_uj += (now_uj - self._last_uj) % self._range_uj
        self._last_uj, self._last_s = now_uj, now_s
        return self._total_uj / 1e6
