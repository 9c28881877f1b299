"""The log folder of a training run: locked against other runs, and never overwritten."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import Timeout

from zoo.engine._checkpoint import BEST, CHECKPOINT, PREVIOUS
from zoo.engine._process import Process
from zoo.errors import ConfigError, join_names
from zoo.files import file_lock

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
METRICS_FILE = "metrics.jsonl"
SETTINGS_FILE = "experiment.json"


@contextmanager
def log_folder(folder: Path, process: Process, *, continues: bool) -> Iterator[None]:
    """Creates ``folder`` and locks it against other runs. Every rank must enter it.

    Args:
    - `continues`: whether the run resumes from a checkpoint in this folder. Otherwise a checkpoint in the folder is an
      error.

    Raises ConfigError, on every rank, if another run uses the folder, if it holds an earlier run, or if it is not
    writable.
    """
    with ExitStack() as stack:

        def claim() -> None:
            with report_write_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
                try:
                    stack.enter_context(file_lock(folder / LOCK_FILE, timeout_s=0))
                except Timeout:
                    what = "another run is training in this folder"
                    raise ConfigError(what, folder, "wait for it, or give another --log-dir") from None
                if not continues:
                    _check_unused(folder)

        process.on_main(claim)
        yield


@contextmanager
def report_write_errors(folder: Path) -> Iterator[None]:
    """Converts an OSError while a log is written to a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the log cannot be written ({error.strerror or error})",
            error.filename or folder,
            "give a writable folder as --log-dir",
        ) from error


def _check_unused(folder: Path) -> None:
    """Raise ConfigError if a log folder holds a run."""
    checkpoints = [name for name in (CHECKPOINT, PREVIOUS, BEST) if (folder / name).exists()]
    if checkpoints:
        raise ConfigError(
            f"the folder holds an earlier run ({join_names(checkpoints)})",
            folder,
            "continue it with --resume auto, remove the folder, or give another --log-dir",
        )
