"""Times several steps in turn, so that disturbances of the machine affect all of them equally."""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zoo.memory.allocations import clear_gradients

MIN_SAMPLE_S = 0.01  # minimum length of a sample
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # options of mallopt, from malloc.h


class TimedStep(NamedTuple):
    """A timed step: ``run(n)`` executes it n times; ``prepare()`` runs before each sample and is not timed."""

    run: Callable[[int], object]
    prepare: Callable[[], object] = lambda: None


class Clock:
    """CPU time of this thread if it does all the work, otherwise wall-clock time after synchronizing the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_thread_time = device.type == "cpu" and torch.get_num_threads() == 1
        self.description = "CPU time of the thread" if self._is_thread_time else "wall clock"

    def __call__(self) -> float:
        """Return the current time in seconds; only differences are meaningful."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.thread_time() if self._is_thread_time else time.perf_counter()


def time_interleaved(
    steps: Mapping[str, TimedStep],
    clock: Callable[[], float],
    *,
    rounds: int,
    warmup: int = 2,
    min_sample_s: float = MIN_SAMPLE_S,
) -> dict[str, list[float]]:
    """Return the seconds per call of each step, one value per round.

    A round takes one sample of every step, and each round starts with another step. A sample repeats short steps until
    it takes ``min_sample_s``.
    """
    calls = {}
    for name, step in steps.items():
        last_s = [_sample(step, clock, 1) for _ in range(warmup)][-1]
        calls[name] = max(1, math.ceil(min_sample_s / max(last_s, 1e-6)))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for index in range(rounds):
        start = index % len(names)
        for name in names[start:] + names[:start]:
            seconds[name].append(_sample(steps[name], clock, calls[name]) / calls[name])
    return seconds


def ratios(seconds: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Return the ratios of two steps' times within each round."""
    return [mine / other for mine, other in zip(seconds, baseline, strict=True)]


def _sample(step: TimedStep, clock: Callable[[], float], calls: int) -> float:
    step.prepare()
    start = clock()
    step.run(calls)
    return clock() - start


def training_step(
    forward: Callable[[], Tensor], model: nn.Module, update: Callable[[], object] = lambda: None
) -> TimedStep:
    """Return a timed step: forward, backward, an update, and freeing the gradients.

    The default update does nothing, because the step of an optimizer takes the same time for all strategies.
    """

    def run(times: int) -> None:
        for _ in range(times):
            forward().backward()
            update()
            clear_gradients(model.parameters())

    return TimedStep(run)


def keep_heap() -> str:
    """Configure malloc to keep freed memory, and return a description for the results.

    By default glibc returns the memory of large tensors to the kernel. The page faults on reuse take longer than the
    arithmetic and would favor in-place operations. Without glibc, this does nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # TypeError on Windows
        return "system default"
    kept = mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, -1)
    return "heap kept (mallopt: no mmap, no trim)" if kept else "system default"


def describe_timing(clock: Clock, allocator: str, rounds: int) -> dict[str, Any]:
    """Return the settings that affect times, for the header of the results."""
    return {
        "threads": torch.get_num_threads(),
        "GOMP_CPU_AFFINITY": os.environ.get("GOMP_CPU_AFFINITY"),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY"),
        "allocator": allocator,
        "clock": clock.description,
        "rounds": rounds,
    }
