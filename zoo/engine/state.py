"""The state of a training run: everything that a step changes, and that a resume has to restore."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from zoo.config import Experiment
from zoo.engine.meters import Meter
from zoo.engine.optim import build_optimizer
from zoo.engine.process import Process
from zoo.engine.task import Task
from zoo.engine.wrapping import compile_network, distribute
from zoo.errors import listed
from zoo.limits import is_number, is_whole

# The position of a run: the keys in checkpoints, and the attributes of `TrainState` that hold the values.
POSITION = {"epoch": "epoch", "batch": "batch", "step": "step", "num_pictures": "num_images"}
SCALES = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max  # of gradients in fp16
MAX_COUNT = 2**53  # beyond it TensorBoard and float64 cannot tell one step from the next
# What the optimizers keep for each parameter. All of it has the parameter's shape, except Adam's count of steps.
MOMENTA = {torch.optim.SGD: {"momentum_buffer"}, torch.optim.Adam: {"step", "exp_avg", "exp_avg_sq"}}
# Entries of parameter groups that choose how the device computes a step. They are not taken from a checkpoint,
# because they do not change the result of a step.
DEVICE_KEYS = ("fused", "foreach")


@dataclass
class TrainState:
    """A training run between two steps."""

    task: Task
    process: Process
    model: nn.Module
    """The bare network: its state dict has neither ``module.`` nor ``_orig_mod.`` in front."""
    wrapped_model: nn.Module
    """What a step calls: ``model`` itself, or torch.compile and DistributedDataParallel around it."""
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ema: nn.Module | None
    """A copy of the bare network with the moving average of its weights, None without `ema_decay`."""
    meter: Meter
    """Sums over the images that this rank saw in the running epoch."""
    epoch: int = 0
    """Index of the running epoch."""
    batch: int = 0
    """Batches of the running epoch that are done."""
    step: int = 0
    """Optimizer steps done since the start of training."""
    best_score: float = 0.0
    """Best validation so far by the score that the task chooses by, percent."""
    best_epoch: int | None = None
    """Index of the epoch with ``best_score``; None before the first validation, or for checkpoints that lack it."""
    num_images: int = 0
    """Number of training images, 0 until it is known. A step is a position in exactly this data."""
    class_names: Sequence[str] | None = None
    """Names of the classes in the order of the outputs, made `printable`; None until they are known."""
    before_update: Callable[[], object] = lambda: None
    """Called by each step before it changes `tensors_of_updates`, which somebody may still be reading."""

    @property
    def config(self) -> Experiment:
        """The settings of the run."""
        return self.task.config

    @property
    def scored_model(self) -> nn.Module:
        """The bare network that validations score: the moving average when there is one."""
        return self.model if self.ema is None else self.ema


def build_state(task: Task, model: nn.Module, process: Process) -> TrainState:
    """Return the state of a run that starts from ``model``, which is moved to the process's device."""
    config = task.config
    model.to(process.device)
    if config.training.channels_last:
        layout: Any = {"memory_format": torch.channels_last}  # not in the type stubs of torch 2.11 and 2.13
        model.to(**layout)
    settings = config.training
    trained = task.trained_network(model)
    if settings.compile:
        trained = compile_network(trained, settings.activation_memory_budget, settings.compile_mode)
    return TrainState(
        task=task,
        process=process,
        model=model,
        wrapped_model=distribute(trained, process, settings.gradient_compression == "bf16"),
        optimizer=build_optimizer(model, config.optimizer),
        scaler=torch.amp.GradScaler(process.device.type, enabled=config.training.amp == "fp16"),
        ema=copy.deepcopy(model).requires_grad_(False) if config.optimizer.ema_decay is not None else None,
        meter=Meter(process.device, task.num_counts),
    )


def update_average(state: TrainState) -> None:
    """Move the average, if there is one, by ``1 - ema_decay`` towards the weights; the first step sets it to them.

    `torch.optim.swa_utils.AveragedModel` is not used, as it copies its counter to the device at each step and waits.
    Buffers are not averaged; `settle_buffers` copies them.
    """
    decay = state.config.optimizer.ema_decay
    if state.ema is None or decay is None:
        return
    move = get_ema_multi_avg_fn(decay if state.step > 0 else 0.0)
    move(list(state.ema.parameters()), list(state.model.parameters()), state.step)


def tensors_of_updates(state: TrainState) -> list[Tensor]:
    """Return the tensors of the state that change only where a step updates the weights, and not in forward."""
    networks = [state.model] if state.ema is None else [state.model, state.ema]
    parameters = [parameter for network in networks for parameter in network.parameters()]
    momenta = [value for values in state.optimizer.state.values() for value in values.values()]
    return [*parameters, *(value for value in momenta if isinstance(value, Tensor))]


def all_finite(network: nn.Module) -> bool:
    """Return whether all weights and running statistics are finite. It waits for the device."""
    tensors = [tensor.detach() for tensor in (*network.parameters(), *network.buffers())]
    # Both ends of a tensor that has a NaN are NaN. On a CPU they take a fraction of the time of a norm, or of isfinite.
    ends: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            ends.setdefault(tensor.dtype, []).extend(tensor.aminmax())
    return all(bool(torch.stack(of_dtype).isfinite().all()) for of_dtype in ends.values())


def settle_buffers(state: TrainState) -> None:
    """Give all ranks rank 0's buffers (running statistics), and the moving average those of the network.

    To be called before the buffers are read or saved: norms that are not synchronised have seen other images on each
    rank. Every rank has to call it, as it communicates.
    """
    if state.process.world_size > 1:
        for buffer in state.model.buffers():
            dist.broadcast(buffer, src=0)
    if state.ema is not None:
        for buffer, source in zip(state.ema.buffers(), state.model.buffers(), strict=True):
            buffer.copy_(source)


def shared_state(state: TrainState) -> dict[str, Any]:
    """Return the part of the state that is the same on all ranks, as tensors and plain Python.

    The keys up to ``optimizer`` are those of the original project's files. There is no scheduler among them, as the
    learning rate is a function of the step.
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
        "position": {key: getattr(state, name) for key, name in POSITION.items()},
    }


def rank_state(state: TrainState) -> dict[str, Any]:
    """Return the part that differs between ranks: random generators, and the sums of the running epoch."""
    rng = {"torch": torch.get_rng_state(), "python": random.getstate(), "device": None}
    if state.process.device.type == "cuda":
        rng["device"] = torch.cuda.get_rng_state(state.process.device)
    return {"rng": rng, "meter": state.meter.state()}


def load_shared_state(state: TrainState, saved: dict[str, Any]) -> None:
    """Overwrite the state with what `shared_state` returned; keys, shapes and kinds of number have to match exactly.

    Of the optimizer's settings only the learning rate is taken from ``saved``; the others have to be equal to those of
    the configuration. Whatever does not fit raises what Python and torch raise: LookupError, TypeError, ValueError,
    RuntimeError or AttributeError.
    """
    _load_network(state.model, "state_dict", saved["state_dict"])
    _load_optimizer(state.optimizer, saved["optimizer"])
    _load_scaler(state.scaler, saved["scaler"])
    if state.ema is not None:
        _load_network(state.ema, "ema", saved["ema"])
    elif saved.get("ema") is not None:
        raise ValueError("ema holds a moving average, but optimizer.ema_decay is not set")
    if not is_number(saved["best_prec1"], 0, 100):
        raise ValueError(f"best_prec1 is {saved['best_prec1']!r}, not a number from 0 to 100")
    state.best_score = float(saved["best_prec1"])
    best_epoch = saved.get("best_epoch")  # files of the same format may be older than this key
    state.best_epoch = None if best_epoch is None else _count("best_epoch", best_epoch)
    for key, name in POSITION.items():
        setattr(state, name, _count(f"position.{key}", saved["position"][key]))


def _load_network(model: nn.Module, name: str, saved: Any) -> None:
    """Load the state dict ``saved``, called ``name`` in messages; nothing is converted, so that a resume is exact."""
    for key, tensor in model.state_dict().items():
        if key in saved and isinstance(tensor, Tensor):
            _check_alike(f"{name}[{key!r}]", saved[key], tensor)
    model.load_state_dict(saved)


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Load momenta and learning rates; ValueError if they do not fit, or if another setting of a group differs."""
    built = optimizer.state_dict()["param_groups"]
    groups = [
        {**group, **{key: own_group[key] for key in DEVICE_KEYS}}
        for group, own_group in zip(saved["param_groups"], built, strict=True)
    ]
    if [group["params"] for group in groups] != [own_group["params"] for own_group in built]:
        raise ValueError("optimizer.param_groups are of other parameters")
    # torch adds the keys of a group that it has come to know since the file was written.
    optimizer.load_state_dict({"state": _momenta(optimizer, saved["state"]), "param_groups": groups})
    for index, (group, own_group) in enumerate(zip(optimizer.param_groups, built, strict=True)):
        for key in own_group.keys() - {"params"}:
            value = group.get(key)
            agrees = type(value) in (int, float) if key == "lr" else value == own_group[key]
            if key not in group or not agrees:
                shown = repr(value) if key in group else "missing"
                raise ValueError(
                    f"optimizer.param_groups[{index}].{key} is {shown}, by the settings of this run {own_group[key]!r}"
                )


def _load_scaler(scaler: torch.amp.GradScaler, saved: dict[str, Any]) -> None:
    """Load the scale of the gradients; ValueError for values that the scaler would load, but could not train with."""
    own = scaler.state_dict()
    if saved.keys() != own.keys():  # a scaler that is off would ignore them
        raise ValueError(f"scaler has the keys {listed(saved)}")
    for key, value in saved.items():
        if key == "scale":
            is_possible = is_number(value, *SCALES)
        elif key == "_growth_tracker":
            is_possible = is_whole(value, 0, MAX_COUNT)
        else:
            is_possible = value == own[key]
        if not is_possible:
            raise ValueError(f"scaler.{key} is {value!r}, which no run has")
    scaler.load_state_dict(saved)


def _momenta(optimizer: torch.optim.Optimizer, saved: Any) -> dict[int, dict[str, Tensor]]:
    """Return copies of an optimizer's saved momenta, which share no memory with each other, by index and name.

    Raises ValueError for values that the optimizer would load, but could not compute a right step with.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = MOMENTA[type(optimizer)]
    momenta: dict[int, dict[str, Tensor]] = {}
    for index, values in saved.items():
        if type(index) is not int or not 0 <= index < len(parameters):
            raise ValueError(f"optimizer.state is of a parameter {index!r}, but there are {len(parameters)}")
        if values.keys() != names:
            raise ValueError(f"optimizer.state[{index}] has the keys {listed(values)}, not {listed(sorted(names))}")
        for name, value in values.items():
            like = torch.zeros(()) if name == "step" else parameters[index]
            _check_alike(f"optimizer.state[{index}].{name}", value, like)
        momenta[index] = {name: value.detach().clone() for name, value in values.items()}
    return momenta


def _check_alike(name: str, value: Any, like: Tensor) -> None:
    """Raise ValueError unless ``value`` is a plain tensor of the same shape and kind of number as ``like``."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is of type {type(value).__name__}, not a tensor")
    if value.layout != like.layout or value.is_meta or value.is_nested:
        raise ValueError(f"{name} is not a plain tensor with values")
    if (value.dtype, value.shape) != (like.dtype, like.shape):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)} and {value.dtype}, not {tuple(like.shape)} and {like.dtype}"
        )


def _count(name: str, value: Any) -> int:
    if not is_whole(value, 0, MAX_COUNT):
        raise ValueError(f"{name} is {value!r}, not a whole number from 0 to {MAX_COUNT}")
    return value


def load_rank_state(state: TrainState, saved: dict[str, Any]) -> None:
    """Overwrite the random generators and the sums of the running epoch with what `rank_state` returned."""
    state.meter.load_state(saved["meter"])
    torch.set_rng_state(saved["rng"]["torch"])
    random.setstate(saved["rng"]["python"])
    if saved["rng"]["device"] is not None and state.process.device.type == "cuda":
        torch.cuda.set_rng_state(saved["rng"]["device"], state.process.device)
