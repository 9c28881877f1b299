"""`zoo.release_gradients`: applies and frees each gradient inside backward, bit-identical to the optimizer's own step.

When autograd has accumulated a gradient, a hook calls the optimizer's own step for this parameter alone, and replaces
the gradient by a tensor without memory that raises an error when it is read. `optimizer.step()` then updates the
remaining parameters.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from zoo.errors import ConfigError, join_names
from zoo.torch_internals.data import is_wrapper, tree_leaves, without_memory

PLACE = "zoo.release_gradients"  # named in errors

#: Optimizers of torch.optim 2.11 to 2.15 that update each parameter independently of the others.
PER_PARAMETER = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD", "SparseAdam",
)  # fmt: skip

#: The smallest gradients, up to this share of all bytes, stay for `optimizer.step()`. Most parameters are norms and
#: biases, for which separate updates would take time and free little.
KEPT_SHARE = 0.02

#: Part of the name of an operation -> the alternative to this operation on a released gradient.
REMEDIES = {
    "norm": "clip with release_gradients(..., clip_value=), or train without release: a norm needs all gradients",
    "clamp": "pass the limit as release_gradients(..., clip_value=)",
    "unscale": "train in bfloat16, which needs no GradScaler, or without release",
    "aten.add": "call optimizer.step() after each backward, or set accumulate_steps",
    "": "read it in a hook, parameter.register_hook, or train without release",
}


class ReleasedGradient(Tensor):
    """Replaces a gradient that was applied and freed. It has a shape but no memory; operations on it raise ConfigError.

    Args:
    - `parameter`: the parameter of the gradient.
    - `name`: the name of the parameter.
    """

    parameter_name: str

    def __new__(cls, parameter: Tensor, name: str) -> ReleasedGradient:
        """Return a tensor of the shape, dtype and device of a parameter."""
        self: ReleasedGradient = without_memory(cls, parameter)
        self.parameter_name = name
        return self

    def __init__(self, parameter: Tensor, name: str) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raise ConfigError with the name of the parameter and what to do instead."""
        leaves = tree_leaves((args, kwargs or {}))
        name = next((each.parameter_name for each in leaves if isinstance(each, cls)), "a parameter")
        remedy = next(text for part, text in REMEDIES.items() if part in str(func))
        raise ConfigError(f"the gradient of {name} was released in backward, and {func} reads it", PLACE, remedy)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ReleasedGradient({self.parameter_name})"


def unhooked_step(optimizer: Optimizer) -> Callable[[Optimizer], object]:
    """Return the step method of an optimizer's class without step hooks."""
    step: Any = type(optimizer).step
    found: Callable[[Optimizer], object] = step.__wrapped__
    return found


@dataclass(frozen=True)
class OptimizerTwin:
    """Builds optimizers for copies of a network, with states of the same size.

    Args:
    - `optimizer`: the optimizer of the network, or one that a twin built.
    - `groups`: options of each parameter group, and the indices of its parameters in the network.
    - `releases`: whether gradients are released.
    """

    optimizer: Optimizer
    groups: list[tuple[dict[str, Any], list[int]]]
    releases: bool

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer, place: str) -> OptimizerTwin:
        """Return the twin of a network's optimizer. Raises ConfigError for an optimizer that needs all gradients."""
        _check_optimizer(optimizer, place)
        indices = {parameter: index for index, parameter in enumerate(model.parameters())}
        groups = [
            ({key: value for key, value in group.items() if key != "params"},
             [indices[each] for each in group["params"] if each in indices])
            for group in optimizer.param_groups
        ]  # fmt: skip
        groups = [(options, numbers) for options, numbers in groups if numbers]
        if not groups:
            raise ConfigError("the optimizer has no parameter of the network", place, "pass its own optimizer")
        return cls(optimizer, groups, release_of(optimizer) is not None)

    def build(self, model: nn.Module) -> Optimizer:
        """Build the optimizer of a copy of the network. A step with zero gradients creates its state."""
        own = [*model.parameters()]
        changes = {"fused": None} if own[0].is_meta else {}  # fused optimizers do not run on the meta device
        groups = [{**options, **changes, "params": [own[each] for each in numbers]} for options, numbers in self.groups]
        cls = type(self.optimizer)
        known = inspect.signature(cls).parameters
        defaults = {key: value for key, value in {**self.optimizer.defaults, **changes}.items() if key in known}
        built: Optimizer = cls(groups, **defaults)
        gradients = [each.grad for each in own]
        for each in own:
            each.grad = torch.zeros_like(each) if each.requires_grad else None
        unhooked_step(built)(built)
        for each, gradient in zip(own, gradients, strict=True):
            each.grad = gradient
        return built


class _Slot:
    """A parameter whose gradient is released.

    Args:
    - `group`: index of its parameter group in the optimizer.

    Attributes:
    - `count`: number of gradients since the last `optimizer.step()`.
    - `version`: version counter of the parameter after its update; None before the update.
    """

    def __init__(self, parameter: Tensor, name: str, group: int) -> None:
        self.parameter, self.name, self.group = parameter, name, group
        self.released = ReleasedGradient(parameter, name)
        self.count, self.version = 0, None  # type: int, int | None


class GradientRelease:
    """Releases the gradients of an optimizer. `release_gradients` returns it.

    Attributes:
    - `model`, `optimizer`: the arguments of `release_gradients`.
    - `accumulate_steps`: number of backward passes before each `optimizer.step()`. It may be set between steps.
    - `slots`: the parameters whose gradients are released.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, accumulate_steps: int, clip_value: float | None) -> None:
        self.model, self.optimizer, self.accumulate_steps = model, optimizer, accumulate_steps
        self._clip_value, self._keeps = clip_value, False
        self._step = unhooked_step(optimizer)
        self._lock = threading.Lock()  # backward has a thread for each GPU
        self.slots: dict[Tensor, _Slot] = {}
        self._options: dict[int, list[tuple[Any, ...]]] = {}  # index of a group -> its options during the updates
        self._handles: list[RemovableHandle] = [optimizer.register_step_post_hook(self._after_step)]
        self._before = optimizer.register_step_pre_hook(self._before_step)
        self._add_parameters()
        _active.add(self)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Keeps gradients in backward. For all micro-batches of a step but the last."""
        before, self._keeps = self._keeps, True
        try:
            yield
        finally:
            self._keeps = before

    def remove(self) -> None:
        """Stop releasing gradients: later backward passes keep them."""
        for handle in (*self._handles, self._before):
            handle.remove()
        self._handles.clear()
        self.slots.clear()
        _active.discard(self)

    def _add_parameters(self) -> None:
        """Add new parameters of the optimizer that belong to the network and require gradients.

        Leaves out the smallest, up to `KEPT_SHARE` of all bytes.
        """
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        found: list[tuple[nn.Parameter, int]] = []
        for index, group in enumerate(self.optimizer.param_groups):
            _check_group(self.optimizer, group, index)
            found += [(each, index) for each in group["params"] if each in names and each.requires_grad]
        found.sort(key=lambda pair: pair[0].nbytes)
        limit = KEPT_SHARE * sum(each.nbytes for each, _ in found)
        total = 0
        for each, index in found:
            total += each.nbytes
            if total > limit and each not in self.slots:
                slot = self.slots[each] = _Slot(each, names[each], index)
                # Weak references: Python's garbage collector does not see hooks of tensors, and would not free cycles.
                hook = partial(_receive, weakref.ref(self), weakref.ref(slot))
                self._handles.append(each.register_post_accumulate_grad_hook(hook))

    def receive(self, slot: _Slot, parameter: Tensor) -> None:
        """Update a parameter whose gradient is complete, and release the gradient."""
        if self._keeps:
            return
        gradient = parameter.grad
        assert gradient is not None
        if slot.version is not None:
            raise ConfigError(
                f"{slot.name} received a second gradient after its update and before optimizer.step()",
                PLACE,
                "call optimizer.step() after each backward, even if a loss is not finite, or set accumulate_steps",
            )
        if gradient.requires_grad:
            raise ConfigError(
                f"the gradient of {slot.name} has a graph (create_graph=True)", PLACE, "use torch.autograd.grad"
            )
        slot.count += 1
        if slot.count < self.accumulate_steps:
            return
        group = self.optimizer.param_groups[slot.group]
        if gradient.layout is not torch.strided and (group.get("foreach") or not parameter.is_cpu):
            raise ConfigError(f"the gradient of {slot.name} is sparse", PLACE, "use sparse=False, or a CPU")
        if self._clip_value is not None:
            nn.utils.clip_grad_value_([parameter], self._clip_value)
        with self._lock:
            if slot.group not in self._options:  # once per step
                _check_processes()
                self._options[slot.group] = _options_of(group)
            groups = self.optimizer.param_groups
            self.optimizer.param_groups = [{**group, "params": [parameter]}]
            try:
                self._step(self.optimizer)
            finally:
                self.optimizer.param_groups = groups
        slot.version = parameter._version
        parameter.grad = slot.released

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Clear released gradients. Raises ConfigError if options, parameters or gradients changed after an update."""
        if any(each is not None for each in (*args[1:], *kwargs.values())):
            raise ConfigError(
                "a closure runs backward inside optimizer.step()", PLACE, "call backward first, then step()"
            )
        for index, options in self._options.items():
            changed = [
                str(new[0])
                for old, new in zip(options, _options_of(self.optimizer.param_groups[index]), strict=False)
                if old[0] != new[0] or old[2] != new[2] or not (old[1] is new[1] or old[1] == new[1])
            ]
            if changed:
                raise ConfigError(
                    f"{join_names(changed)} of group {index} changed between backward and optimizer.step()",
                    PLACE,
                    "set it before backward, which updates the parameters",
                )
        for slot in self.slots.values():
            if slot.version is None:
                continue
            gradient = slot.parameter.grad
            if slot.parameter._version != slot.version or not (gradient is None or gradient is slot.released):
                raise ConfigError(
                    f"{slot.name} or its gradient changed between backward and optimizer.step()",
                    PLACE,
                    "change it before backward, which updates the parameters",
                )
            slot.parameter.grad = None

    def _after_step(self, *_: object) -> None:
        """Begin the next step."""
        self._options.clear()
        for slot in self.slots.values():
            slot.count, slot.version = 0, None
        self._add_parameters()
        self._before.remove()  # register it again, as the last hook: the others may read gradients
        self._before = self.optimizer.register_step_pre_hook(self._before_step)


def _receive(release: weakref.ref[GradientRelease], slot: weakref.ref[_Slot], parameter: Tensor) -> None:  # a hook
    owner, own = release(), slot()
    if owner is not None and own is not None:
        owner.receive(own, parameter)


_active: WeakSet[GradientRelease] = WeakSet()


def release_of(optimizer: Optimizer) -> GradientRelease | None:
    """Return the release of an optimizer's gradients; None if they are not released."""
    return next((each for each in _active if each.optimizer is optimizer), None)


def is_released(parameter: Tensor) -> bool:
    """Return whether the gradient of a parameter is released."""
    return any(parameter in each.slots for each in _active)


def release_gradients(
    model: nn.Module, optimizer: Optimizer, *, accumulate_steps: int = 1, clip_value: float | None = None
) -> GradientRelease:
    """Update each parameter inside backward once its gradient is complete, and free the gradient. Bit-identical.

    The training loop does not change. `backward` calls the optimizer's own step for one parameter at a time.
    `optimizer.step()` updates the remaining parameters and runs step hooks. After backward, reading a gradient raises
    ConfigError.

    >>> import torch, zoo
    >>> model = zoo.lean(torch.nn.Linear(4, 2))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> release = zoo.release_gradients(model, optimizer)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.zero_grad()

    Set learning rates before backward. Skipping `optimizer.step()` does not undo a backward pass. After each step
    gradients are None, as after `zero_grad()`. The smallest gradients, together at most 2 % of all bytes, stay for
    `optimizer.step()`.

    Args:
    - `model`: the network whose gradients are released.
    - `optimizer`: an optimizer of torch.optim that updates each parameter independently: any but LBFGS.
    - `accumulate_steps`: number of backward passes before each `optimizer.step()`. The last one releases gradients. If
      the number varies, run all passes but the last within ``release.accumulate()`` instead.
    - `clip_value`: clips the gradients as `torch.nn.utils.clip_grad_value_` does.

    Returns a `GradientRelease`. Its ``remove()`` stops the release.

    Raises TypeError for arguments of other types. Raises ConfigError for an unsupported optimizer, a second release,
    parameters in float16 or sharded parameters, and if several processes train: DistributedDataParallel keeps all
    gradients in buckets.
    """
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        kinds = f"{type(model).__name__} and {type(optimizer).__name__}"
        raise TypeError(f"release_gradients takes a torch.nn.Module and a torch.optim.Optimizer, not {kinds}")
    _check_optimizer(optimizer)
    if accumulate_steps < 1:
        raise ConfigError(f"accumulate_steps={accumulate_steps} releases nothing", PLACE, "use at least 1")
    if clip_value is not None and not clip_value > 0:
        raise ConfigError(f"clip_value={clip_value} leaves no gradient", PLACE, "use a value above 0, or None")
    if isinstance(model, DistributedDataParallel):
        _refuse_processes("the network is wrapped in DistributedDataParallel")
    _check_processes()
    own = {parameter: name for name, parameter in model.named_parameters()}
    trained = [each for group in optimizer.param_groups for each in group["params"]]
    if not any(each in own for each in trained):
        raise ConfigError("the optimizer has no parameter of the network", PLACE, "pass the network's own optimizer")
    for each in trained:
        if each not in own:
            continue
        if each.dtype == torch.float16:
            raise ConfigError(f"{own[each]} is in float16, which needs a GradScaler", PLACE, "train in bfloat16")
        if is_wrapper(each.data):
            what = f"{own[each]} is a {type(each.data).__name__}, not an ordinary tensor"
            raise ConfigError(what, PLACE, "train without release")
        if is_released(each):
            raise ConfigError(f"the gradient of {own[each]} is released already", PLACE, "call it once")
    return GradientRelease(model, optimizer, accumulate_steps, clip_value)


def _check_optimizer(optimizer: Optimizer, place: str = PLACE) -> None:
    """Raise ConfigError unless the optimizer updates each parameter independently and without a graph."""
    kind = type(optimizer)
    if not any(kind is getattr(torch.optim, name, None) for name in PER_PARAMETER):
        raise ConfigError(
            f"{kind.__name__} is not an optimizer of torch.optim that updates each parameter independently",
            place,
            "use another one, such as SGD or AdamW",
        )
    if optimizer.defaults.get("differentiable"):
        raise ConfigError("the optimizer is differentiable", place, "leave out differentiable=True")


def _check_group(optimizer: Optimizer, group: dict[str, Any], index: int) -> None:
    """Raise ConfigError if the update of a whole group differs from separate updates of its parameters."""
    if type(optimizer).__name__ == "Adafactor" and len({each.dtype for each in group["params"]}) > 1:
        what = f"group {index} of Adafactor has parameters of several dtypes, and the first sets eps for all"
        raise ConfigError(what, PLACE, "give each dtype a group")
    kinds = {f"{type(each).__name__} on {each.device.type}" for each in group["params"]}
    if len(kinds) > 1 and group.get("foreach") is None and not group.get("fused"):
        what = f"group {index} has parameters of several kinds ({join_names(sorted(kinds))})"
        raise ConfigError(what, PLACE, "set foreach of the optimizer, or give each kind a group")


def _check_processes() -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        _refuse_processes(f"{dist.get_world_size()} processes train")


def _refuse_processes(what: str) -> None:
    why = "gradients are complete only after averaging, and its buckets keep all of them"
    raise ConfigError(f"{what}: {why}", PLACE, "train without release, or in one process")


def _options_of(group: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return name, value and version counter of the options of a group."""
    return [
        (key, value, value._version if isinstance(value, Tensor) else None)
        for key, value in group.items()
        if key != "params"
    ]
