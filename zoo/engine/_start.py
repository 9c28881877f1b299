"""Start of a run: from its own checkpoint, from given weights, or from random weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zoo.config.describe import leaves
from zoo.config.experiment import Experiment
from zoo.config.network import Spec, validate_spec
from zoo.config.record import escape_names
from zoo.data.dataset import ImageDataset
from zoo.engine import _checkpoint as checkpoint
from zoo.engine._consistency import ABSENT, differing_keys
from zoo.engine._original import is_original, load_original
from zoo.engine._process import Process, processor, seed_everything
from zoo.engine._state import TrainState, build_state, load_rank_states, load_shared_state
from zoo.engine._task import Task
from zoo.errors import CheckpointError, escape, join_names, shorten_repr, truncate
from zoo.registry.get import build_from_config, load_weights
from zoo.tables import counted

logger = logging.getLogger(__name__)

AUTO = "auto"
# Prefixes of settings that may change on a resume because they do not affect the computation. All others must match.
HARMLESS_KEYS = ("checkpoint.", "expected", "training.gradient_angle_meter", "optimizer.schedule.patience")
EPOCHS = "optimizer.schedule.epochs"  # may increase on a resume
# Errors that Python and torch raise for unexpected values in a checkpoint.
ODD_CONTENT = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError)


def start(
    task: Task,
    process: Process,
    log_dir: Path,
    *,
    resume: str | None = None,
    weights: str | None = None,
    build: Callable[[Spec], nn.Module] = build_from_config,
) -> TrainState:
    """Build the initial state of training, with the same weights on all ranks. Every rank has to call it.

    Seeds the global random generators. Raises ConfigError, CheckpointError and WeightsError.

    Args:
    - `task`: the task of the experiment, with its settings.
    - `process`: this process of the run.
    - `log_dir`: folder of the run's checkpoints.
    - `resume`: "auto" for the newest intact checkpoint of ``log_dir``, the path of a checkpoint, or None.
    - `weights`: path of a file of initial weights, or None.
    - `build`: builds and initializes the network.
    """
    config = task.config
    resumed = load_checkpoint(resume, log_dir, process)
    seed_everything(config.seed, -1)
    is_fresh = resumed is None and weights is None
    model = build(config.network if is_fresh else config.network.without_pretrained())

    # The checkpoint takes precedence over the weights, so that the same command line continues an interrupted run.
    if resumed is None and weights is not None:
        report = load_weights(model, weights)
        logger.info("initial weights: %s", report)
    elif weights is not None:
        logger.info("the initial weights %s are ignored: the run resumes from its checkpoint", weights)
    state = build_state(task, model, process)
    seed_everything(config.seed, process.rank)
    if resumed is not None:
        for notice in restore(state, resumed):
            logger.info("%s", notice)
    if state.eval_modules:
        names = join_names([name or "the network itself" for name in state.eval_modules], 3)
        counts = len(state.eval_modules), len([*model.modules()])
        logger.info("%d of %d modules stay in evaluation mode: %s", *counts, names)
    return state


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The content of a checkpoint file, and notices that tell the user why this file was chosen."""

    path: Path
    content: dict[str, Any]
    notices: list[str]


def load_checkpoint(resume: str | None, folder: Path, process: Process) -> LoadedCheckpoint | None:
    """Load the checkpoint to resume from, the same on every rank; return None for a fresh start.

    ``resume`` is None, the path of a file, or "auto" for the newest intact checkpoint of ``folder``, if there is one.
    Rank 0 reads the file and broadcasts its content, so that only its machine needs the file. Raises CheckpointError on
    every rank if the file is missing or damaged, or if "auto" finds only damaged files.
    """

    def load() -> LoadedCheckpoint | None:
        if resume is None:
            return None
        if resume == AUTO:
            return load_newest_checkpoint(folder)
        return LoadedCheckpoint(Path(resume), checkpoint.read(Path(resume)), [])

    return process.on_main(load)


def load_newest_checkpoint(folder: Path) -> LoadedCheckpoint | None:
    """Load the newest intact checkpoint of a log folder, or return None. CheckpointError if all are damaged."""
    candidates = [folder / checkpoint.CHECKPOINT, folder / checkpoint.PREVIOUS]
    notices: list[str] = []
    for path in candidates:
        try:
            if path.exists():
                content = checkpoint.read(path)
                return LoadedCheckpoint(path, content, [*notices, f"falling back to {escape(path)}"] if notices else [])
            notices.append(f"there is no {escape(path)}")
        except CheckpointError as error:
            notices.append(str(error))
    if not any(path.exists() for path in candidates):
        return None
    raise CheckpointError(
        f"no good checkpoint to resume from: {'; '.join(notices)}; use another --log-dir, or remove the damaged files"
    )


def restore(state: TrainState, resumed: LoadedCheckpoint) -> list[str]:
    """Load the checkpoint into ``state`` and the random generators; return notices for the user.

    A run with more epochs than the checkpoint continues from the same position, at the learning rate of the longer
    schedule. For a checkpoint of the original trainer see `load_original`. Raises CheckpointError if
    the checkpoint was written with other settings or another world size; with replicas the world size may change.
    """
    saved = resumed.content
    try:
        if is_original(saved):
            return [*resumed.notices, *load_original(state, saved, resumed.path)]
        prolonged = list(_check_config(saved["config"], state.config, resumed.path))
        if state.config.optimizer.replicas is None and saved["world_size"] != state.process.world_size:
            raise CheckpointError(
                f"the checkpoint is of {truncate(saved['world_size'])} process(es), this run has "
                f"{state.process.world_size}",
                resumed.path,
                "start as many, or start a new run from these weights with --weights and another --log-dir; a run with "
                "optimizer.replicas may change the number",
            )
        state.class_names = saved["class_names"]
        state.images = {split: dict(of_split) for split, of_split in saved["images"].items()}
        load_shared_state(state, saved)
        state.ranking = [(float(score), int(epoch)) for score, epoch in saved["ranking"]]
        load_rank_states(state, saved["ranks"])
        modes = list(_load_modes(state, saved["eval_modules"]))
        differences = list(_differences(saved, state))
    except ODD_CONTENT as error:
        first_line = next(iter(str(error).strip().splitlines()), "")
        reason = f"{type(error).__name__}: {truncate(first_line)}"
        raise CheckpointError(
            f"this run cannot resume from the state in the file ({reason})",
            resumed.path,
            "use another checkpoint, or start a new run from its weights with --weights and another --log-dir",
        ) from error
    position = f"resumed from {escape(resumed.path)}: {_position(state)}"
    return [*resumed.notices, position, *prolonged, *modes, *differences]


def _load_modes(state: TrainState, eval_modules: Sequence[str]) -> Iterator[str]:
    """Keep the modules of the checkpoint in evaluation mode; yield a notice if the given network has others."""
    for name in eval_modules:
        state.model.get_submodule(name)
    own, state.eval_modules = state.eval_modules, list(eval_modules)
    if own and (differing := {*own} ^ {*eval_modules}):
        yield f"training or evaluation mode as in the checkpoint, not as given: {join_names(sorted(differing), 3)}"


def check_images(state: TrainState, images: ImageDataset, identity: Mapping[str, Mapping[str, Any]]) -> None:
    """Record the fingerprints of a new run's images, or compare them with those of a resumed run.

    Raises CheckpointError if a resumed run has other images or classes. With other images, the position in an epoch
    would refer to another order, and the best score to another validation.

    Args:
    - `state`: the state that `start` returned.
    - `images`: the training images.
    - `identity`: the result of `fingerprints`.
    """
    class_names = escape_names(images.classes) or None
    what = ""
    if state.class_names not in (None, class_names):
        before, now = set(state.class_names or ()), set(class_names or ())
        missing, new = (join_names(sorted(names)) or "none" for names in (before - now, now - before))
        how = f"missing: {missing}; new: {new}" if before != now else "in another order"
        what = f"the classes differ from the classes in the checkpoint ({how})"
    elif state.images and (changes := list(_changes(dict(leaves(state.images)), dict(leaves(identity))))):
        what = f"the images differ from the images of the checkpoint ({join_names(changes)})"
    if what:
        remedy = "resume with the same data, or start a new run from these weights with --weights and another --log-dir"
        raise CheckpointError(what, images.root, remedy)
    state.class_names, state.images = class_names, identity


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys whose values differ, with both values."""
    for key in differing_keys(before, now):
        yield f"{key}: {shorten_repr(before.get(key, ABSENT))} before and {shorten_repr(now.get(key, ABSENT))} now"


def _position(state: TrainState) -> str:
    epochs = state.config.optimizer.schedule.epochs
    if state.epoch >= epochs:
        return f"{epochs} of {counted(epochs, 'epoch')} done, {counted(state.step, 'step')}"
    done = f"{counted(state.batch, 'batch')} done, {counted(state.step, 'step')} in all"
    return f"epoch {state.epoch + 1} of {epochs}, {done}"


def _differences(saved: dict[str, Any], state: TrainState) -> Iterator[str]:
    """Yield a notice for each difference that may change the last bits of the results."""
    now = {
        "num_threads": ("threads", torch.get_num_threads()),
        "torch_version": ("torch", str(torch.__version__)),
        "device": ("device", state.process.device.type),
        "processor": ("processor", processor(state.process.device)),
    }
    for key, (name, value) in now.items():
        if saved[key] != value:
            yield f"{name}: {truncate(saved[key])} at the checkpoint, {value} now; results may differ in the last bits"


def _check_config(saved: dict[str, Any], config: Experiment, path: Path) -> Iterator[str]:
    """Yield a notice if the number of epochs increased. CheckpointError if a setting that must match differs."""
    saved = {**saved, "network": validate_spec(saved["network"]).model_dump(mode="json")}
    now = dict(leaves(config.model_dump(mode="json")))
    # The default of a setting that is newer than the checkpoint is the behavior before the setting existed.
    defaults = leaves(config.defaults().model_dump(mode="json"))
    before = {**{key: value for key, value in defaults if key in now}, **dict(leaves(saved))}
    changes = [
        f"{key}: {before.get(key, ABSENT)!r} before and {now.get(key, ABSENT)!r} now"
        for key in differing_keys(before, now)
        if not key.startswith(HARMLESS_KEYS)
        and not (key == EPOCHS and type(before.get(key)) is int and 1 <= before[key] <= now[key])
    ]
    if changes:
        raise CheckpointError(
            f"the checkpoint was written with other settings ({join_names(changes)})",
            path,
            "restore the settings, or start a new run from these weights with --weights and another --log-dir",
        )
    if before[EPOCHS] != now[EPOCHS]:
        epochs = f"{before[EPOCHS]} to {now[EPOCHS]} epochs"
        yield f"prolonged from {epochs}; from here on the learning rate follows the longer schedule"
