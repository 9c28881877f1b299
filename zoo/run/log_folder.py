"""The folder that a training run writes to. Only one run at a time uses it, and no run is replaced by accident."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from zoo.config import Experiment, leaves, load_experiment
from zoo.data.location import DataPath
from zoo.engine.checkpoint import BEST, CHECKPOINT, PREVIOUS
from zoo.engine.consistency import differing_keys
from zoo.engine.process import Process
from zoo.errors import ConfigError, ZooError, fault, listed, printable
from zoo.files import remove_leftovers, write_json

logger = logging.getLogger(__name__)

LOCK = ".lock"
METRICS_FILE = "metrics.jsonl"
SETTINGS = "experiment.json"
# Patterns of all files that a run leaves.
RUN_FILES = (CHECKPOINT, PREVIOUS, BEST, METRICS_FILE, SETTINGS, "training_*.log", "events.out.tfevents.*")


@contextmanager
def log_folder(folder: Path, process: Process, *, continues: bool, overwrite: bool) -> Iterator[None]:
    """Make ``folder`` and keep every other run out of it until the context ends; every rank has to enter it.

    With ``continues`` the run goes on from a checkpoint of this folder. Without it a folder that has a checkpoint is
    refused, or with ``overwrite`` all files that a run leaves are removed from it. The temporary files of a killed
    process are always removed. ConfigError, on every rank, if another run has the folder, if it holds a run that
    would be replaced, or if it cannot be written to.
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
                remove_leftovers(folder)

        process.on_main(claim)
        yield


def check_place(folder: Path, data: DataPath) -> None:
    """Raise ConfigError for a log folder that TensorBoard cannot name, or that is ``data`` or in its train/ or val/."""
    try:
        os.fspath(folder).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"the name of the log folder is not UTF-8, which TensorBoard needs; {printable(folder)}: give another "
            "--log-dir"
        ) from None
    place = Path(os.path.realpath(folder))  # unlike Path.resolve this accepts links that lead in a circle
    parts = [os.path.realpath(data / part) for part in ("train", "val")]
    if place == Path(os.path.realpath(data)) or any(place.is_relative_to(part) for part in parts):
        raise ConfigError(
            f"the log folder is among the images of {printable(data)}, where checkpoints would be mixed with "
            f"them; {printable(folder)}: give another --log-dir"
        )


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Raise ConfigError where the system does not let a log folder, or a file in it, be made."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the log cannot be written ({error.strerror or error}); {printable(error.filename or folder)}: give a "
            "folder that can be written to as --log-dir"
        ) from error


@contextmanager
def _only_run_in(folder: Path) -> Iterator[None]:
    try:
        with FileLock(folder / LOCK, timeout=0):
            yield
    except Timeout:
        raise ConfigError(
            fault("another run is training in this folder", folder, "wait for it, or give another --log-dir")
        ) from None


def check_unused(folder: Path) -> None:
    """Raise ConfigError for a log folder that holds a run; it need not exist."""
    checkpoints = [name for name in (CHECKPOINT, PREVIOUS, BEST) if (folder / name).exists()]
    if checkpoints:
        raise ConfigError(
            f"the folder holds an earlier run ({listed(checkpoints)}); {printable(folder)}: continue it with --resume "
            "auto, replace it with --overwrite, or give another --log-dir"
        )


def _clear(folder: Path) -> None:
    """Remove all files that a run leaves."""
    for pattern in RUN_FILES:
        for path in folder.glob(pattern):
            path.unlink()


def write_settings(folder: Path, config: Experiment) -> None:
    """Write all settings of the run, defaults included, to ``experiment.json``, which is an experiment file itself.

    A resumed run finds this file. Where its settings differ, they are among those that may change: the file is written
    anew and the changed settings are logged. ConfigError if it cannot be written.
    """
    path, settings = folder / SETTINGS, config.model_dump(mode="json")
    if path.exists():
        try:
            before = load_experiment(path).model_dump(mode="json")
        except ZooError as error:
            logger.warning("written anew: %s", error)
        else:
            changed = differing_keys(dict(leaves(before)), dict(leaves(settings)))
            if not changed:
                return
            logger.info("%s: written anew, changed: %s", printable(path), listed(changed))
    with writable(folder):
        write_json(path, settings)
