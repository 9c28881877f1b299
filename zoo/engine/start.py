"""Where a run begins: its own checkpoint, given weights, or scratch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from zoo.config import Experiment, Network, check_world_size
from zoo.engine.log import Log
from zoo.engine.process import Process, seed_everything
from zoo.engine.reconstruction import check_meter
from zoo.engine.resume import find_checkpoint, restore
from zoo.engine.state import TrainState, build_state
from zoo.registry import build_from_config
from zoo.weights import load_weights


def start(
    config: Experiment,
    process: Process,
    log_dir: Path,
    log: Log,
    *,
    resume: str | None = None,
    weights: str | None = None,
    allow_world_size_change: bool = False,
    build: Callable[[Network], nn.Module] = build_from_config,
) -> TrainState:
    """Return the state that training begins with; every rank has to call it, and gets the same weights.

    ``resume``: "auto", the path of a checkpoint, or None. ``weights``: the path of a file of initial weights.
    ``build`` makes the freshly initialised network. Seeds the global generators, and says in the log what it did.
    Raises ConfigError, CheckpointError and WeightsError.
    """
    check_world_size(config, process.world_size)
    for doubt in config.doubts():
        log.message(f"warning: {doubt}")
    found = find_checkpoint(resume, log_dir, process)
    seed_everything(config.seed, rank=-1)
    model = build(config.network)
    check_meter(model, config.training.reconstruction_meter)

    # Three places to start from, the first that there is: the checkpoint of this very run, so that the same
    # command line continues it as often as it is interrupted; then the given weights; then scratch.
    if found is None and weights is not None:
        report = load_weights(model, weights)
        log.message(f"initial weights: {report.num_loaded} tensors of {report.source}")
    elif weights is not None:
        log.message(f"the initial weights {weights} are not read: the run continues from its checkpoint")
    state = build_state(config, model, process)
    seed_everything(config.seed, process.rank)
    if found is not None:
        for notice in restore(state, found, allow_world_size_change):
            log.message(notice)
    return state
