"""What a run writes for TensorBoard."""

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
MAX_SIDE_PX = 512  # of the images of a validation, of which each has a record in every epoch
HISTOGRAM_NAMES = ("fc", "bn_out")


class Board:
    """An event file in ``log_dir``: scalars, input images, settings, hyper-parameters, histograms.

    Args:
    - `log_dir`: folder of the file.
    - `config`: settings of the run.
    - `step`: number of steps that a resumed run has done; TensorBoard hides earlier records of later steps.
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
        """Write what SummaryWriter.add_hparams would write, which would make it a separate run in TensorBoard."""
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
        """Write val/* at the number of optimizer steps the weights have seen."""
        scores = {name: result.scores()[name] for name in self._scores}
        for name, value in {"loss": result.loss, **scores}.items():
            self._writer.add_scalar(f"val/{name}", value, step)
        self._writer.flush()

    def images(self, step: int, images: Tensor) -> None:
        """Write the first few of the normalised input images (N, 3, H, W) without their normalisation."""
        self._writer.add_images("train/inputs", self._colours(images[:NUM_IMAGES]), step)

    def class_maps(self, step: int, name: str, image: Tensor, maps: Mapping[str, Tensor]) -> None:
        """Write a normalised image (3, h, w), and beside it each map of classes (H, W) over it, at most 512 px wide."""
        pixels = (255 * self._colours(image)).round().clamp(0, 255).to(torch.uint8)
        picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        picture.thumbnail((MAX_SIDE_PX, MAX_SIDE_PX), Image.Resampling.BILINEAR)
        palette = palette_of(self._config)
        panels = [picture, *(classes_over(picture, classes.numpy(), palette) for classes in maps.values())]
        row = np.concatenate([np.asarray(panel) for panel in panels], axis=1)
        self._writer.add_image(name, row, step, dataformats="HWC")

    def _colours(self, images: Tensor) -> Tensor:
        """Return normalised images (..., 3, H, W) as colours from 0 to 1, on the CPU."""
        return images.detach().float().cpu() * self._std + self._mean

    def reconstruction(self, step: int, errors: Mapping[str, float]) -> None:
        """Write reconstruction/CHAIN/BLOCK, relative errors, at the optimizer step."""
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
        """Write what is pending and close the event file; OSError if any of it could not be written."""
        with self._opened:
            try:
                self._writer.flush()  # raises if the thread that writes has failed, which closing does not
            finally:
                self._writer.close()


@contextmanager
def _quiet_writer_thread() -> Iterator[None]:
    """Print no traceback of an OSError in TensorBoard's thread: the next record raises it in this thread."""
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
