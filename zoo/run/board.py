"""TensorBoard log of a run."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from zoo.config import Experiment, leaves
from zoo.engine.reporting import TrainMetrics
from zoo.engine.task import Result
from zoo.run.label_images import classes_over, palette_of
from zoo.tasks import task_of

NUM_IMAGES = 8
MAX_SIDE_PX = 512  # of validation images, which are logged every epoch
HISTOGRAM_NAMES = ("fc", "bn_out")


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
        with ExitStack() as opened:
            opened.enter_context(_quiet_writer_thread())
            self._writer: Any = SummaryWriter(str(log_dir), purge_step=step + 1 if step else None)
            self._writer.add_text("config", f"    {indented}", step)
            self._add_hparams(dict(leaves(config.model_dump(exclude={"expected"}))), self._scores)
            self._opened = opened.pop_all()

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
        self._writer.add_images("train/inputs", self._denormalized(images[:NUM_IMAGES]), step)

    def class_maps(self, step: int, name: str, image: Tensor, maps: Mapping[str, Tensor]) -> None:
        """Write a normalized image (3, h, w) next to its overlays with class maps (H, W), each at most 512 px wide."""
        pixels = (255 * self._denormalized(image)).round().clamp(0, 255).to(torch.uint8)
        picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        picture.thumbnail((MAX_SIDE_PX, MAX_SIDE_PX), Image.Resampling.BILINEAR)
        palette = palette_of(self._config)
        panels = [picture, *(classes_over(picture, classes.numpy(), palette) for classes in maps.values())]
        row = np.concatenate([np.asarray(panel) for panel in panels], axis=1)
        self._writer.add_image(name, row, step, dataformats="HWC")

    def _denormalized(self, images: Tensor) -> Tensor:
        """Return normalized images (..., 3, H, W) with values from 0 to 1, on the CPU."""
        return images.detach().float().cpu() * self._std + self._mean

    def reconstruction(self, step: int, errors: Mapping[str, float]) -> None:
        """Write the relative errors reconstruction/CHAIN/BLOCK at the optimizer step."""
        for name, error in errors.items():
            self._writer.add_scalar(f"reconstruction/{name}", error, step)

    def gradient_angle(self, step: int, degrees: float) -> None:
        """Write reconstruction/gradient_angle_degrees at the optimizer step."""
        self._writer.add_scalar("reconstruction/gradient_angle_degrees", degrees, step)

    def parameters(self, step: int, model: nn.Module) -> None:
        """Write histograms of the parameters whose names contain ``fc`` or ``bn_out``, as published."""
        for name, parameter in model.named_parameters():
            if any(part in name for part in HISTOGRAM_NAMES):
                self._writer.add_histogram(name, parameter.detach().float().cpu(), step)

    def close(self) -> None:
        """Flush and close the event file. Raises OSError if records could not be written."""
        with self._opened:
            try:
                self._writer.flush()  # raises if the writer thread has failed; close() does not
            finally:
                self._writer.close()


@contextmanager
def _quiet_writer_thread() -> Iterator[None]:
    """Context manager: suppresses tracebacks of OSErrors in TensorBoard's writer thread; the next write raises them."""
    before = threading.excepthook

    def hook(failure: threading.ExceptHookArgs) -> None:
        of_tensorboard = type(failure.thread).__module__.startswith("tensorboard.")
        if not (of_tensorboard and isinstance(failure.exc_value, OSError)):
            before(failure)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before
