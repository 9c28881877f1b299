"""Activation checkpointing that updates running statistics once per batch, and stages of blocks that may use it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zoo.layers.norm import ABN
from zoo.ops.context import is_exporting, is_fx_proxy
from zoo.ops.module_state import ModuleState, Parameters
from zoo.torch_internals.data import NormBase
from zoo.torch_internals.dispatch import are_transforms_active


def checkpoint(module: nn.Module, *args: Any) -> Any:
    """Return ``module(*args)``; saves only ``args`` and recomputes the rest in backward.

    Wraps the non-reentrant `torch.utils.checkpoint.checkpoint` but updates running statistics once per step; torch's
    own updates them a second time in the recomputation. Other buffers and attributes that forward changes have their
    old values in the recomputation, and advance once too (`zoo.ops.module_state`). ``module`` must not overwrite
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
    """A forward pass of a checkpointed module, and what its recomputations need."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @contextmanager
    def first(self) -> Iterator[None]:
        """Return the context of the first run."""
        self.state, completed = ModuleState(self.module.modules()), False
        try:
            yield
            completed = True
        finally:  # the recomputation of an outer checkpoint may end early, by an exception
            self.state.finish(completed)
            self.parameters = Parameters(self.module.parameters())

    @contextmanager
    def again(self) -> Iterator[None]:
        """Return the context of a recomputation. Raises RuntimeError if parameters or buffers were modified."""
        self.parameters.check()
        with self.state.restored(), paused_statistics(self.module):
            yield


class _Repeatable:
    """A context that may be entered repeatedly, as each backward pass through a checkpoint does."""

    def __init__(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        self._context, self._entered = context, ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(self._context())

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)


@contextmanager
def paused_statistics(module: nn.Module) -> Iterator[None]:
    """Return a context in which the norms of ``module`` do not update their running statistics.

    Unlike `zoo.ops.context.restored_buffers`, it modifies no buffer that the graph of the recomputation has saved.
    Backward may therefore run after the context has ended.
    """
    norms = [norm for norm in module.modules() if isinstance(norm, ABN)]
    foreign = [norm for norm in module.modules() if isinstance(norm, NormBase) and not isinstance(norm, ABN)]
    counts = [None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone() for norm in foreign]
    momenta = [norm.momentum for norm in foreign]
    paused = [norm.statistics_paused for norm in norms]
    for norm in norms:
        norm.statistics_paused = True
    for other in foreign:
        other.momentum = 0.0  # leaves the running statistics unchanged
    try:
        yield
    finally:
        for norm, was_paused in zip(norms, paused, strict=True):
            norm.statistics_paused = was_paused
        for other, momentum, count in zip(foreign, momenta, counts, strict=True):
            other.momentum = momentum
            if count is not None:
                other.get_buffer("num_batches_tracked").copy_(count)


class CheckpointedSequential(nn.Sequential):
    """Sequence of checkpointed modules: saves only their inputs and recomputes each in backward, see `checkpoint`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the last module's output."""
        for module in self:
            x = module(x) if is_fx_proxy(x) else checkpoint(module, x)
        return x


def build_stage(blocks: Iterable[nn.Module], memory: str) -> nn.Sequential:
    """Return residual blocks in one module as ``block1``, ``block2``, ...; checkpointed if ``memory="checkpoint"``."""
    named = OrderedDict((f"block{number}", block) for number, block in enumerate(blocks, start=1))
    return CheckpointedSequential(named) if memory == "checkpoint" else nn.Sequential(named)
