"""Restores the state that a module reads when it runs again, and undoes the side effects of a run.

| state | mechanism | used by |
| --- | --- | --- |
| attributes, buffers, generators of user modules | `ModuleState` restores their earlier values | chains, checkpoints |
| parameters | `Parameters` raises an error if they changed | chains, checkpoints |
| running statistics of norms | `pause_statistics` stops their updates | chains, checkpoints |
| all buffers | `restore_buffers` resets them after the run | replicas, gradient angles, reports |
| generators, autocast | `RandomState` and `Autocast` restore the state of forward | chains |
| | `restore_generators` resets them after the run | gradient angles, checks, reports |

A chain (`zoo.ops.chain`) and a checkpoint (`zoo.layers.checkpointing`) run modules again in backward. The modules must
read the same state as in forward, and state that forward advances (the vectors of spectral norm, the ranges of an
observer, a counter, running statistics) must advance once. `torch.utils.checkpoint` restores torch's own generators and
autocast.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import set_device_states

from zoo.torch_internals.data import NormBase, has_hooks, is_alias_of, is_same_view, is_wrapper, version_of

#: The buffers of norms. The recomputation pauses their updates (`pause_statistics`) and, in training, does not read
#: them.
RUNNING_STATISTICS = frozenset(("running_mean", "running_var", "num_batches_tracked"))

_ABSENT: Any = object()  # the value of a name that does not exist


class _Names(NamedTuple):
    """The attributes or the buffers of a module at the start of a run."""

    module: nn.Module
    current: dict[str, Any]  # the module's own dictionary
    before: dict[str, Any]
    versions: dict[str, int]  # version counters of the tensors in ``before``
    copies: dict[str, Tensor]  # copies of the buffers in ``before``; attributes are not copied
    parameters: dict[nn.Parameter, int]  # the versions of the module's parameters


class ModuleState:
    """Snapshot of the buffers and attributes of ``modules`` before a run, so that the run can be repeated.

    The snapshot includes the states of the generators of `random` and numpy, and of generators that are attributes.

    A repetition sees the values from before the first run. Afterwards, the current values are restored, so that state
    advances once per forward pass.

    Modules of torch and of this package are skipped: among them only norms have state, and `pause_statistics` covers
    it. Modules with hooks or other buffers, and modules of users' classes, are not skipped.
    """

    def __init__(self, modules: Iterable[Any]) -> None:
        self._changed: list[tuple[dict[str, Any], str, Any, bool]] = []
        self._unchanged: list[tuple[nn.Module, str, Tensor, int]] = []
        copies: dict[int, Tensor] = {}  # a tensor may be a buffer of several modules
        self._names: list[_Names] = []
        for module in dict.fromkeys(modules):
            if not isinstance(module, nn.Module) or has_no_state(module):
                continue
            self._names += [_names(module, vars(module), None), _names(module, module._buffers, copies)]
        self._modules = list(dict.fromkeys(names.module for names in self._names))
        self._rewinds = _rewinds(self._modules)

    def finish(self, completed: bool = True) -> None:
        """End the run: save the old values of changed state, or of all state if the run was not ``completed``.

        Raises RuntimeError if the run overwrote a tensor that is an attribute or a frozen parameter but no buffer.
        """
        for names in self._names:
            written = [p for p, version in names.parameters.items() if version_of(p) != version]
            for p in written:
                if not p.requires_grad:
                    raise _overwritten(names.module, "a frozen parameter", p)
            if written and completed:
                continue  # a lazy module: the first call has initialized the parameters and must not do so again
            for name in names.before.keys() | names.current.keys():
                value, new = names.before.get(name, _ABSENT), names.current.get(name, _ABSENT)
                overwritten = name in names.versions and version_of(value) != names.versions[name]
                if overwritten and name not in names.copies:
                    raise _overwritten(names.module, f"its attribute {name!r}", value)
                copy = names.copies.get(name)
                if copy is not None and new is value and not overwritten:
                    overwritten = not value.is_meta and not torch.equal(value, copy)  # a write to ``.data``
                if new is not value or overwritten or not completed:
                    self._changed.append((names.current, name, value if copy is None else copy, copy is not None))
                elif copy is not None:
                    self._unchanged.append((names.module, name, value, names.versions[name]))
        self._names = []

    @contextmanager
    def restore(self) -> Iterator[None]:
        """Sets the values from before the run within the block, where modules may change them. Reusable.

        Exchanges tensors instead of overwriting them, so that graphs that have saved them stay valid. Raises
        RuntimeError if a buffer that the run did not change was changed since.
        """
        for module, name, value, version in self._unchanged:
            if module._buffers.get(name) is not value or version_of(value) != version:
                raise RuntimeError(
                    f"the buffer {name!r} of {type(module).__name__} was modified between forward and backward, which "
                    "runs the module again; modify it after backward, or store activations"
                )
        copies: dict[int, Tensor] = {}
        now = [(names, name, names.get(name, _ABSENT)) for names, name, *_ in self._changed]
        rewinds = _rewinds(self._modules)
        for rewind in self._rewinds:
            rewind()
        for names, name, value, is_buffer in self._changed:
            _assign(names, name, _copy(value, copies) if is_buffer else value)
        try:
            yield
        finally:  # torch ends a checkpoint's recomputation early by an exception
            for names, name, value in now:
                _assign(names, name, value)
            for rewind in rewinds:
                rewind()


class Parameters:
    """Parameters whose values a recomputation needs.

    Holds their memory, so that no other tensor can get the same address.
    """

    def __init__(self, parameters: Iterable[Any]) -> None:
        plain = [p for p in dict.fromkeys(parameters) if isinstance(p, Tensor) and not is_wrapper(p)]
        self._saved = [(p, p.detach(), version_of(p)) for p in plain]

    def check(self) -> None:
        """Raise RuntimeError if a parameter has other memory (`p.data = new`) or was modified in place."""
        for p, saved, version in self._saved:
            # Offloading replaces parameters by empty tensors; hooks of the module load the values again.
            if p.numel() and saved.numel() and (not is_alias_of(p, saved) or version_of(p) != version):
                raise RuntimeError(
                    f"a parameter of shape {tuple(p.shape)} was modified between forward and backward, which runs its "
                    "module again; modify parameters after backward, or store activations"
                )


def has_no_state(module: nn.Module) -> bool:
    """Return whether a module belongs to torch or this package and has no hooks, and no buffers except a norm's."""
    known = type(module).__module__.startswith(("torch.nn.modules.", "zoo."))
    plain = known and module._buffers.keys() <= RUNNING_STATISTICS
    return plain and "forward" not in vars(module) and not has_hooks(module)


def _names(module: nn.Module, current: dict[str, Any], copies: dict[int, Tensor] | None) -> _Names:
    tensors = {name: value for name, value in current.items() if isinstance(value, Tensor)}
    versions = {name: version_of(tensor) for name, tensor in tensors.items()}
    copied = {} if copies is None else {name: _copy(tensor, copies) for name, tensor in tensors.items()}
    parameters = {p: version_of(p) for p in module.parameters(recurse=False)}
    return _Names(module, current, dict(current), versions, copied, parameters)


def _overwritten(module: nn.Module, what: str, tensor: Tensor) -> RuntimeError:
    return RuntimeError(
        f"{type(module).__name__} has overwritten {what}, a tensor of shape {tuple(tensor.shape)}, in forward; "
        "backward runs the module again, and can restore buffers only: create the tensor with register_buffer"
    )


def _copy(tensor: Tensor, copies: dict[int, Tensor]) -> Tensor:
    if id(tensor) not in copies:
        copies[id(tensor)] = tensor.detach().clone()
    return copies[id(tensor)]


def _assign(names: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        names.pop(name, None)
    else:
        names[name] = value


@contextmanager
def restore_buffers(module: nn.Module) -> Iterator[None]:
    """Restores the buffers of ``module`` on exit, so that a recomputation does not update statistics.

    Restores the tensor of each name, and the memory, size and dtype of each tensor (`Tensor.resize_`, `Tensor.set_` and
    ``.data`` change them). Does not write unchanged buffers, because a graph may have saved them.
    """
    names = [(owner._buffers, dict(owner._buffers)) for owner in module.modules()]
    buffers = [buffer for buffer in module.buffers() if not is_lazy(buffer)]
    before = [(buffer, buffer.detach(), buffer.clone(), version_of(buffer)) for buffer in buffers]
    try:
        yield
    finally:  # torch ends a checkpoint's recomputation early by an exception
        with torch.no_grad():
            for buffer, memory, value, version in before:
                if not is_same_view(buffer, memory):
                    buffer.data = memory
                    buffer.copy_(value)
                elif version_of(buffer) != version or not (buffer.is_meta or torch.equal(buffer, value)):
                    buffer.copy_(value)  # a write to ``.data`` does not count as a version
        for current, original in names:
            current.clear()
            current.update(original)


@contextmanager
def pause_statistics(module: nn.Module) -> Iterator[None]:
    """Stops the norms of ``module`` from updating their running statistics.

    Unlike `restore_buffers`, it does not modify buffers that the graph of the recomputation has saved, so that
    backward may run after the block has ended.
    """
    norms = [norm for norm in module.modules() if isinstance(norm, NormBase)]
    own: list[Any] = [norm for norm in norms if hasattr(norm, "statistics_paused")]  # norms of `zoo.layers`
    foreign = [norm for norm in norms if not hasattr(norm, "statistics_paused")]
    counts = [None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone() for norm in foreign]
    momenta = [norm.momentum for norm in foreign]
    paused = [norm.statistics_paused for norm in own]
    for norm in own:
        norm.statistics_paused = True
    for other in foreign:
        other.momentum = 0.0  # leaves the running statistics unchanged
    try:
        yield
    finally:
        for norm, was_paused in zip(own, paused, strict=True):
            norm.statistics_paused = was_paused
        for other, momentum, count in zip(foreign, momenta, counts, strict=True):
            other.momentum = momentum
            if count is not None:
                other.get_buffer("num_batches_tracked").copy_(count)


class RandomState(NamedTuple):
    """The states of the random number generators of the CPU and of one tensor's device."""

    cpu: Tensor
    device_type: str
    devices: list[int]
    states: list[Tensor]

    @classmethod
    def now(cls, x: Tensor) -> RandomState:
        """Return the current states, for the device of x."""
        # torch.utils.checkpoint.get_device_states searches its arguments for tensors, which takes 20 times as long as
        # this function, and every link of a chain calls it.
        device_type = x.device.type
        if device_type in ("cpu", "meta"):  # meta has no generator
            return cls(torch.get_rng_state(), device_type, [], [])
        device = x.get_device()
        states = [torch.get_device_module(device_type).get_rng_state(device)]
        return cls(torch.get_rng_state(), device_type, [device], states)

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        if self.devices:
            set_device_states(self.devices, self.states, device_type=self.device_type)

    def is_same(self, other: RandomState) -> bool:
        """Return whether the states are equal, that is, no random number was drawn in between."""
        return all(map(torch.equal, [self.cpu, *self.states], [other.cpu, *other.states]))


@contextmanager
def restore_generators(module: nn.Module) -> Iterator[None]:
    """Restores the random generators of torch, numpy and Python on exit.

    Torch's generators are those of the CPU and of the CUDA devices that hold parameters of ``module``.
    """
    devices = {parameter.device for parameter in module.parameters() if parameter.device.type == "cuda"}
    rewinds = _rewinds_of_process()
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            for rewind in rewinds:
                rewind()


def rewind_of(value: Any) -> Callable[[], object] | None:
    """Return a function that restores the current state of a random number generator; None for any other value."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def _rewinds(modules: Iterable[nn.Module]) -> list[Callable[[], object]]:
    """Return functions that restore the generators of Python and numpy, and generators that are attributes of modules.

    Empty without modules: the modules that are skipped draw from torch's own generators only.
    """
    own = [rewind_of(value) for module in modules for value in vars(module).values()]
    return [*_rewinds_of_process(), *(rewind for rewind in own if rewind is not None)] if own else []


def _rewinds_of_process() -> list[Callable[[], object]]:
    """Return functions that restore the generators of Python and numpy."""
    return [partial(random.setstate, random.getstate()), partial(np.random.set_state, np.random.get_state())]


class Autocast(NamedTuple):
    """The autocast state of a device type: whether it is enabled, and its dtype (None without autocast)."""

    device_type: str
    enabled: bool
    dtype: torch.dtype | None

    @classmethod
    def now(cls, x: Tensor) -> Autocast:
        """Return the current autocast state for the device of x."""
        device_type = x.device.type
        if not torch.amp.is_autocast_available(device_type):
            return cls(device_type, False, None)
        return cls(device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))

    def __call__(self) -> AbstractContextManager[Any]:
        """Return a context with this state."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, self.dtype, enabled=self.enabled)
