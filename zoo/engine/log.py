"""What the training loop tells the outside: the interface of a run's log, which zoo/report implements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from zoo.engine.validate import Result


@dataclass(frozen=True)
class TrainMetrics:
    """What is known at a log interval; accuracies in percent, losses in nats per image, over all ranks."""

    step: int
    """Optimizer steps done since the start of training: the x of every curve."""
    epoch: int
    """Index of the running epoch, from 0."""
    batch: int
    """Batches done of the running epoch, from 1 to ``num_batches``."""
    num_batches: int
    loss: float
    """Mean over the images since the last report, like ``top1`` and ``top5``."""
    top1: float
    top5: float
    epoch_loss: float
    """Mean over the images of the epoch so far, like ``epoch_top1`` and ``epoch_top5``."""
    epoch_top1: float
    epoch_top5: float
    lr: float
    """The rate that the last step was done with (first parameter group)."""
    images_per_s: float
    """Of all ranks together, over the time since the last report."""
    step_s: float
    """Mean duration of a step since the last report, waiting for data included."""
    data_s: float
    """The part of ``step_s`` that was spent waiting for the loader."""
    peak_memory_bytes: int
    """CUDA: most memory ever allocated on the device; CPU: largest resident size of the process."""
    eta_s: float
    """Expected time to the end of the last epoch's training, validations not included."""


class Log(Protocol):
    """Where a run reports to. Every rank has one and calls all of it; what a rank writes is the log's business.

    No method may wait for the device, except those that are given tensors, parameters or modules.
    """

    def message(self, text: str) -> None:
        """Record one line of text: notices, warnings, what was loaded."""

    def progress(self, title: str, total: int, done: int = 0) -> AbstractContextManager[Callable[[int], object]]:
        """Open a progress bar of ``total`` batches of which ``done`` are done; yields ``advance(count)``."""

    def train_metrics(self, metrics: TrainMetrics) -> None:
        """Record the numbers of a log interval."""

    def validation(self, epoch: int, step: int, result: Result, is_best: bool) -> None:
        """Record the validation at the end of ``epoch`` (from 0), after ``step`` optimizer steps in all."""

    def images(self, step: int, images: Tensor) -> None:
        """Record a few images of a batch (N, 3, H, W) as the network sees them: normalised, on the device."""

    def reconstruction(self, step: int, errors: Mapping[str, float]) -> None:
        """Record the relative reconstruction error of each block of reversible chains, by ``chain/index``."""

    def parameters(self, step: int, model: nn.Module) -> None:
        """Offer the raw model's parameters for histograms; called at each log interval."""
