"""Activation checkpointing of the blocks of any network, by torch's own `checkpoint`: whole, or selective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from zoo.errors import ConfigError
from zoo.remat.operations import CONVOLUTION, PRODUCTS

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def checkpoint_blocks(model: nn.Module) -> nn.Module:
    """Let each block of a network keep its inputs and run again in backward; returns the network itself.

    torch's `checkpoint` moves running statistics each time that a block runs. Here they are put back after the second
    time. (`zoo.layers.checkpointing` pauses them, for which norms run other operations the second time.)

    Raises ConfigError for a network without such blocks as `blocks_of` finds.
    """
    return _checkpointed(model, lambda block: (nullcontext(), _put_back(block)))


def checkpoint_blocks_selectively(model: nn.Module) -> nn.Module:
    """Let each block keep the outputs of convolutions and matrix products too, and compute all else again.

    This is torch's selective activation checkpointing. It refuses activations that overwrite what is kept, so that they
    work out of place here. For the rest see `checkpoint_blocks`.
    """

    def contexts(block: nn.Module) -> Contexts:
        first, second = create_selective_checkpoint_contexts([CONVOLUTION, *PRODUCTS])
        return first, _put_back(block, second)

    for module in model.modules():
        if getattr(module, "inplace", False) is True:
            setattr(module, "inplace", False)  # noqa: B010  # of modules of any class
    return _checkpointed(model, contexts)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a network: the members of sequences and lists of modules of one class.

    A block has modules in it and is itself no sequence. Where blocks have such blocks in them, the inner ones count.
    """
    found: dict[nn.Module, None] = {}
    for module in model.modules():
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            members = list(module)
            is_stage = len({type(member) for member in members}) == 1 and not isinstance(members[0], nn.Sequential)
            if is_stage and any(members[0].children()):
                found.update(dict.fromkeys(members))
    return [block for block in found if not any(other in found for other in block.modules() if other is not block)]


def _checkpointed(model: nn.Module, contexts: Callable[[nn.Module], Contexts]) -> nn.Module:
    blocks = blocks_of(model)
    if not blocks:
        raise ConfigError("the network has no sequence of blocks of one class")
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=partial(contexts, block))
    return model


@contextmanager
def _put_back(block: nn.Module, inner: AbstractContextManager[Any] | None = None) -> Iterator[None]:
    """Enter the ``inner`` context; when it ends, give the block's buffers the values that they had before."""
    before = [(buffer, buffer.clone()) for buffer in block.buffers()]
    try:
        with inner or nullcontext():
            yield
    finally:  # torch leaves the context by an exception once it has computed all that it needs
        for buffer, value in before:
            buffer.copy_(value)
