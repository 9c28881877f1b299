"""The state that modules read besides their inputs, for recomputation: parameters, buffers and attributes.

A module that runs again in backward must read what it read in forward. Parameters must be unchanged. Buffers and
attributes that the first run has changed (the vectors of spectral norm, the ranges of an observer, a counter) are reset
to their values before the first run, and then to their current values. So they advance once per forward pass. The same
holds for random number generators other than torch's own, which `zoo.ops.context.RandomState` restores.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from zoo.ops.context import rewind_of
from zoo.torch_internals.data import has_hooks, is_alias_of, is_wrapper, version_of

#: The buffers of norms. The recomputation pauses their updates (`zoo.layers.checkpointing.paused_statistics`) and, in
#: training, does not read them.
RUNNING_STATISTICS = frozenset(("running_mean", "running_var", "num_batches_tracked"))

_ABSENT: Any = object()  # the value of a name that does not exist


class _Names(NamedTuple):
    """The attributes or the buffers of a module when a run begins."""

    module: nn.Module
    current: dict[str, Any]  # the module's own dictionary
    before: dict[str, Any]
    versions: dict[str, int]  # of the tensors in ``before``
    copies: dict[str, Tensor]  # of the buffers in ``before``; attributes are not copied
    parameters: dict[nn.Parameter, int]  # the versions of the module's parameters


class ModuleState:
    """The buffers and attributes of ``modules``, taken before a run, so that the run can be repeated.

    Also taken are the states of the generators of `random` and numpy, and of generators that are attributes.

    Modules of torch and of this package are skipped: only norms among them have state, which `RUNNING_STATISTICS` and
    paused statistics cover. Other state is found in modules with hooks or other buffers, and in classes of users.
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
        """End the run: keep the old values of the state that it changed, or of all state if it was not ``completed``.

        Raises RuntimeError if it has overwritten a tensor that is an attribute or a frozen parameter but no buffer.
        """
        for names in self._names:
            written = [p for p, version in names.parameters.items() if version_of(p) != version]
            for p in written:
                if not p.requires_grad:
                    raise _overwritten(names.module, "a frozen parameter", p)
            if written and completed:
                continue  # the first call has initialized the parameters, and must not again
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
    def restored(self) -> Iterator[None]:
        """Return a reusable context with the values from before the run, in which modules may change them.

        The tensors themselves are exchanged, not overwritten, so that graphs that have saved them stay valid. Raises
        RuntimeError if a buffer that the run has not changed has been changed since.
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

    Their memory is held, so that no other memory can get its address.
    """

    def __init__(self, parameters: Iterable[Any]) -> None:
        kept = [p for p in dict.fromkeys(parameters) if isinstance(p, Tensor) and not is_wrapper(p)]
        self._kept = [(p, p.detach(), version_of(p)) for p in kept]

    def check(self) -> None:
        """Raise RuntimeError if a parameter was given other memory (`p.data = new`) or was modified in place."""
        for p, kept, version in self._kept:
            # Offloading swaps in empty tensors. Hooks of the module load the values again.
            if p.numel() and kept.numel() and (not is_alias_of(p, kept) or version_of(p) != version):
                raise RuntimeError(
                    f"a parameter of shape {tuple(p.shape)} was modified between forward and backward, which runs its "
                    "module again; modify parameters after backward, or store activations"
                )


def has_no_state(module: nn.Module) -> bool:
    """Return whether a module is of torch or of this package, without hooks and buffers other than of a norm."""
    known = type(module).__module__.startswith(("torch.nn.modules.", "zoo."))
    plain = known and module._buffers.keys() <= RUNNING_STATISTICS
    return plain and "forward" not in vars(module) and not has_hooks(module)


def _names(module: nn.Module, current: dict[str, Any], copies: dict[int, Tensor] | None) -> _Names:
    tensors = {name: value for name, value in current.items() if isinstance(value, Tensor)}
    versions = {name: version_of(tensor) for name, tensor in tensors.items()}
    copied = {} if copies is None else {name: _copy(tensor, copies) for name, tensor in tensors.items()}
    parameters = {p: version_of(p) for p in module.parameters(recurse=False)}
    return _Names(module, current, dict(current), versions, copied, parameters)


def _rewinds(modules: Iterable[nn.Module]) -> list[Callable[[], object]]:
    """Return functions that restore the generators of Python and numpy, and generators that are attributes of modules.

    Empty without modules: other modules draw from torch's own generators alone.
    """
    own = [rewind_of(value) for module in modules for value in vars(module).values()]
    if not own:
        return []
    of_process = partial(random.setstate, random.getstate()), partial(np.random.set_state, np.random.get_state())
    return [*of_process, *(rewind for rewind in own if rewind is not None)]


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
