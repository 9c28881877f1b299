"""TensorBoard log of a run.

Tested by tests/run/test_run_log.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from zoo.config import Experiment
from zoo.engine.reporting import TrainMetrics
from zoo.engine.task import Result
from zoo.tasks import task_of


class Board:
    """TensorBoard event file: scalars and settings.

    Args:
    - `log_dir`: folder of the file.
    - `config`: settings of the run.
    - `step`: number of steps before a resumed run; TensorBoard hides earlier records of later steps.
    """

    def __init__(self, log_dir: Path, config: Experiment, step: int = 0) -> None:
        self._scores = list(task_of(config).shown_labels)
        indented = config.model_dump_json(indent=2).replace("\n", "\n    ")
        self._writer: Any = SummaryWriter(str(log_dir), purge_step=step + 1 if step else None)
        self._writer.add_text("config", f"    {indented}", step)

    def train(self, metrics: TrainMetrics) -> None:
        """Write train/* at the optimizer step: means since the last report, learning rate, speed, memory."""
        speed = {"lr": metrics.lr, "images_per_s": metrics.images_per_s}
        scores = {name: metrics.scores[name] for name in self._scores}
        for name, value in {"loss": metrics.loss, **scores, **speed}.items():
            self._writer.add_scalar(f"train/{name}", value, metrics.step)
        self._writer.add_scalar("train/peak_memory_gb", metrics.peak_memory_bytes / 1e9, metrics.step)

    def validation(self, step: int, result: Result) -> None:
        """Write val/* at the optimizer step."""
        scores = {name: result.scores()[name] for name in self._scores}
        for name, value in {"loss": result.loss, **scores}.items():
            self._writer.add_scalar(f"val/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file. Raises OSError if records could not be written."""
        try:
            self._writer.flush()  # raises if the writer thread has failed; close() does not
        finally:
            self._writer.close()
