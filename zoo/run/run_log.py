"""Log of a training run: text, JSON lines, TensorBoard and progress bar (a `zoo.engine._reporting.Log`)."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from zoo.config.experiment import Experiment
from zoo.engine._observers import Observer
from zoo.engine._reporting import VALIDATION, TrainMetrics
from zoo.engine._state import TrainState
from zoo.engine._task import Result
from zoo.errors import ConfigError
from zoo.files import flush_to_disk, write_json
from zoo.models.classifier import classifier_parameters
from zoo.run.console import PlainFormatter, Progress
from zoo.run.environment import describe_environment
from zoo.run.log_folder import METRICS_FILE, SETTINGS_FILE, report_write_errors
from zoo.tables import counted
from zoo.tasks import task_of

logger = logging.getLogger(__name__)

HISTOGRAM_STEPS = 10


class TextLog(logging.FileHandler):
    """Text log with escaped lines, see `PlainFormatter`. Reports the first write error only."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(PlainFormatter("%(asctime)s - %(message)s"))
        self._has_complained = False

    def _open(self) -> io.TextIOWrapper:
        return io.TextIOWrapper(open(self.baseFilename, "ab"), self.encoding, self.errors)

    def handleError(self, record: logging.LogRecord) -> None:
        """Print the first write error to stderr; the log itself cannot report it."""
        if not self._has_complained:
            self._has_complained = True
            print(f"{self.baseFilename}: lines are missing from here on: {sys.exc_info()[1]}", file=sys.stderr)

    def close(self) -> None:
        """Close the file, even if a full disk loses buffered lines."""
        with suppress(OSError):
            super().close()


class Board:
    """TensorBoard event file: scalars, settings and histograms.

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

    def parameters(self, step: int, model: nn.Module) -> None:
        """Write histograms of the finite values of the parameters in `histogram_parameters`."""
        for name, parameter in histogram_parameters(model).items():
            values = parameter.detach().float()
            values = values[values.isfinite()].cpu()
            if len(values):
                self._writer.add_histogram(name, values, step)

    def close(self) -> None:
        """Flush and close the event file. Raises OSError if records could not be written."""
        try:
            self._writer.flush()  # raises if the writer thread has failed; close() does not
        finally:
            self._writer.close()


class JsonLines:
    """Appends records to the JSON lines file of a run and its resumptions.

    The file has complete lines even after a kill or on a full disk.
    """

    def __init__(self, path: Path) -> None:
        _drop_torn_line(path)
        self._file = path.open("ab", buffering=0)

    def write(self, event: str, **fields: Any) -> None:
        """Append an object of ``event``, ``time_s`` (Unix time) and the ``fields``.

        Writes NaN and infinities as null. Raises OSError if the record cannot be written; the file then has no part of
        it.
        """
        record = {"event": event, "time_s": round(time.time(), 3), **fields}
        text = json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False)
        end, left = os.fstat(self._file.fileno()).st_size, f"{text}\n".encode()
        try:
            while left:  # a nearly full disk accepts only part of the record
                left = left[self._file.write(left) :]
        except OSError:
            os.ftruncate(self._file.fileno(), end)
            raise

    def close(self) -> None:
        """Flush all records to the disk and close the file."""
        flush_to_disk(self._file.fileno())
        self._file.close()


class RunLog:
    """Writes ``training_<rank>.log`` on every rank; on rank 0 also metrics.jsonl, TensorBoard and the progress bar.

    A context manager. Raises ConfigError if the files cannot be opened. Counts later write errors and logs the first
    one; training continues. Only a checkpoint that cannot be written ends the run.

    Args:
    - `log_dir`: folder of all files; created if necessary. A second run in the same folder appends to them.
    - `rank`: rank of this process.
    - `config`: settings of the run.
    """

    def __init__(self, log_dir: Path, rank: int, config: Experiment) -> None:
        self._log_dir = log_dir
        self._config = config
        self._labels = task_of(config).shown_labels
        self._is_main = rank == 0
        self._progress: Progress | None = None
        self._board: Board | None = None
        self._metrics: JsonLines | None = None
        self._start_s: float | None = None
        self._has_lost = False
        with report_write_errors(log_dir), ExitStack() as opened:
            log_dir.mkdir(parents=True, exist_ok=True)
            self._text = TextLog(log_dir / f"training_{rank}.log")
            opened.callback(self._text.close)
            if self._is_main:
                self._metrics = JsonLines(log_dir / METRICS_FILE)
            opened.pop_all()
        zoo_logger = logging.getLogger("zoo")
        self._level = zoo_logger.level
        if zoo_logger.getEffectiveLevel() > logging.INFO:  # only the command line sets it otherwise
            zoo_logger.setLevel(logging.INFO)
        zoo_logger.addHandler(self._text)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            reason = f"stopped: {type(error).__name__}: {error}"
            logger.info("%s", reason, extra={"only_in_files": True})  # the caller prints the error
        if self._start_s is not None:
            self.record("end", seconds=round(time.monotonic() - self._start_s, 1))
        if self._metrics is not None:
            self._write(self._metrics.close)
        if self._board is not None:
            self._write(self._board.close)
        zoo_logger = logging.getLogger("zoo")
        zoo_logger.removeHandler(self._text)
        zoo_logger.setLevel(self._level)
        self._text.close()

    def begin(self, step: int, device: torch.device, world_size: int, images: Mapping[str, Mapping[str, Any]]) -> None:
        """Record settings, environment and ``images`` at the start of a run, or at its resumption if ``step`` > 0.

        TensorBoard hides records of an interrupted run beyond ``step``. Raises ConfigError if the settings cannot be
        written.

        Args:
        - `images`: for "train" and "val", the number of images and classes and the digests that identify the images.
        """
        if not self._is_main:
            return
        with report_write_errors(self._log_dir):
            write_json(self._log_dir / SETTINGS_FILE, self._config.model_dump(mode="json"))
        self.record(
            "resume" if step else "start",
            step=step,
            world_size=world_size,
            config_digest=self._config.digest(),
            images=images,
            environment=describe_environment(device),
        )
        self._start_s = time.monotonic()
        with report_write_errors(self._log_dir):
            self._board = Board(self._log_dir, self._config, step)

    def record(self, event: str, **fields: Any) -> None:
        """Append an event to the metrics file."""
        if self._metrics is not None:
            self._write(partial(self._metrics.write, event, **fields))

    def _write(self, write: Callable[[], object]) -> None:
        """Call ``write``, and log its first OSError."""
        try:
            write()
        except OSError as error:
            if not self._has_lost:
                logger.warning("%s: the log cannot be written (%s), some records are missing", self._log_dir, error)
            self._has_lost = True

    @contextmanager
    def progress(self, title: str, total: int, done: int = 0) -> Iterator[Callable[[int], object]]:
        """Shows a bar of ``total`` batches, ``done`` of them finished; yields a function that advances it."""
        with Progress(title, total, done, show=self._is_main, lines=title == VALIDATION) as progress:
            self._progress = progress
            try:
                yield progress.advance
            finally:
                self._progress = None

    def train_metrics(self, metrics: TrainMetrics) -> None:
        """Record means since the last record, and averages of the epoch."""
        logger.info("%s", _train_line(metrics, self._labels), extra={"shown_by_bar": True})
        if self._progress is not None:
            name, label = next(iter(self._labels.items()))
            self._progress.set_status(
                f"{metrics.images_per_s:.0f} img/s, loss {metrics.loss:.3f}, {label} {metrics.scores[name]:.1f}, "
                f"{metrics.peak_memory_bytes / 1e9:.1f} GB, ETA {timedelta(seconds=round(metrics.eta_s))}"
            )
        self.record("train", **metrics.record())
        if self._board is not None:
            self._write(partial(self._board.train, metrics))

    def validation(self, epoch: int, step: int, result: Result, is_best: bool) -> None:
        """Record the validation after ``epoch`` (from 0) and ``step`` optimizer steps in total."""
        logger.info("%s", _validation_line(epoch, result, self._labels, is_best))
        self.record("validation", epoch=epoch, step=step, is_best=is_best, **result.record())
        if self._board is not None:
            self._write(partial(self._board.validation, step, result))

    def parameters(self, step: int, model: nn.Module) -> None:
        """Record histograms of the parameters in `histogram_parameters`."""
        if self._board is not None:
            self._write(partial(self._board.parameters, step, model))


class Histograms(Observer):
    """Records histograms of the parameters in `histogram_parameters` every 10 steps.

    Args:
    - `log`: receives the parameters.
    """

    def __init__(self, log: RunLog) -> None:
        self._log = log

    def after_step(self, state: TrainState) -> None:
        """Record the parameters, if they are due."""
        if state.step % HISTOGRAM_STEPS == 0:
            self._log.parameters(state.step, state.model)


def histogram_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the classifier and of the last norm, as in the original project, by name."""
    norm = getattr(model, "last_norm", getattr(model, "bn_out", None))
    selected = [*classifier_parameters(model), *(() if norm is None else norm.parameters())]
    ids = set(map(id, selected))
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in ids}


def read_validation(log_dir: Path, epoch: int) -> dict[str, Any]:
    """Return the last validation record after ``epoch`` (from 0). Raises ConfigError if the log has none."""
    path = log_dir / METRICS_FILE
    found: dict[str, Any] | None = None
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if (record["event"], record.get("epoch")) == ("validation", epoch):
                found = record
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the scores of a run cannot be read ({error})", path) from error
    if found is None:
        raise ConfigError(
            f"the log has no validation after epoch {epoch + 1}", path, "score the run's checkpoint with zoo validate"
        )
    return found


def _train_line(metrics: TrainMetrics, labels: Mapping[str, str]) -> str:
    """Return means since the last line, with averages of the epoch in parentheses."""
    scores = [f"{label} {metrics.scores[key]:.2f} ({metrics.epoch_scores[key]:.2f})" for key, label in labels.items()]
    return (
        f"epoch {metrics.epoch + 1} [{metrics.batch}/{metrics.num_batches}] "
        f"time {metrics.step_s:.3f} s, data {metrics.data_s:.3f} s, "
        f"loss {metrics.loss:.4f} ({metrics.epoch_loss:.4f}), "
        f"{', '.join(scores)}, "
        f"lr {metrics.lr:.3g}, {metrics.images_per_s:.0f} images/s, "
        f"{metrics.peak_memory_bytes / 1e9:.2f} GB, ETA {timedelta(seconds=round(metrics.eta_s))}"
    )


def _validation_line(epoch: int, result: Result, labels: Mapping[str, str], is_best: bool) -> str:
    errors = {key: f" ± {error:.2f}" for key, error in result.standard_errors().items() if error}
    scores = [f"{label} {result.scores()[key]:.2f}{errors.get(key, '')}" for key, label in labels.items()]
    return (
        f"epoch {epoch + 1} validation: {', '.join(scores)}, "
        f"loss {result.loss:.4f} over {counted(result.count, 'image')}{', the best so far' * is_best}"
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drop_torn_line(path: Path) -> None:
    """Truncate an incomplete last line, left by a full disk or a power failure."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
