"""Activation checkpointing that updates running statistics once per batch, and stages of blocks that may use it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zoo.layers.norm import ABN
from zoo.ops.context import is_exporting, is_fx_proxy
from zoo.torch_internals.data import NormBase
from zoo.torch_internals.dispatch import are_transforms_active


def checkpoint(module: nn.Module, *args: Any) -> Any:
    """Return ``module(*args)``; saves only ``args`` and recomputes the rest in backward.

    Wraps the non-reentrant `torch.utils.checkpoint.checkpoint` but updates running statistics once per step; torch's
    own updates them a second time in the recomputation. ``module`` must not overwrite ``args``; the residual blocks
    and dense modules of this package do not. As with torch's, the recomputation uses the module's state at the time
    of backward: its mode, parameters and running statistics. Equals ``module(*args)`` without gradients, in
    `torch.export`, and in transforms of `torch.func`, where nothing can be recomputed.
    """
    if not torch.is_grad_enabled() or is_exporting():
        return module(*args)
    if torch.compiler.is_compiling():  # a compiled graph updates buffers once anyway, and accepts no context_fn
        return torch_checkpoint(module, *args, use_reentrant=False)
    if are_transforms_active():
        return module(*args)
    return torch_checkpoint(
        module, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), paused_statistics(module))
    )


@contextmanager
def paused_statistics(module: nn.Module) -> Iterator[None]:
    """Context manager: norms of ``module`` do not update their running statistics.

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
    """Return the residual blocks, as ``block1`` and so on, in one module; checkpointed if ``memory`` says so."""
    named = OrderedDict((f"block{number}", block) for number, block in enumerate(blocks, start=1))
    return CheckpointedSequential(named) if memory == "checkpoint" else nn.Sequential(named)
