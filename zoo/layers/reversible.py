"""Reversible residual blocks, which find their inputs again from their outputs, and chains of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from zoo.layers.recompute import paused_statistics
from zoo.ops.reversible import Gradients, Meter, Tensors, reverse_coupling, run_chain

Pair = tuple[Tensor, Tensor]


class ReversibleBlock(nn.Module):
    """Additive coupling of two halves: y1 = x1 + f(x2), y2 = x2 + g(y1).

    ``f`` and ``g`` are any modules whose output has the shape of their input.  They must not overwrite it: a first norm
    that works in place has to be set to the form that does not (`InPlaceABN.inplace`); RuntimeError otherwise.  All
    else that their output depends on are their parameters and buffers; of the buffers they may change running
    statistics of norms only.  Hooks of f and g run in a recomputation too.

    Source: Gomez et al., The Reversible Residual Network, 2017, equations 6 to 8.
    """

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f = f
        self.g = g

    def forward(self, x1: Tensor, x2: Tensor) -> Pair:
        """Return (y1, y2) in new tensors."""
        y1 = x1 + _branch(self.f, x2)
        return y1, x2 + _branch(self.g, y1)

    @torch.no_grad()
    def inverse(self, y1: Tensor, y2: Tensor) -> Pair:
        """Return (x1, x2) in new tensors; moves no running statistics."""
        with paused_statistics(self):
            x2 = y2 - _branch(self.g, y1)
            return y1 - _branch(self.f, x2), x2

    def steps(self) -> tuple[_Half, _Half]:
        """Return the two additions, each a link of a chain of its own: f draws its random numbers before g."""
        return _Half(self.f, into=0), _Half(self.g, into=1)


class _Half:
    """One addition of a block: the branch's output on the other half is added to half ``into``."""

    def __init__(self, branch: nn.Module, into: int) -> None:
        self.branch, self.into = branch, into

    def __call__(self, *xs: Tensor) -> Tensors:
        kept, x = xs[1 - self.into], xs[self.into]
        return self._pair(kept, x + _branch(self.branch, kept))

    def modules(self) -> Iterable[nn.Module]:
        return self.branch.modules()

    def reverse(self, ys: Tensors, grads: Tensors, owned: bool) -> tuple[Tensors, Tensors, Gradients]:
        kept, y = ys[1 - self.into], ys[self.into]
        dkept, dy = grads[1 - self.into], grads[self.into]
        x, dkept, gradients = reverse_branch(self.branch, kept, y, (dkept, dy), owned)
        return self._pair(kept, x), self._pair(dkept, dy), gradients

    def _pair(self, kept: Tensor, moved: Tensor) -> Pair:
        return (moved, kept) if self.into == 0 else (kept, moved)


def reverse_branch(
    branch: nn.Module, kept: Tensor, y: Tensor, grads: Pair, owned: bool
) -> tuple[Tensor, Tensor, Gradients]:
    """Return what `reverse_coupling` does, gradients by parameter; the branch's norms do not count the batch again."""
    trained: dict[str, Tensor] = {name: p for name, p in branch.named_parameters() if p.requires_grad}
    run: Any = branch
    leaves = trained
    if any(p._backward_hooks for p in trained.values()):  # they run for what the chain returns, and not here too
        leaves = {name: p.detach().requires_grad_() for name, p in trained.items()}
        run = partial(functional_call, branch, leaves)
    with paused_statistics(branch):
        x, dkept, found = reverse_coupling(run, [*leaves.values()], kept, y, grads, owned)
    return x, dkept, {p: dp for p, dp in zip(trained.values(), found, strict=True) if dp is not None}


def _branch(branch: nn.Module, x: Tensor) -> Tensor:
    """Return the branch's output; RuntimeError if it has overwritten x or has another shape."""
    versioned = isinstance(x, Tensor) and not torch.compiler.is_compiling() and not x.is_inference()
    version = x._version if versioned else 0
    added = branch(x)
    name = type(branch).__name__
    if versioned and x._version != version:
        raise RuntimeError(
            f"a branch of a reversible block ({name}) has overwritten its input of shape {tuple(x.shape)}, which the "
            "block needs; let its first layer leave its input as it is (norms of this package: inplace = False)"
        )
    if isinstance(x, Tensor) and added.shape != x.shape:
        raise RuntimeError(
            f"a branch of a reversible block ({name}) makes {tuple(added.shape)} of {tuple(x.shape)}; the shapes have "
            "to be equal"
        )
    return added


class ReversibleSequential(nn.Sequential):
    """Reversible blocks in order, of which backward keeps the output only, whatever their number (`run_chain`).

    ``blocks`` are `ReversibleBlock`s or other links of two tensors (`zoo.ops.reversible.Link`), or an OrderedDict of
    them; TypeError otherwise.  In a chain that reconstructs only a block's ``f`` and ``g`` are called, so that hooks of
    the block itself do not run.  The halves are those of the channels.

    ``store`` keeps what autograd keeps instead, for comparison.  ``meter`` is None or a function of the number of a
    block and the relative error of its input as found again: it is called in backward for each block, last one first,
    and costs the memory of the inputs.  Both may be set at any time.
    """

    def __init__(self, blocks: Iterable[nn.Module], *, store: bool = False) -> None:
        named = blocks if isinstance(blocks, OrderedDict) else {str(i): block for i, block in enumerate(blocks)}
        for name, block in named.items():
            if not (hasattr(block, "steps") or hasattr(block, "reverse")):
                raise TypeError(
                    f"block {name}, a {type(block).__name__}, cannot be undone; make it ReversibleBlock(f, g)"
                )
        super().__init__(OrderedDict(named))
        self.store = store
        self.meter: Meter | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the blocks' output for x of shape (N, C, ...), in a new tensor; ValueError for an odd C."""
        _check_channels(x)
        return self._run((_Halve(), *self, _Join()), self._meter(first=1), x)[0]

    def forward_pair(self, x1: Tensor, x2: Tensor) -> Pair:
        """Return the same for two halves; of blocks of your own, what they return (it may be one of the inputs)."""
        y1, y2 = self._run(tuple(self), self._meter(first=0), x1, x2)
        return y1, y2

    def _run(self, links: Sequence[Any], meter: Meter | None, *xs: Tensor) -> Tensors:
        return run_chain(links, *xs, store=self.store, meter=meter)

    def _meter(self, first: int) -> Meter | None:
        """Return the meter for a chain whose link ``first`` is the first block."""
        meter, num_blocks = self.meter, len(self)
        if meter is None:
            return None
        return lambda link, error: meter(link - first, error) if 0 <= link - first < num_blocks else None

    @torch.no_grad()
    def inverse(self, y: Tensor) -> Tensor:
        """Return the input that has output y, as precisely as rounding allows; moves no running statistics.

        In training mode norms take their statistics of the batch, which has to be the whole one.
        """
        _check_channels(y)
        halves = _halves(y)
        for block in reversed(list(self)):
            halves = block.inverse(*halves)  # type: ignore[operator]
        return torch.cat(halves, 1)


class _Halve:
    """The two halves of the channels."""

    def __call__(self, *xs: Tensor) -> Tensors:
        return _halves(xs[0])

    def modules(self) -> Iterable[nn.Module]:
        return ()

    def reverse(self, ys: Tensors, grads: Tensors, owned: bool) -> tuple[tuple[None], Tensors, Gradients]:
        return (None,), (torch.cat(grads, 1),), {}  # the chain's input, which nobody asks for


class _Join:
    """The two halves in one tensor, which is then the one thing that the chain and the next layer keep."""

    def __call__(self, *xs: Tensor) -> Tensors:
        return (torch.cat(xs, 1),)

    def modules(self) -> Iterable[nn.Module]:
        return ()

    def reverse(self, ys: Tensors, grads: Tensors, owned: bool) -> tuple[Tensors, Tensors, Gradients]:
        return _halves(ys[0]), _halves(grads[0]), {}


def _halves(x: Tensor) -> Pair:
    """Return the halves of the channels in x's memory format.

    Views would have other strides than the sums in the chain.  A recomputation that gets its input in another layout
    than forward adds up in another order, and half precision then rounds to other values.
    """
    if not isinstance(x, Tensor):  # a stand-in of torch.fx
        x1, x2 = x.chunk(2, 1)
        return x1, x2
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format)
    layout = last if x.is_contiguous(memory_format=last) and not x.is_contiguous() else torch.contiguous_format
    x1, x2 = (half.contiguous(memory_format=layout) for half in x.chunk(2, 1))
    return x1, x2


def _check_channels(x: Tensor) -> None:
    if isinstance(x, Tensor) and (x.dim() < 2 or x.shape[1] % 2):
        raise ValueError(
            f"reversible blocks halve the channels of (N, C, ...) and C has to be even, got {tuple(x.shape)}; give two "
            "halves of your own to forward_pair"
        )
