"""Full and selective activation checkpointing of the blocks of any network, with torch's own `checkpoint`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from zoo.errors import ConfigError
from zoo.ops.recomputation import restore_buffers
from zoo.remat._cost import CONTRACTIONS, CONVOLUTION

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def checkpoint_blocks(model: nn.Module) -> nn.Module:
    """Checkpoint each block of a network in place, and return the network.

    Recomputation updates running statistics a second time, so the buffers of the block are restored afterwards.
    (`zoo.layers.checkpointing` pauses the updates instead, which changes the norms' operations.)

    Raises ConfigError if `blocks_of` finds no blocks.
    """
    return _checkpoint_each(model, lambda block: (nullcontext(), restore_buffers(block)))


def checkpoint_blocks_selectively(model: nn.Module) -> nn.Module:
    """Like `checkpoint_blocks`, but also save the outputs of convolutions and matrix products.

    This is torch's selective activation checkpointing. It rejects activations that overwrite saved tensors, so in-place
    activations become out-of-place ones.
    """

    def contexts(block: nn.Module) -> Contexts:
        first, second = create_selective_checkpoint_contexts([CONVOLUTION, *CONTRACTIONS])
        return first, _recompute(block, second)

    for module in model.modules():
        if getattr(module, "inplace", False) is True:
            setattr(module, "inplace", False)  # noqa: B010  # modules of any class
    return _checkpoint_each(model, contexts)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the innermost blocks of a network: members of sequences and module lists with members of one class.

    A block has submodules and is not a sequence itself.
    """
    found: dict[nn.Module, None] = {}
    for module in model.modules():
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            members = list(module)
            is_stage = len({type(member) for member in members}) == 1 and not isinstance(members[0], nn.Sequential)
            if is_stage and any(members[0].children()):
                found.update(dict.fromkeys(members))
    return [block for block in found if not any(other in found for other in block.modules() if other is not block)]


def _checkpoint_each(model: nn.Module, contexts: Callable[[nn.Module], Contexts]) -> nn.Module:
    blocks = blocks_of(model)
    if not blocks:
        raise ConfigError("the network has no blocks to checkpoint: no sequence of modules of the same class")
    for block in blocks:
        block.forward = partial(_checkpoint, block.forward, partial(contexts, block))
    return model


def _checkpoint(forward: Callable[..., Any], contexts: Callable[[], Contexts], *args: Any, **kwargs: Any) -> Any:
    # Keywords of a block may have the names of options of `checkpoint`: pass them in a dict.
    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return forward(*args, **kwargs)

    return checkpoint(run, args, kwargs, use_reentrant=False, context_fn=contexts)


@contextmanager
def _recompute(block: nn.Module, inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Enters ``inner`` for a recomputation that leaves the buffers of the block as they are."""
    with restore_buffers(block), inner:
        yield
