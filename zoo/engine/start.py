"""Where a run begins: at its own checkpoint, with given weights, or from scratch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zoo.config import Experiment, check_world_size, leaves
from zoo.engine import checkpoint
from zoo.engine.agreement import ABSENT, differing_keys
from zoo.engine.meters import check_meters
from zoo.engine.optim import ENDING_TYPES
from zoo.engine.process import Process, seed_everything
from zoo.engine.reporting import Log
from zoo.engine.state import TrainState, build_state, load_rank_state, load_shared_state
from zoo.engine.task import Task
from zoo.errors import CheckpointError, brief, listed, printable
from zoo.limits import is_whole
from zoo.registry import build_from_config
from zoo.spec import NetworkSpec, read_earlier_form
from zoo.weights import load_weights
from zoo.weights.stored_spec import parse_class_names, parse_network

AUTO = "auto"
# Prefixes of the keys that may differ on a resume because they do not affect the computation. All others must match.
HARMLESS_KEYS = ("checkpoint.", "expected", "training.reconstruction_meter", "training.gradient_angle_meter")
EPOCHS = "optimizer.schedule.epochs"  # may grow on a resume, which prolongs the run
# What Python and torch raise when a checkpoint file holds something unexpected under one of its keys.
ODD_CONTENT = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError)


def start(
    task: Task,
    process: Process,
    log_dir: Path,
    log: Log,
    *,
    resume: str | None = None,
    weights: str | None = None,
    allow_world_size_change: bool = False,
    build: Callable[[NetworkSpec], nn.Module] = build_from_config,
) -> TrainState:
    """Return the state that training begins with; every rank has to call it, and gets the same weights.

    The global random generators are seeded. Raises ConfigError, CheckpointError and WeightsError.

    Args:
    - `task`: what the experiment trains for, with its settings.
    - `process`: this process of the run.
    - `log_dir`: folder of the run's checkpoints.
    - `log`: gets messages about where the run begins.
    - `resume`: "auto" for the newest good checkpoint of ``log_dir``, the path of a checkpoint, or None.
    - `weights`: path of a file of initial weights, or None.
    - `allow_world_size_change`: whether a checkpoint of another number of processes is accepted.
    - `build`: returns the freshly initialised network.
    """
    config = task.config
    check_world_size(config, process.world_size)
    for doubt in config.doubts():
        log.message(f"warning: {doubt}")
    resumed = find_checkpoint(resume, log_dir, process)
    seed_everything(config.seed, rank=-1)
    is_fresh = resumed is None and weights is None
    model = build(config.network if is_fresh else config.network.without_pretrained())
    check_meters(model, config.training)

    # A run begins from the first of these that exists: its own checkpoint, so that the same command line continues it
    # as often as it is interrupted; the given weights; random weights.
    if resumed is None and weights is not None:
        report = load_weights(model, weights)
        log.message(f"initial weights: {report}")
    elif weights is not None:
        log.message(f"the initial weights {weights} are not read: the run continues from its checkpoint")
    state = build_state(task, model, process)
    seed_everything(config.seed, process.rank)
    if resumed is not None:
        for notice in restore(state, resumed, allow_world_size_change):
            log.message(notice)
    return state


@dataclass(frozen=True)
class Found:
    """A checkpoint that was read, and notices for the user about why it was chosen."""

    path: Path
    content: dict[str, Any]
    notices: list[str]


def find_checkpoint(resume: str | None, folder: Path, process: Process) -> Found | None:
    """Return the checkpoint that ``resume`` asks for, the same on every rank; None for a fresh start.

    ``resume`` is None, the path of a file, or "auto" for the newest good checkpoint of ``folder``, if there is one.
    Rank 0 reads the file and sends its content to the others, so that only its machine needs the file. Raises
    CheckpointError, on every rank, if the file is missing or damaged, or if "auto" finds only damaged ones.
    """

    def find() -> Found | None:
        if resume is None:
            return None
        return newest_checkpoint(folder) if resume == AUTO else Found(Path(resume), checkpoint.read(Path(resume)), [])

    return process.on_main(find)


def newest_checkpoint(folder: Path) -> Found | None:
    """Return the newest good checkpoint of a log folder, None if it has none; CheckpointError if all are damaged."""
    candidates = [folder / checkpoint.CHECKPOINT, folder / checkpoint.PREVIOUS]
    notices: list[str] = []
    for path in candidates:
        try:
            if path.exists():
                content = checkpoint.read(path)
                return Found(path, content, [*notices, f"falling back to {printable(path)}"] if notices else [])
            notices.append(f"there is no {printable(path)}")
        except CheckpointError as error:
            notices.append(str(error))
    if not any(path.exists() for path in candidates):
        return None
    raise CheckpointError(
        f"no good checkpoint to resume from: {'; '.join(notices)}; start anew in another --log-dir, or remove "
        f"the damaged files"
    )


def restore(state: TrainState, resumed: Found, allow_world_size_change: bool = False) -> list[str]:
    """Set ``state`` and the random generators to what the checkpoint holds; return notices for the user.

    A run of more epochs than the checkpoint's is prolonged: it goes on from the same position, with the learning rate
    that its own schedule has there. With another number of processes the averages of the running epoch start anew.
    Raises CheckpointError if the checkpoint was written with other settings, or with another number of processes
    although ``allow_world_size_change`` is off; WeightsError if its description of the network is wrong.
    """
    saved = resumed.content
    try:
        prolonged = list(_check_config(saved["config"], state.config, resumed.path))
        same_ranks = saved["world_size"] == state.process.world_size
        if not same_ranks and not allow_world_size_change:
            raise CheckpointError(
                f"the checkpoint is of {brief(saved['world_size'])} process(es), this run has "
                f"{state.process.world_size}; {printable(resumed.path)}: start as many, or give "
                "--allow-world-size-change (it will not be the same run to the bit)"
            )
        if saved.get("network") is not None:  # older checkpoints, and those of a user's own network, have none
            state.class_names = parse_network(saved["network"], printable(resumed.path)).class_names
        else:
            state.class_names = parse_class_names(saved, state.config.network.num_classes, printable(resumed.path))
        if len(saved["ranks"]) != saved["world_size"]:
            raise ValueError(f"ranks has {len(saved['ranks'])} entries for {saved['world_size']} processes")
        load_shared_state(state, saved)
        if state.process.rank < len(saved["ranks"]):
            load_rank_state(state, saved["ranks"][state.process.rank])
        differences = list(_differences(saved, state))
    except ODD_CONTENT as error:
        first_line = next(iter(str(error).strip().splitlines()), "")
        reason = f"{type(error).__name__}: {brief(first_line)}"
        raise CheckpointError(
            f"the file holds no state that this run can continue from ({reason}); {printable(resumed.path)}: "
            "resume from another checkpoint, or start a new training from its weights with --weights and another "
            "--log-dir"
        ) from error
    if not same_ranks:
        state.meter.reset()
    position = f"resumed from {printable(resumed.path)}: {_position(state)}"
    return [*resumed.notices, position, *prolonged, *differences]


def _position(state: TrainState) -> str:
    epochs = state.config.optimizer.schedule.epochs
    if state.epoch >= epochs:
        return f"all {epochs} epochs are done, {state.step} steps"
    return f"epoch {state.epoch + 1} of {epochs}, {state.batch} batches done, {state.step} steps in all"


def _differences(saved: dict[str, Any], state: TrainState) -> Iterator[str]:
    """Yield a notice for each difference that may change the results in the last bits."""
    now = {
        "world_size": ("processes", state.process.world_size),
        "num_threads": ("threads", torch.get_num_threads()),
        "torch_version": ("torch", str(torch.__version__)),
        "device": ("device", state.process.device.type),
    }
    for key, (name, value) in now.items():
        if saved[key] != value:
            yield f"{name}: {brief(saved[key])} at the checkpoint, {value} now; results may differ in the last bits"


def _check_config(saved: dict[str, Any], config: Experiment, path: Path) -> Iterator[str]:
    """Yield a notice if the run is prolonged; CheckpointError if it differs in a setting that may not change."""
    network = NetworkSpec.model_validate(read_earlier_form(saved["network"])).model_dump(mode="json")
    saved = {**saved, "network": network}
    now = dict(leaves(config.model_dump(mode="json")))
    # Keys that are newer than the checkpoint behaved then as their present defaults do.
    defaults = leaves(config.defaults().model_dump(mode="json"))
    before = {**{key: value for key, value in defaults if key in now}, **dict(leaves(saved))}
    changes = [
        f"{key}: {before.get(key, ABSENT)!r} before and {now.get(key, ABSENT)!r} now"
        for key in differing_keys(before, now)
        if not key.startswith(HARMLESS_KEYS) and not (key == EPOCHS and is_whole(before.get(key), 1, now[key]))
    ]
    if changes:
        raise CheckpointError(
            f"the checkpoint was written with other settings ({listed(changes)}); {printable(path)}: put the settings "
            f"back to continue, or start a new training from these weights with --weights and another --log-dir"
        )
    if before[EPOCHS] != now[EPOCHS]:
        yield f"prolonged from {before[EPOCHS]} to {now[EPOCHS]} epochs: {_prolonged_rate(config)}"


def _prolonged_rate(config: Experiment) -> str:
    schedule = config.optimizer.schedule
    if schedule.type in ENDING_TYPES:
        return (
            f"from here on the learning rate is that of the {schedule.type} schedule over {schedule.epochs} epochs, "
            "and may be higher than before"
        )
    return f"the learning rate of the {schedule.type} schedule does not depend on the number of epochs"
