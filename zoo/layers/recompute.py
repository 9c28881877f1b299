"""Activation checkpointing that counts each batch once in the running statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zoo.layers.norm import ABN
from zoo.ops.recorded import is_transformed


def checkpoint(module: nn.Module, *args: Any) -> Any:
    """Return ``module(*args)``, keeping only ``args`` and computing the rest again in backward.

    `torch.utils.checkpoint.checkpoint` (non-reentrant) that updates running statistics once per step; called
    directly, torch's runs every norm's forward twice and updates them twice.  ``module`` must not overwrite ``args``:
    the residual blocks and dense modules of this package do not.  What the module is at the time of backward (training
    or evaluation, parameters, running statistics) decides the recomputation, as for torch's.  Without gradients, and in
    transforms of `torch.func`, which cannot compute anything again, this is ``module(*args)``.
    """
    if not torch.is_grad_enabled():
        return module(*args)
    if torch.compiler.is_compiling():  # a compiled graph updates buffers once by itself, and takes no context
        return torch_checkpoint(module, *args, use_reentrant=False)
    if is_transformed():
        return module(*args)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), paused_statistics(module)

    return torch_checkpoint(module, *args, use_reentrant=False, context_fn=contexts)


class CheckpointedSequential(nn.Sequential):
    """Modules in order, of which backward keeps the inputs only: each is run again, see `checkpoint`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the last module's output."""
        for module in self:
            x = checkpoint(module, x) if isinstance(x, Tensor) else module(x)  # else: a stand-in of torch.fx
        return x


@contextmanager
def paused_statistics(module: nn.Module) -> Iterator[None]:
    """Let no norm of the module count what it sees, in running statistics or number of batches."""
    norms = [norm for norm in module.modules() if isinstance(norm, ABN)]
    foreign = [norm for norm in module.modules() if isinstance(norm, _NormBase) and not isinstance(norm, ABN)]
    before = [(norm.momentum, _copy(norm.num_batches_tracked)) for norm in foreign]
    paused = [norm.statistics_paused for norm in norms]
    for norm in norms:
        norm.statistics_paused = True
    for other in foreign:
        other.momentum = 0.0  # moves nothing
    try:
        yield
    finally:
        for norm, was_paused in zip(norms, paused, strict=True):
            norm.statistics_paused = was_paused
        for other, (momentum, count) in zip(foreign, before, strict=True):
            other.momentum = momentum
            if count is not None:
                other.get_buffer("num_batches_tracked").copy_(count)


def _copy(count: Any) -> Tensor | None:
    return None if count is None else count.clone()
