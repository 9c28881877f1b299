"""Checkpoint files: written atomically in the background, read safely and verified."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from zoo.config.architectures import ARCHITECTURES
from zoo.config.network import ExternalSpec
from zoo.engine._original import is_original
from zoo.engine._process import Process, processor
from zoo.engine._state import TrainState, broadcast_buffers, rank_states, shared_state
from zoo.errors import CheckpointError, escape, truncate
from zoo.files import flush_folder, flush_to_disk, remove_leftovers, replace_file
from zoo.weights._read import load_bounded

logger = logging.getLogger(__name__)

CHECKPOINT = "checkpoint.pth.tar"  # the original project's names; the files are torch.save files, not archives
BEST = "model_best.pth.tar"
PREVIOUS = "checkpoint.previous.pth.tar"
RANKED = "best_*_epoch*.pth.tar"  # the pattern of `ranked_name`
FORMAT_VERSION = 1
MAX_COUNT = 2**63  # larger numbers in an untrusted file are not shown
# Keys of a checkpoint that model_best.pth.tar also has: for inference, and the origin of the weights.
KEYS_OF_BEST = (
    "epoch", "arch", "best_prec1", "best_epoch", "network", "class_names", "config", "config_digest", "torch_version",
)  # fmt: skip
MAGICS = b"PK", b"\x80\x02"  # first bytes of torch.save files: zip format, and format before PyTorch 1.6


class CheckpointWriter:
    """Context manager that writes the checkpoints of a run to ``folder`` in a thread, one at a time, during training.

    Every rank has to open it and call the same methods; rank 0 writes. Training waits while rank 0 copies the state to
    host memory, but not while the copy is written. If a write fails, the next `save`, `raise_if_failed` or `join`
    raises CheckpointError on every rank, and earlier files are intact. The end of the context waits for the write; if
    the context ends with another error, a failed write is only logged.
    """

    def __init__(self, process: Process, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, "zoo-checkpoint")
        self._write: Future[None] | None = None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.join()
        finally:
            self._thread.shutdown()
            if self._write is not None and (failure := self._write.exception()) is not None:
                logger.error("%s", failure)

    def save(self, state: TrainState, is_best: bool = False) -> None:
        """Copy the state and start to write the copy, after joining the previous write.

        The previous checkpoint is renamed to ``checkpoint.previous.pth.tar``. With ``is_best`` the weights that
        validation scored are also written to ``model_best.pth.tar``, see `best_of`. All ranks have rank 0's running
        statistics afterwards. With ``checkpoint.keep_best`` above 1, the weights of an epoch that is among the best are
        also written to a file of their own (`ranked_name`), and files of other epochs are removed.
        """
        self.join()
        broadcast_buffers(state)
        ranks = rank_states(state)
        state.process.on_main(partial(self._start, state, ranks, is_best))

    def _start(self, state: TrainState, ranks: list[dict[str, Any]], is_best: bool) -> None:
        content = _copy_to_cpu(_content(state, ranks))
        # The thread is started without work. If a signal handler raises while the pool starts a thread, as torch's does
        # when a data worker dies, the pool does not know that thread, and its shutdown would not wait for the write.
        self._thread.submit(int)
        ranked = state.ranking if state.config.checkpoint.keep_best > 1 else ()
        self._write = self._thread.submit(write, content, self._folder, is_best, ranked)

    def raise_if_failed(self) -> None:
        """Raise the error of a completed write. Does not wait for a write that is still running."""
        if self._process.any_rank(self._write is not None and self._write.done()):
            self.join()

    def join(self) -> None:
        """Wait for the current write, if any, and raise its error on every rank."""
        self._process.on_main(self._result)

    def join_quietly(self) -> None:
        """Wait for this rank's current write. Raises nothing and does not communicate with other ranks."""
        if self._write is not None:
            futures.wait([self._write])

    def _result(self) -> None:
        self.join_quietly()
        write, self._write = self._write, None
        if write is not None:
            write.result()


def _copy_to_cpu(tree: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples, with all tensors on the CPU."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, dict):
        copied = copy.copy(tree)  # keeps the version numbers of modules, an attribute of a state dict
        for key, value in tree.items():
            copied[key] = _copy_to_cpu(value)
        return copied
    return type(tree)(map(_copy_to_cpu, tree)) if isinstance(tree, (list, tuple)) else tree


def _content(state: TrainState, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of a checkpoint: tensors and plain Python, readable with weights_only=True."""
    names = state.class_names
    return {
        **shared_state(state),
        "class_names": None if names is None else list(names),
        "images": {split: dict(of_split) for split, of_split in state.images.items()},
        "eval_modules": list(state.eval_modules),
        "ranking": [list(entry) for entry in state.ranking],
        "ranks": ranks,
        "network": _network(state),
        "config": state.config.model_dump(mode="json"),
        "config_digest": state.config.digest(),
        "world_size": state.process.world_size if state.config.optimizer.replicas is None else None,
        "num_threads": torch.get_num_threads(),
        "torch_version": str(torch.__version__),
        "device": state.process.device.type,
        "processor": processor(state.process.device),
        "format_version": FORMAT_VERSION,
    }


def _network(state: TrainState) -> dict[str, Any] | None:
    """Return the description that readers build the network from; None for a user's own network."""
    network = state.config.network
    if network.arch not in ARCHITECTURES and not isinstance(network, ExternalSpec):
        return None
    return state.config.record(state.class_names).content()


def write(content: dict[str, Any], folder: Path, is_best: bool, ranked: Sequence[tuple[float, int]] = ()) -> None:
    """Replace the checkpoint in ``folder`` atomically and durably; CheckpointError if that fails.

    ``ranked`` are the scores and epochs whose weights are kept, see `CheckpointWriter.save`. At any moment, even at a
    power failure, the folder has the old file or the new one.
    """
    checkpoint = folder / CHECKPOINT
    try:
        kept = {epoch: ranked_name(score, epoch) for score, epoch in ranked}
        files = {BEST: best_of(content)} if is_best else {}
        last = content["epoch"] - 1
        if last in kept and content["position"]["batch"] == 0:
            score = next(score for score, epoch in ranked if epoch == last)
            files[kept[last]] = {**best_of(content), "best_prec1": score, "best_epoch": last}
        for name in (CHECKPOINT, BEST, *kept.values()):
            remove_leftovers(folder / name)
        with replace_file(checkpoint) as temporary:
            _save(content, temporary)
            # The best weights come first: a run killed here resumes from the older checkpoint and writes them again.
            for name, weights in files.items():
                with replace_file(folder / name) as temporary_best:
                    _save(weights, temporary_best)
            if checkpoint.exists():
                os.replace(checkpoint, folder / PREVIOUS)
        flush_folder(folder)
        for path in folder.glob(RANKED):  # last: a run that resumes from the older checkpoint may need them
            if path.name not in kept.values():
                path.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise CheckpointError(_write_failure(error, folder)) from error


def ranked_name(score: float, epoch: int) -> str:
    """Return the name of the weights after ``epoch`` (from 0); names sort by the score, percent."""
    return f"best_{score:07.3f}_epoch{epoch + 1:04d}.pth.tar"


def _save(content: dict[str, Any], path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(content, file)
        file.flush()
        flush_to_disk(file.fileno())


def best_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a checkpoint that inference needs: the weights that were validated, and their description.

    The weights are the moving average if there is one (``averaged`` is then true). Training state is omitted.
    """
    averaged = content["ema"] is not None
    weights = content["ema" if averaged else "state_dict"]
    return {
        "state_dict": weights,
        "averaged": averaged,
        **{key: content[key] for key in KEYS_OF_BEST},
    }


def _write_failure(error: BaseException, folder: Path) -> str:
    cause = error.__context__ if isinstance(error.__context__, OSError) else error
    intact = [name for name in (CHECKPOINT, PREVIOUS) if (folder / name).exists()]
    before = f"the previous checkpoint, {escape(folder / intact[0])}, is intact" if intact else "there is no other"
    return (
        f"the checkpoint cannot be written ({escape(cause)}); {escape(folder)}: {before}; free disk space or "
        "repair the folder, then continue with --resume auto"
    )


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint of this package or of the original trainer (`is_original`), with tensors on the CPU.

    Loads only tensors and plain Python values, never code. Raises CheckpointError if the file is missing, if it is
    damaged (all checksums are verified), or if it has no training state.
    """
    if not path.is_file():
        raise CheckpointError("no such checkpoint", path, "give the path of one, or --resume auto")
    try:
        with open(path, "rb") as file:
            magic = file.read(2)
            if not magic:
                raise ValueError("it is empty")
            content = load_bounded(file) if magic in MAGICS else None
    except Exception as error:  # damaged bytes make zip and pickle raise nearly anything
        raise CheckpointError(
            f"the checkpoint is damaged ({type(error).__name__}: {truncate(error)})", path, "resume from another one"
        ) from error
    if isinstance(content, dict) and is_original(content):
        return content
    if not isinstance(content, dict) or "position" not in content or "format_version" not in content:
        raise CheckpointError(
            "this file has no training state to resume from",
            path,
            f"resume from a {CHECKPOINT}, or start a new run from these weights with --weights and another --log-dir",
        )
    version = content["format_version"]
    if type(version) is not int or version != FORMAT_VERSION:
        name = truncate(repr(version)) if isinstance(version, (int, str)) else f"of type {type(version).__name__}"
        raise CheckpointError(
            f"checkpoint format {name}, but this version reads {FORMAT_VERSION}",
            path,
            "resume with the version of zoo that wrote it",
        )
    return content


def parse_progress(content: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the progress of the run that wrote a weights file; values that the file lacks are None.

    The best validation score is in percent. ``moving_average`` tells whether the file has a moving average of the
    weights; readers then load the average.
    """
    position, version = content.get("position"), content.get("torch_version")
    steps = position.get("step") if isinstance(position, dict) else None
    numbers: dict[str, Any] = {
        "epochs_done": content.get("epoch"),
        "steps_done": steps,
        "best_score": content.get("best_prec1"),
    }
    return {
        **{
            name: number if type(number) in (int, float) and abs(number) < MAX_COUNT else None
            for name, number in numbers.items()
        },
        "moving_average": isinstance(content.get("ema"), dict) or content.get("averaged") is True,
        "torch": truncate(version) if isinstance(version, str) else None,
    }
