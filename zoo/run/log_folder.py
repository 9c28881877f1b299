"""Log folder of a training run: locked for other runs, and never overwritten by accident."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from zoo.config import Experiment, leaves, load_experiment
from zoo.data.location import DataPath
from zoo.data.map_dataset import Datasets
from zoo.engine.checkpoint import BEST, CHECKPOINT, PREVIOUS
from zoo.engine.consistency import differing_keys
from zoo.engine.process import Process
from zoo.errors import ConfigError, ZooError, escape, join_names
from zoo.files import write_json

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
METRICS_FILE = "metrics.jsonl"
SETTINGS_FILE = "experiment.json"
# Patterns of all files of a run.
RUN_FILES = (CHECKPOINT, PREVIOUS, BEST, METRICS_FILE, SETTINGS_FILE, "training_*.log", "events.out.tfevents.*")


@contextmanager
def log_folder(folder: Path, process: Process, *, continues: bool, overwrite: bool) -> Iterator[None]:
    """Context manager: creates ``folder`` and locks it against other runs. Every rank must enter it.

    Args:
    - `continues`: whether the run resumes from a checkpoint in this folder. Otherwise a folder with a checkpoint is an
      error.
    - `overwrite`: whether to remove all files of an earlier run instead.

    Raises ConfigError, on every rank, if another run uses the folder, if it holds an earlier run, or if it is not
    writable.
    """
    with ExitStack() as stack:

        def claim() -> None:
            with writable(folder):
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(_only_run_in(folder))
                if overwrite and not continues:
                    _clear(folder)
                elif not continues:
                    check_unused(folder)

        process.on_main(claim)
        yield


def check_log_dir(folder: Path, data: DataPath | Datasets) -> None:
    """Raise ConfigError if the log folder lies inside ``data``, or is not UTF-8, which TensorBoard needs."""
    try:
        os.fspath(folder).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            "the name of the log folder is not UTF-8, which TensorBoard needs", folder, "give another --log-dir"
        ) from None
    if isinstance(data, Datasets):
        return
    place = Path(os.path.realpath(folder))  # unlike Path.resolve, accepts cyclic links
    parts = [os.path.realpath(data / part) for part in ("train", "val")]
    if place == Path(os.path.realpath(data)) or any(place.is_relative_to(part) for part in parts):
        raise ConfigError(
            f"the log folder is inside the data {escape(data)}, where files of the run would mix with images",
            folder,
            "give another --log-dir",
        )


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Context manager: turns an OSError while a log is written into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the log cannot be written ({error.strerror or error})",
            error.filename or folder,
            "give a writable folder as --log-dir",
        ) from error


@contextmanager
def _only_run_in(folder: Path) -> Iterator[None]:
    try:
        with FileLock(folder / LOCK_FILE, timeout=0):
            yield
    except Timeout:
        raise ConfigError(
            "another run is training in this folder", folder, "wait for it, or give another --log-dir"
        ) from None


def check_unused(folder: Path) -> None:
    """Raise ConfigError if a log folder holds a run; it need not exist."""
    checkpoints = [name for name in (CHECKPOINT, PREVIOUS, BEST) if (folder / name).exists()]
    if checkpoints:
        raise ConfigError(
            f"the folder holds an earlier run ({join_names(checkpoints)})",
            folder,
            "continue it with --resume auto, replace it with --overwrite, or give another --log-dir",
        )


def _clear(folder: Path) -> None:
    """Remove all files of a run."""
    for pattern in RUN_FILES:
        for path in folder.glob(pattern):
            path.unlink()


def write_settings(folder: Path, config: Experiment) -> None:
    """Write all settings of the run, including defaults, to ``experiment.json``, itself an experiment file.

    If the file of a resumed run has other settings, which are then among those that may change, rewrites it and logs
    the changes. Raises ConfigError if it cannot be written.
    """
    path, settings = folder / SETTINGS_FILE, config.model_dump(mode="json")
    if path.exists():
        try:
            before = load_experiment(path, known_networks_only=False).model_dump(mode="json")
        except ZooError as error:
            logger.warning("rewritten: %s", error)
        else:
            changed = differing_keys(dict(leaves(before)), dict(leaves(settings)))
            if not changed:
                return
            logger.info("%s: rewritten, changed: %s", escape(path), join_names(changed))
    with writable(folder):
        write_json(path, settings)
