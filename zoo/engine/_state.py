"""The state of a training run: everything that a step updates and a resume restores."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from zoo.config.experiment import Experiment
from zoo.engine._freezing import freeze
from zoo.engine._meters import Meter, merge_states
from zoo.engine._optim import build_optimizer
from zoo.engine._process import Process, broadcast_tensors
from zoo.engine._replicas import Replicas, build_replicas
from zoo.engine._task import Task
from zoo.engine._wrapping import compile_network
from zoo.memory.release import release_gradients

# The position of a run: keys in checkpoints, and attributes of `TrainState`.
POSITION_KEYS = ("epoch", "batch", "step")
# Entries of parameter groups that select an implementation without changing results; checkpoints do not override them.
DEVICE_KEYS = ("fused", "foreach")


@dataclass
class TrainState:
    """A training run between two steps."""

    task: Task
    process: Process
    model: nn.Module
    """The bare network: its state-dict keys have no prefix ``module.`` or ``_orig_mod.``."""
    wrapped_model: nn.Module
    """The module that a step calls: ``model``, possibly wrapped by torch.compile and DistributedDataParallel."""
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ema: nn.Module | None
    """A copy of the bare network with the moving average of the weights; None without `ema_decay`."""
    meter: Meter
    """Sums over this rank's images of the running epoch."""
    replicas: Replicas
    """The replicas that this process runs."""
    epoch: int = 0
    """Index of the current epoch."""
    batch: int = 0
    """Number of completed batches of the current epoch."""
    step: int = 0
    """Number of optimizer steps since the start of training."""
    best_score: float = 0.0
    """Best validation score so far, percent."""
    best_epoch: int | None = None
    """Index of the epoch with ``best_score``; None before the first validation."""
    ranking: Sequence[tuple[float, int]] = ()
    """The best scores and the indices of their epochs, best first, at most ``checkpoint.keep_best``."""
    images: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Fingerprints of the images of "train" and "val"; empty until known. A resume needs the same images."""
    class_names: Sequence[str] | None = None
    """Class names in the order of the outputs, escaped by `escape`; None until they are known."""
    eval_modules: Sequence[str] = ()
    """Names of the modules that stay in evaluation mode while training."""

    @property
    def config(self) -> Experiment:
        """The settings of the run."""
        return self.task.config

    @property
    def is_stale(self) -> bool:
        """Whether the score has not improved for ``optimizer.schedule.patience`` epochs, at the end of an epoch.

        Depends on the last and the best epoch only, so that a resumed run ends when an uninterrupted run does.
        """
        patience = self.config.optimizer.schedule.patience
        if patience is None or self.best_epoch is None or self.batch > 0:
            return False
        return self.epoch - 1 - self.best_epoch >= patience

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to train: all epochs are done, or the scores are stale."""
        return self.epoch >= self.config.optimizer.schedule.epochs or self.is_stale

    @property
    def scored_model(self) -> nn.Module:
        """The bare network that is validated: the moving average if there is one."""
        return self.model if self.ema is None else self.ema


def build_state(task: Task, model: nn.Module, process: Process) -> TrainState:
    """Return the state of a new run that trains ``model``.

    Moves ``model`` to the device of the process, and freezes the parts that ``optimizer.freeze`` names
    (`zoo.engine._freezing.freeze`).
    """
    config = task.config
    model.to(process.device)
    eval_modules = [*dict.fromkeys([*_eval_modules(model), *freeze(model, config.optimizer.freeze)])]
    if config.training.channels_last:
        layout: Any = {"memory_format": torch.channels_last}  # not in the type stubs of torch 2.11 and 2.13
        model.to(**layout)
    settings = config.training
    trained = task.trained_network(model)
    if settings.compile:
        trained = compile_network(trained)
    optimizer = build_optimizer(model, config.optimizer)
    if config.optimizer.release_gradients:
        release_gradients(model, optimizer, accumulate_steps=config.optimizer.accumulate_steps)
    replicas = build_replicas(model, config, process)
    return TrainState(
        task=task,
        process=process,
        model=model,
        wrapped_model=replicas.wrap(trained),
        optimizer=optimizer,
        scaler=torch.amp.GradScaler(process.device.type, enabled=config.training.amp == "fp16"),
        ema=copy.deepcopy(model).requires_grad_(False) if config.optimizer.ema_decay is not None else None,
        meter=Meter(process.device, task.num_counts),
        replicas=replicas,
        eval_modules=process.broadcast(eval_modules),
    )


def _eval_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules in evaluation mode; empty if no module is in training mode.

    A network that is entirely in evaluation mode was scored or trained before; this says nothing about its training.
    """
    modes = {name: module.training for name, module in model.named_modules()}
    return [name for name, training in modes.items() if not training] if any(modes.values()) else []


def set_training_mode(state: TrainState) -> None:
    """Set training mode for all modules, except for those that stay in evaluation mode."""
    state.wrapped_model.train()
    for name in state.eval_modules:
        state.model.get_submodule(name).training = False


def update_average(state: TrainState) -> None:
    """Update the moving average if it is due: ema = decay * ema + (1 - decay) * weights. The first update copies.

    Does not use `torch.optim.swa_utils.AveragedModel`, because its step counter synchronizes with the device. Buffers
    are not averaged; `broadcast_buffers` copies them.
    """
    decay, every = state.config.optimizer.ema_decay, state.config.optimizer.ema_every
    if state.ema is None or decay is None or state.batch % every:
        return
    move = get_ema_multi_avg_fn(decay if state.step > 0 else 0.0)
    move(list(state.ema.parameters()), list(state.model.parameters()), state.step)


def all_finite(network: nn.Module) -> bool:
    """Return whether all parameters and buffers are finite; waits for the device."""
    tensors = [tensor.detach() for tensor in (*network.parameters(), *network.buffers())]
    # aminmax propagates NaN; on a CPU it is several times as fast as a norm or isfinite.
    ends: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            ends.setdefault(tensor.dtype, []).extend(tensor.aminmax())
    return all(bool(torch.stack(of_dtype).isfinite().all()) for of_dtype in ends.values())


def broadcast_buffers(state: TrainState) -> None:
    """Broadcast rank 0's buffers (running statistics) to all ranks, and copy them to the moving average.

    Required before validation and checkpoints, because unsynchronized norms see different images on each rank. Every
    rank has to call it.
    """
    if state.process.world_size > 1:
        broadcast_tensors(list(state.model.buffers()))
    if state.ema is not None:
        for buffer, source in zip(state.ema.buffers(), state.model.buffers(), strict=True):
            buffer.copy_(source)


def shared_state(state: TrainState) -> dict[str, Any]:
    """Return the part of the state that all ranks share, as tensors and plain Python.

    The original project's files have the keys up to ``optimizer``. The learning rate is a function of the step
    and needs no state.
    """
    return {
        "epoch": state.epoch,
        "arch": state.config.network.arch,
        "state_dict": state.model.state_dict(),
        "best_prec1": state.best_score,
        "best_epoch": state.best_epoch,
        "optimizer": state.optimizer.state_dict(),
        "ema": None if state.ema is None else state.ema.state_dict(),
        "scaler": state.scaler.state_dict(),
        "position": {key: getattr(state, key) for key in POSITION_KEYS},
    }


def rank_state(state: TrainState) -> dict[str, Any]:
    """Return the part of the state that differs between ranks: random generators and the sums of the running epoch."""
    rng = {"torch": torch.get_rng_state(), "python": random.getstate(), "device": None}
    if state.process.device.type == "cuda":
        rng["device"] = torch.cuda.get_rng_state(state.process.device)
    return {"rng": rng, "meter": state.meter.state()}


def rank_states(state: TrainState) -> list[dict[str, Any]]:
    """Gather the states of all ranks to save on rank 0. Every rank has to call it.

    With replicas, one state serves any number of ranks: each step seeds the random numbers, and the sums of the ranks
    are added.
    """
    states = state.process.gather(rank_state(state))
    if state.config.optimizer.replicas is None or not states:
        return states
    return [{**states[0], "meter": merge_states([rank["meter"] for rank in states])}]


def load_shared_state(state: TrainState, saved: dict[str, Any]) -> None:
    """Load the result of `shared_state` from a run with the same settings. Keys and shapes have to match exactly.

    Raises the errors of Python and torch for content that does not fit: LookupError, TypeError, ValueError,
    RuntimeError or AttributeError.
    """
    state.model.load_state_dict(saved["state_dict"])
    if state.ema is not None:
        state.ema.load_state_dict(saved["ema"])
    _load_optimizer(state.optimizer, saved["optimizer"])
    state.scaler.load_state_dict(saved["scaler"])
    state.best_score = float(saved["best_prec1"])
    state.best_epoch = saved["best_epoch"]
    for key in POSITION_KEYS:
        setattr(state, key, int(saved["position"][key]))


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load momenta and learning rates; the implementation of a step stays the one for this run's device."""
    groups = [
        {**group, **{key: own_group[key] for key in DEVICE_KEYS}}
        for group, own_group in zip(saved["param_groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})


def load_rank_states(state: TrainState, saved: list[dict[str, Any]]) -> None:
    """Load this rank's part of the result of `rank_states`. With replicas only rank 0 has one."""
    if state.config.optimizer.replicas is None or state.process.is_main:
        load_rank_state(state, saved[state.process.rank])


def load_rank_state(state: TrainState, saved: dict[str, Any]) -> None:
    """Load the random generators and the sums of the running epoch that `rank_state` returned."""
    state.meter.load_state(saved["meter"])
    torch.set_rng_state(saved["rng"]["torch"])
    random.setstate(saved["rng"]["python"])
    if saved["rng"]["device"] is not None and state.process.device.type == "cuda":
        torch.cuda.set_rng_state(saved["rng"]["device"], state.process.device)
