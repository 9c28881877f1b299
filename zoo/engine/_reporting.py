"""Reports of the training loop: the metrics of a log interval, and the interface of the log that receives them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import torch

from zoo.engine._meters import Reading
from zoo.engine._state import TrainState
from zoo.engine._task import Result

BatchT = TypeVar("BatchT")

VALIDATION = "validation"  # title of the progress of a validation, during which nothing else is reported


@dataclass(frozen=True)
class TrainMetrics:
    """Metrics of a log interval over all ranks; scores in percent by name, losses in nats per image."""

    step: int
    """Number of optimizer steps since the start of training: the x axis of every curve."""
    epoch: int
    """Index of the running epoch, from 0."""
    batch: int
    """Number of batches of the running epoch that are done, from 1 to ``num_batches``."""
    num_batches: int
    loss: float
    """Mean over the images since the last report."""
    scores: Mapping[str, float]
    """Scores over the images since the last report."""
    epoch_loss: float
    """Mean over the images of the epoch so far."""
    epoch_scores: Mapping[str, float]
    """Scores over the images of the epoch so far."""
    lr: float
    """Learning rate of the last step (first parameter group)."""
    images_per_s: float
    """Throughput of all ranks together since the last report."""
    step_s: float
    """Mean duration of a step since the last report, waiting for data included."""
    data_s: float
    """The part of ``step_s`` spent waiting for the loader."""
    peak_memory_bytes: int
    """CUDA: peak of the memory allocated on the device; CPU: peak resident size of the process."""
    eta_s: float
    """Expected time to the end of training, without validations."""

    def record(self) -> dict[str, Any]:
        """Return all metrics in one dict; the names of the epoch's scores start with ``epoch_``."""
        flat: dict[str, Any] = {}
        for key, value in asdict(self).items():
            prefix = key.removesuffix("scores")
            flat |= {key: value} if prefix == key else {f"{prefix}{name}": score for name, score in value.items()}
        return flat


class Log(Protocol):
    """Interface of the log of a run. Every rank calls all methods; the log decides what each rank writes.

    No method may wait for the device.
    """

    def progress(self, title: str, total: int, done: int = 0) -> AbstractContextManager[Callable[[int], object]]:
        """Open a progress bar of ``total`` batches, ``done`` of them finished; yield ``advance(count)``."""

    def train_metrics(self, metrics: TrainMetrics) -> None:
        """Record the metrics of a log interval."""

    def validation(self, epoch: int, step: int, result: Result, is_best: bool) -> None:
        """Record the validation at the end of ``epoch`` (from 0), after ``step`` optimizer steps in all."""

    def record(self, event: str, **fields: Any) -> None:
        """Record an event and its fields, which JSON can represent."""


class Pace:
    """Measures the duration of the steps since the last `take`, in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._data_s = 0.0
        self._begin = time.perf_counter()
        self._all_steps = 0
        self._all_s = 0.0

    def timed(self, loader: Iterable[BatchT]) -> Iterator[BatchT]:
        """Yield the batches of ``loader``; count each as a step, and the time to get it as waiting for data."""
        self._begin = time.perf_counter()
        batches = iter(loader)
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            self._data_s += time.perf_counter() - asked
            if batch is None:
                return
            self._num_steps += 1
            yield batch

    def take(self) -> tuple[float, float, float]:
        """Return the seconds since the last call, per step, and per step spent waiting for data."""
        now = time.perf_counter()
        elapsed, num_steps = now - self._begin, max(self._num_steps, 1)
        times = elapsed, elapsed / num_steps, self._data_s / num_steps
        self._all_steps += self._num_steps
        self._all_s += elapsed
        self._begin, self._num_steps, self._data_s = now, 0, 0.0
        return times

    def expected_s(self, num_steps: int) -> float:
        """Return the expected seconds of ``num_steps`` steps, from the mean of all steps up to the last `take`."""
        return num_steps * self._all_s / max(self._all_steps, 1)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of tensors on a CUDA device; for the CPU of the whole process, 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def metrics_since(
    before: Reading, now: Reading, state: TrainState, num_batches: int, lr: float, pace: Pace
) -> TrainMetrics:
    """Return the metrics of the steps between two readings of one epoch, and start a new interval of ``pace``.

    ``num_batches`` is the number of batches of an epoch and ``lr`` the learning rate of the last step.
    """
    elapsed_s, step_s, data_s = pace.take()
    between = now.since(before)
    return TrainMetrics(
        step=state.step,
        epoch=state.epoch,
        batch=state.batch,
        num_batches=num_batches,
        loss=between.loss,
        scores=state.task.scores(between),
        epoch_loss=now.loss,
        epoch_scores=state.task.scores(now),
        lr=lr,
        images_per_s=between.count / elapsed_s,
        step_s=step_s,
        data_s=data_s,
        peak_memory_bytes=peak_memory_bytes(state.process.device),
        eta_s=pace.expected_s(state.config.optimizer.schedule.epochs * num_batches - state.step),
    )
