"""Activation checkpointing that updates running statistics once per batch, and stages of checkpointed blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zoo.ops.context import is_exporting, is_fx_proxy
from zoo.ops.recomputation import ModuleState, Parameters, pause_statistics
from zoo.torch_internals.dispatch import are_transforms_active


def checkpoint(module: nn.Module, *args: Any) -> Any:
    """Return ``module(*args)``; saves only ``args`` and recomputes the rest in backward.

    Wraps the non-reentrant `torch.utils.checkpoint.checkpoint` but updates running statistics once per step; torch's
    own updates them a second time in the recomputation. Other buffers and attributes that forward changes have their
    old values in the recomputation, and advance once too (`zoo.ops.recomputation`). ``module`` must not overwrite
    ``args``; the residual blocks and dense modules of this package do not. As with torch's, the recomputation uses the
    module's mode, and in evaluation the running statistics of norms, at the time of backward. Equals ``module(*args)``
    without gradients, in `torch.export`, and in transforms of `torch.func`, where nothing can be recomputed.

    Raises RuntimeError if ``module`` overwrites a tensor that is an attribute but no buffer, or a frozen parameter; in
    backward, if parameters or buffers have been modified since forward.
    """
    if not torch.is_grad_enabled() or is_exporting():
        return module(*args)
    if torch.compiler.is_compiling():  # a compiled graph updates buffers once anyway, and accepts no context_fn
        return torch_checkpoint(module, *args, use_reentrant=False)
    if are_transforms_active():
        return module(*args)
    run = _Run(module)
    return torch_checkpoint(
        module, *args, use_reentrant=False, context_fn=lambda: (run.first(), _Repeatable(run.again))
    )


class _Run:
    """One forward pass of a checkpointed module, with the state that its recomputations need."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @contextmanager
    def first(self) -> Iterator[None]:
        """Runs the module for the first time, and records the state that it reads and changes."""
        self.state, completed = ModuleState(self.module.modules()), False
        try:
            yield
            completed = True
        finally:  # the recomputation of an outer checkpoint may end early, by an exception
            self.state.finish(completed)
            self.parameters = Parameters(self.module.parameters())

    @contextmanager
    def again(self) -> Iterator[None]:
        """Runs the module again with the recorded state. Raises RuntimeError if parameters or buffers were modified."""
        self.parameters.check()
        with self.state.restore(), pause_statistics(self.module):
            yield


class _Repeatable:
    """A context that may be entered repeatedly, as each backward pass through a checkpoint does."""

    def __init__(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        self._context, self._entered = context, ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(self._context())

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)


class CheckpointedSequential(nn.Sequential):
    """Sequence of checkpointed modules: saves the input of each module and recomputes the rest, see `checkpoint`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the last module's output."""
        for module in self:
            x = module(x) if is_fx_proxy(x) else checkpoint(module, x)
        return x


def build_stage(blocks: Iterable[nn.Module], memory: str) -> nn.Sequential:
    """Return a sequence of residual blocks ``block1``, ``block2``, ...; checkpointed if ``memory="checkpoint"``."""
    named = OrderedDict((f"block{number}", block) for number, block in enumerate(blocks, start=1))
    return CheckpointedSequential(named) if memory == "checkpoint" else nn.Sequential(named)
