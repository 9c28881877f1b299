"""TensorBoard log of a run.

Tested by tests/run/test_run_log.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from zoo.config import Experiment, leaves
from zoo.engine.reporting import TrainMetrics
from zoo.engine.task import Result
from zoo.tasks import task_of

NUM_IMAGES = 8
HISTOGRAM_NAMES = re.compile(r"(?:.*\.)?(?:fc|bn_out)\.|(?:head\.projection|norm)\.")


class Board:
    """TensorBoard event file: scalars, input images, settings, hyperparameters, histograms.

    Args:
    - `log_dir`: folder of the file.
    - `config`: settings of the run.
    - `step`: number of steps before a resumed run; TensorBoard hides earlier records of later steps.
    """

    def __init__(self, log_dir: Path, config: Experiment, step: int = 0) -> None:
        self._config = config
        self._mean = torch.tensor(config.input.mean).view(3, 1, 1)
        self._std = torch.tensor(config.input.std).view(3, 1, 1)
        self._scores = list(task_of(config).shown_labels)
        indented = config.model_dump_json(indent=2).replace("\n", "\n    ")
        self._writer: Any = SummaryWriter(str(log_dir), purge_step=step + 1 if step else None)
        self._writer.add_text("config", f"    {indented}", step)
        self._add_hparams(dict(leaves(config.model_dump(exclude={"expected"}))), self._scores)

    def _add_hparams(self, values: dict[str, Any], scores: Iterable[str]) -> None:
        """Write hyperparameters like SummaryWriter.add_hparams, which would create a separate run in TensorBoard."""
        plain = {key: value for key, value in values.items() if isinstance(value, (bool, int, float, str))}
        for summary in hparams(plain, {f"val/{name}": 0.0 for name in (*scores, "loss")}):
            self._writer.file_writer.add_summary(summary)

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

    def images(self, step: int, images: Tensor) -> None:
        """Write the first of the normalized input images (N, 3, H, W), denormalized."""
        shown = images[:NUM_IMAGES].detach().float().cpu() * self._std + self._mean
        self._writer.add_images("train/inputs", shown, step)

    def reconstruction(self, step: int, errors: Mapping[str, float]) -> None:
        """Write the relative errors reconstruction/CHAIN/BLOCK at the optimizer step."""
        for name, error in errors.items():
            self._writer.add_scalar(f"reconstruction/{name}", error, step)

    def gradient_angle(self, step: int, degrees: float) -> None:
        """Write reconstruction/gradient_angle_degrees at the optimizer step."""
        self._writer.add_scalar("reconstruction/gradient_angle_degrees", degrees, step)

    def parameters(self, step: int, model: nn.Module) -> None:
        """Write histograms of the parameters of classifier and last norm, as published."""
        for name, parameter in model.named_parameters():
            if HISTOGRAM_NAMES.match(name):
                self._writer.add_histogram(name, parameter.detach().float().cpu(), step)

    def close(self) -> None:
        """Flush and close the event file. Raises OSError if records could not be written."""
        try:
            self._writer.flush()  # raises if the writer thread has failed; close() does not
        finally:
            self._writer.close()
