"""Checkpoint files. They are written so that a good one always exists, and read so that a damaged one is noticed."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from zoo.engine.process import Process
from zoo.engine.snapshot import Snapshots
from zoo.engine.state import TrainState, rank_state, settle_buffers, shared_state, tensors_of_updates
from zoo.errors import CheckpointError, brief, printable
from zoo.files import replacing
from zoo.limits import is_number
from zoo.weights.read import load_bounded
from zoo.weights.stored_spec import is_described

logger = logging.getLogger(__name__)

CHECKPOINT = "checkpoint.pth.tar"  # the original project's names; the files are torch.save files, not archives
BEST = "model_best.pth.tar"
PREVIOUS = "checkpoint.previous.pth.tar"
FORMAT_VERSION = 1
# The keys of a checkpoint that model_best.pth.tar also has: what inference needs, and where the weights come from.
KEYS_OF_BEST = (
    "epoch", "arch", "best_prec1", "best_epoch", "network", "class_names", "config", "config_digest", "torch_version",
)  # fmt: skip
ZIP_MAGIC = b"PK"
MAX_VERSION_LENGTH, MAX_COUNT = 40, 2**63  # limits of what is shown of a file from an unknown source


class CheckpointWriter:
    """Writes the checkpoints of a run to ``folder`` in a thread, one at a time, while training goes on.

    A context; every rank has to open it and to call the same methods, rank 0 writes. A write that fails raises
    CheckpointError, on every rank, in the next `save`, `check` or `settle`; the earlier files are then still there.
    The end of the context waits for the write, also after an error, which a failure of the write does not replace: it
    is logged. Rank 0 keeps a copy of the state in host memory, see `Snapshots`. On a CPU the thread takes the copy of
    what only an update changes while the gradients of the next step are computed, and `TrainState.before_update` waits
    for the copy.
    """

    def __init__(self, process: Process, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._snapshots = Snapshots()
        self._thread = ThreadPoolExecutor(1, "zoo-checkpoint")
        self._write: Future[None] | None = None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.settle()
        finally:
            self._thread.shutdown()
            if self._write is not None and (failure := self._write.exception()) is not None:
                logger.error("%s", failure)

    def save(self, state: TrainState, is_best: bool = False) -> None:
        """Begin to write the state as it is now, when the write before has ended.

        The earlier checkpoint is renamed to ``checkpoint.previous.pth.tar``; with ``is_best`` the weights that
        validation scored are also written to ``model_best.pth.tar``, see `best_of`. All ranks have rank 0's running
        statistics afterwards.
        """
        self.settle()
        settle_buffers(state)
        ranks = state.process.gather(rank_state(state))
        state.process.on_main(partial(self._begin, state, ranks, is_best))

    def _begin(self, state: TrainState, ranks: list[dict[str, Any]], is_best: bool) -> None:
        try:
            content, complete = self._snapshots.take(_content(state, ranks), tensors_of_updates(state))
        except (MemoryError, RuntimeError) as error:  # torch reports memory that it does not get as a RuntimeError
            raise CheckpointError(
                f"the state cannot be copied to host memory ({brief(error)}); {printable(self._folder)}: a checkpoint "
                "needs memory for a copy of weights, momentum and moving average; free some, then continue with "
                "--resume auto"
            ) from error
        completed = threading.Event()
        state.before_update = completed.wait
        # The thread is started without work. If a signal handler raises while the pool starts a thread, as torch's does
        # when a data worker dies, the pool does not know that thread, and its shutdown would not wait for the write.
        self._thread.submit(int)
        self._write = self._thread.submit(_complete_and_write, complete, completed, content, self._folder, is_best)

    def check(self) -> None:
        """Raise the failure of a write that has ended, and do not wait for one that goes on."""
        if self._process.any_rank(self._write is not None and self._write.done()):
            self.settle()

    def settle(self) -> None:
        """Wait for the write that goes on, if there is one."""
        self._process.on_main(self._result)

    def wait(self) -> None:
        """Wait for the write as `settle` does, but raise nothing, and ask no other rank."""
        if self._write is not None:
            futures.wait([self._write])

    def _result(self) -> None:
        self.wait()
        write, self._write = self._write, None
        if write is not None:
            write.result()


def _content(state: TrainState, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a checkpoint holds: tensors and plain Python, readable with weights_only=True."""
    network = _network(state)
    names = {"class_names": list(state.class_names)} if network is None and state.class_names is not None else {}
    return {
        **shared_state(state),
        **names,
        "ranks": ranks,
        "network": network,
        "config": state.config.model_dump(mode="json"),
        "config_digest": state.config.digest(),
        "world_size": state.process.world_size,
        "num_threads": torch.get_num_threads(),
        "torch_version": str(torch.__version__),
        "device": state.process.device.type,
        "format_version": FORMAT_VERSION,
    }


def _network(state: TrainState) -> dict[str, Any] | None:
    """Return what a reader has to know to build the network; None for a network of the user's own."""
    if not is_described(state.config.network.arch):
        return None
    return state.config.network.described(state.config.input, state.class_names).model_dump(mode="json")


def _complete_and_write(
    complete: Callable[[], None], completed: threading.Event, content: dict[str, Any], folder: Path, is_best: bool
) -> None:
    """Complete the copy of a state, tell so, and write it."""
    try:
        complete()
    finally:
        completed.set()
    write(content, folder, is_best)


def write(content: dict[str, Any], folder: Path, is_best: bool) -> None:
    """Replace the checkpoint in ``folder`` by one with ``content``; CheckpointError if that is impossible.

    At every moment, even at a power failure, the folder has the old file or the new one.
    """
    checkpoint = folder / CHECKPOINT
    try:
        with replacing(checkpoint) as temporary:
            _save(content, temporary)
            # The best weights are written first. A run that is killed here resumes from the older checkpoint and writes
            # them again.
            if is_best:
                with replacing(folder / BEST) as temporary_best:
                    _save(best_of(content), temporary_best)
            if checkpoint.exists():
                os.replace(checkpoint, folder / PREVIOUS)
        _flush_folder(folder)
    except (OSError, RuntimeError) as error:  # torch's writer reports a full disk as a RuntimeError of its own
        raise CheckpointError(_write_failure(error, folder)) from error


def _save(content: dict[str, Any], path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def best_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what inference needs of a checkpoint: the weights that validation scored, and what describes them.

    The weights are the moving average if there is one (``averaged`` is then true). The optimizer and all other training
    state are left out.
    """
    averaged = content["ema"] is not None
    weights = content["ema" if averaged else "state_dict"]
    return {
        "state_dict": weights,
        "averaged": averaged,
        **{key: content[key] for key in KEYS_OF_BEST if key in content},
    }


def _write_failure(error: BaseException, folder: Path) -> str:
    cause = error.__context__ if isinstance(error.__context__, OSError) else error
    intact = [name for name in (CHECKPOINT, PREVIOUS) if (folder / name).exists()]
    before = (
        f"the previous checkpoint, {printable(folder / intact[0])}, is intact" if intact else "there was none before"
    )
    return (
        f"the checkpoint cannot be written ({printable(cause)}); {printable(folder)}: {before}; "
        f"make room or mend the folder, then continue with --resume auto"
    )


def _flush_folder(folder: Path) -> None:
    """Make the renames in ``folder`` durable, where the system lets a folder be flushed."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint file, its tensors on the CPU.

    Only tensors and plain Python are read, and a file that would run code is refused. Raises CheckpointError if there
    is no such file, if it is damaged (every byte is checked), or if it holds no training state.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint; {printable(path)}: give the path of one, or --resume auto")
    try:
        with open(path, "rb") as file:
            magic = file.read(len(ZIP_MAGIC))
            if not magic:
                raise ValueError("it is empty")
            content = load_bounded(file) if magic == ZIP_MAGIC else None
    except Exception as error:  # damaged bytes make the readers of zip and pickle raise nearly anything
        raise CheckpointError(
            f"the checkpoint is damaged ({type(error).__name__}: {brief(error)}); {printable(path)}: resume from "
            "another one"
        ) from error
    if isinstance(content, dict) and "averaged" in content and "position" not in content:
        raise CheckpointError(
            f"this file holds the best weights of a run without its training state; {printable(path)}: continue the "
            f"run from {printable(path.with_name(CHECKPOINT))}, or start a new training from these weights with "
            "--weights and another --log-dir"
        )
    if not isinstance(content, dict) or "position" not in content or "format_version" not in content:
        raise CheckpointError(
            f"this file holds no training state to continue from; {printable(path)}: weights files, those of the "
            f"original project among them, can start a new training with --weights"
        )
    version = content["format_version"]
    if type(version) is not int or version != FORMAT_VERSION:
        name = brief(repr(version)) if isinstance(version, (int, str)) else f"of type {type(version).__name__}"
        raise CheckpointError(
            f"checkpoint format {name}, but this version reads {FORMAT_VERSION}; "
            f"{printable(path)}: continue with the version of zoo that wrote it"
        )
    return content


@dataclass(frozen=True)
class CheckpointProgress:
    """How far the run of a checkpoint is (``best_score`` in percent); values that the file does not tell are None.

    ``moving_average``: whether it holds a moving average of the weights, which is what is loaded. ``torch``: the
    version that wrote it.
    """

    epochs_done: int | None
    steps_done: int | None
    best_score: float | None
    moving_average: bool
    torch: str | None


def progress_in(content: Mapping[Any, Any]) -> CheckpointProgress:
    """Return what the content of a weights file tells about the run that wrote it."""
    position, version = content.get("position"), content.get("torch_version")
    steps = position.get("step") if isinstance(position, dict) else None
    epochs, steps, best_score = (
        value if is_number(value, -MAX_COUNT, MAX_COUNT) else None
        for value in (content.get("epoch"), steps, content.get("best_prec1"))
    )
    return CheckpointProgress(
        epochs_done=epochs,
        steps_done=steps,
        best_score=best_score,
        moving_average=isinstance(content.get("ema"), dict) or content.get("averaged") is True,
        torch=printable(version[:MAX_VERSION_LENGTH]) if isinstance(version, str) else None,
    )
