"""Reversible blocks and chains of them: y1 = x1 + f(x2), y2 = x2 + g(y1) (Gomez et al. 2017).

The inverse is x2 = y2 - g(y1), x1 = y1 - f(x2), for any functions f and g; x1 and x2 are the halves of the channels.
`zoo.layers.invertible` has layers that are invertible themselves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call

from zoo.ops.chain import ErrorCallback, Gradients, Link, Tensors, run_chain, storage_ids
from zoo.ops.context import is_fx_proxy
from zoo.ops.grid import round_to_grid, sum_on_grid, with_standard_strides
from zoo.ops.inverse import channel_pool, channel_unpool, halves
from zoo.ops.pooling import memory_format_of
from zoo.ops.recomputation import pause_statistics
from zoo.torch_internals.data import has_backward_hooks, leaves_of
from zoo.torch_internals.dispatch import are_transforms_active

torch.fx.wrap("round_to_grid")

TensorPair = tuple[Tensor, Tensor]


class ReversibleBlock(nn.Module):
    """Additive coupling of two halves: y1 = x1 + f(x2), y2 = x2 + g(y1).

    Args:
    - `f`, `g`: modules whose output has the shape of their input. They must not overwrite the input: set
      ``inplace = False`` on a leading `InPlaceABN`. The output may depend only on the input, parameters, buffers and
      attributes. Buffers that forward changes, and attributes that it assigns, have their old values in the
      recomputation (`zoo.ops.recomputation`); lists and other objects that it changes do not. The modules' hooks also
      run in the recomputation.
    - `grid_bits`: round what f and g return to multiples of 2^-grid_bits, see `ReversibleSequential`.

    Raises RuntimeError if f or g overwrites its input or changes its shape, and in backward if it depends on another
    tensor that needs gradients.

    Source: Gomez et al., The Reversible Residual Network, 2017, equations 6 to 8.
    """

    def __init__(self, f: nn.Module, g: nn.Module, *, grid_bits: int | None = None) -> None:
        super().__init__()
        self.f = f
        self.g = g
        self.grid_bits = grid_bits

    def forward(self, x1: Tensor, x2: Tensor) -> TensorPair:
        """Return (y1, y2) in new tensors."""
        y1 = x1 + _run_branch(self.f, x2, self.grid_bits)
        return y1, x2 + _run_branch(self.g, y1, self.grid_bits)

    @torch.no_grad()
    def inverse(self, y1: Tensor, y2: Tensor) -> TensorPair:
        """Return (x1, x2) in new tensors; does not update running statistics."""
        with pause_statistics(self):
            x2 = y2 - _run_branch(self.g, y1, self.grid_bits)
            return y1 - _run_branch(self.f, x2, self.grid_bits), x2

    def as_links(self) -> tuple[StreamAddition, StreamAddition]:
        """Return the additions of f and g as separate links of a chain; f draws its random numbers before g."""
        return StreamAddition(self.f, 1, 0, self.grid_bits), StreamAddition(self.g, 0, 1, self.grid_bits)


class StreamAddition:
    """Link over any number of streams: adds the branch's output for the stream ``source`` to the stream ``target``.

    The branch may change the shape of the source to the shape of the target.
    """

    def __init__(self, branch: nn.Module, source: int, target: int, grid_bits: int | None) -> None:
        self.branch, self.source, self.target, self.grid_bits = branch, source, target, grid_bits
        self.summary: Tensor | None = None

    def __call__(self, *xs: Tensor) -> Tensors:
        """Return all streams; only the target is a new tensor."""
        source, x = xs[self.source], xs[self.target]
        if self.grid_bits is None or is_fx_proxy(x) or torch.is_grad_enabled() or are_transforms_active():
            y = x + _run_branch(self.branch, source, self.grid_bits, target=x)
        else:
            y, self.summary = sum_on_grid(x, _run_branch(self.branch, source, None, target=x), self.grid_bits)
        return replace_stream(xs, self.target, y)

    def modules(self) -> Iterable[nn.Module]:
        """Return the modules of the branch."""
        return self.branch.modules()

    def reverse(self, ys: Tensors, grads: Tensors, may_overwrite: bool) -> tuple[Tensors, Tensors, Gradients]:
        """Return the streams before the addition, their gradients, and the gradients of the branch's parameters."""
        x, (dsource,), gradients, self.summary = subtract_branch(
            self.branch,
            (ys[self.source],),
            ys[self.target],
            (grads[self.source],),
            grads[self.target],
            may_overwrite,
            self.grid_bits,
        )
        return replace_stream(ys, self.target, x), replace_stream(grads, self.source, dsource), gradients


class LinkedModule(nn.Module):
    """Base class of modules that consist of several links of a chain."""

    grid_bits: int | None = None

    def as_links(self) -> Sequence[Any]:
        """Return the links of one run."""
        raise NotImplementedError

    def forward(self, *xs: Tensor) -> Tensors:
        """Return the streams after all links."""
        for link in self.as_links():
            xs = link(*xs)
        return xs


def replace_stream(streams: Tensors, index: int, stream: Tensor) -> Tensors:
    """Return the streams with ``stream`` at ``index``."""
    return (*streams[:index], stream, *streams[index + 1 :])


def subtract_branch(
    branch: nn.Module,
    sources: Tensors,
    y: Tensor,
    dsources: Tensors,
    dy: Tensor,
    may_overwrite: bool,
    grid_bits: int | None,
) -> tuple[Tensor, Tensors, Gradients, Tensor | None]:
    """Invert y = x + branch(*sources); return x, the gradients of sources and parameters, and a summary of x.

    Called for g and then for f, this is Algorithm 1 of Gomez et al. 2017: x2 = y2 - g(y1), x1 = y1 - f(x2).
    Parameters without a gradient are omitted. The branch's norms do not update their running statistics.

    Args:
    - `dy`: gradient of y, which is also the gradient of x.
    - `dsources`: gradients of the sources without the branch's contribution.
    - `may_overwrite`: overwrite y and dsources.
    - `grid_bits`: round the branch's output to the grid before it is subtracted, as before it was added.
    """
    trained: dict[str, Tensor] = {name: p for name, p in branch.named_parameters() if p.requires_grad}
    parameters = trained
    if any(map(has_backward_hooks, trained.values())):
        # Autograd runs these hooks on the gradients that the chain returns; they must not run twice.
        parameters = {name: p.detach().requires_grad_() for name, p in trained.items()}
    leaves = tuple(source.detach().requires_grad_() for source in sources)
    with pause_statistics(branch):
        with torch.enable_grad():
            added = branch(*leaves) if parameters is trained else functional_call(branch, parameters, leaves)
        _check_leaves(branch, added, (*leaves, *parameters.values()))
        graph = get_gradient_edge(added) if added.requires_grad else None
        added, out, summary = added.detach(), y if may_overwrite else None, None
        if grid_bits is None:
            x = torch.sub(y, added, out=out)
        else:
            x, summary = sum_on_grid(y, added, grid_bits, subtract=True, out=out)
            dy = with_standard_strides(dy)  # as in the backward of `round_to_grid` with stored activations
        del added  # frees its memory before the backward pass of the branch
        if graph is None:
            return x, dsources, {}, summary
        gradients = torch.autograd.grad((graph,), (*leaves, *parameters.values()), (dy,), allow_unused=True)
    dleaves, dparameters = gradients[: len(leaves)], gradients[len(leaves) :]
    del gradients
    dsources = tuple(
        dsource if dx is None else dsource.add_(dx) if may_overwrite else dsource + dx
        for dsource, dx in zip(dsources, dleaves, strict=True)
    )
    found = {p: dp for p, dp in zip(trained.values(), dparameters, strict=True) if dp is not None}
    # The gradient of a parameter that is added to the output is dy itself, which the next link may overwrite.
    storage_of_dy = storage_ids((dy,))
    found = {p: dp.clone() if storage_ids((dp,)) == storage_of_dy else dp for p, dp in found.items()}
    return x, dsources, found, summary


def _check_leaves(branch: nn.Module, output: Tensor, known: Iterable[Tensor]) -> None:
    """Raise RuntimeError if the output depends on leaves other than ``known``: their gradients would be lost."""
    ids = set(map(id, known))
    for leaf in leaves_of(output):
        if id(leaf) not in ids:
            raise RuntimeError(
                f"the branch {type(branch).__name__} of a reversible block depends on a tensor of shape "
                f"{tuple(leaf.shape)} that needs gradients and is neither the input of the branch nor one of its "
                "parameters, so that its gradient would be lost; give the branch a detached tensor, register the "
                "parameter in the branch, or set store=True on the chain"
            )


def _on_grid(x: Tensor, grid_bits: int | None) -> Tensor:
    return x if grid_bits is None else round_to_grid(x, grid_bits)


def _run_branch(branch: nn.Module, x: Tensor, grid_bits: int | None, target: Tensor | None = None) -> Tensor:
    """Run the branch on x and round its output to the grid.

    Raises RuntimeError if the branch overwrites x, or if its output does not have the shape of ``target`` (default: x).
    """
    if is_fx_proxy(x):
        return _on_grid(branch(x), grid_bits)
    versioned = not torch.compiler.is_compiling() and not x.is_inference()
    version = x._version if versioned else 0
    added = branch(x)
    name = type(branch).__name__
    if versioned and x._version != version:
        raise RuntimeError(
            f"a branch of a reversible block ({name}) overwrote its input of shape {tuple(x.shape)}, which the block "
            "needs; make its first layer out-of-place (norms of this package: inplace = False)"
        )
    shape = x.shape if target is None else target.shape
    if added.shape != shape:
        raise RuntimeError(
            f"a branch of a reversible block ({name}) maps shape {tuple(x.shape)} to {tuple(added.shape)}; its output "
            f"must have the shape of the stream that it is added to, {tuple(shape)}"
        )
    return _on_grid(added, grid_bits)


class PairPool(nn.Module):
    """Channel pooling of each half, (N, C, H, W) -> (N, 4 C, H/2, W/2), see `zoo.ops.inverse.channel_pool`."""

    grid_bits: int | None = None  # on any grid: pooling only moves values

    def forward(self, x1: Tensor, x2: Tensor) -> TensorPair:
        """Return the pooled halves in new tensors."""
        return channel_pool(x1), channel_pool(x2)

    def inverse(self, y1: Tensor, y2: Tensor) -> TensorPair:
        """Return the halves before pooling in new tensors."""
        return channel_unpool(y1), channel_unpool(y2)

    def reverse(
        self, ys: Tensors, grads: Tensors, may_overwrite: bool, layouts: Sequence[torch.memory_format]
    ) -> tuple[TensorPair, TensorPair, Gradients]:
        """Return inputs, in these layouts, and their gradients in new tensors; there are no parameters."""
        x1, x2 = (channel_unpool(y).to(memory_format=layout) for y, layout in zip(ys, layouts, strict=True))
        return (x1, x2), self.inverse(*grads), {}

    def as_links(self) -> tuple[PoolingCall]:
        """Return a link for one call."""
        return (PoolingCall(self),)


class ShiftBlock(nn.Module):
    """The block of i-RevNets: (x1, x2) -> (x2, x1 + branch(x2)), with channel pooling of x1 and x2 for ``stride`` 2.

    Args:
    - `branch`: reads x2 before pooling, and applies the stride itself.
    - `stride`: 1 or 2.
    - `grid_bits`: round the branch's output to multiples of 2^-grid_bits, see `ReversibleSequential`.

    Source: Jacobsen et al., i-RevNet, ICLR 2018.
    """

    def __init__(self, branch: nn.Module, stride: int, *, grid_bits: int | None = None) -> None:
        super().__init__()
        self.branch = branch
        self.stride = stride
        self.grid_bits = grid_bits

    def forward(self, x1: Tensor, x2: Tensor) -> TensorPair:
        """Return (y1, y2)."""
        return self._pool(x2), self._pool(x1) + _on_grid(self.branch(x2), self.grid_bits)

    @torch.no_grad()
    def inverse(self, y1: Tensor, y2: Tensor) -> TensorPair:
        """Return (x1, x2); does not update running statistics."""
        with pause_statistics(self):
            x2 = self._unpool(y1)
            return self._unpool(y2 - _on_grid(self.branch(x2), self.grid_bits)), x2

    def reverse(
        self, ys: Tensors, grads: Tensors, may_overwrite: bool, layouts: Sequence[torch.memory_format]
    ) -> tuple[TensorPair, TensorPair, Gradients]:
        """Return inputs, after pooling in these layouts, and the gradients of inputs and parameters.

        Overwrites y2 if ``may_overwrite``.
        """
        x2, dx2 = self._unpool(ys[0], layouts[1]), self._unpool(grads[0])
        x1, (dx2,), gradients, _ = subtract_branch(
            self.branch, (x2,), ys[1], (dx2,), grads[1], may_overwrite, self.grid_bits
        )
        return (self._unpool(x1, layouts[0]), x2), (self._unpool(grads[1]), dx2), gradients

    def as_links(self) -> tuple[PoolingCall]:
        """Return a link for one call."""
        return (PoolingCall(self),)

    def _pool(self, x: Tensor) -> Tensor:
        return channel_pool(x) if self.stride == 2 else x

    def _unpool(self, y: Tensor, layout: torch.memory_format = torch.preserve_format) -> Tensor:
        return channel_unpool(y).to(memory_format=layout) if self.stride == 2 else y


class PoolingCall:
    """Link for one call of a block that may pool; reconstructs the inputs in their original memory formats.

    Pools return contiguous maps, so their inverse does not know the format. A convolution that runs again on an input
    in another format sums in another order.
    """

    def __init__(self, block: PairPool | ShiftBlock) -> None:
        self.block = block
        self.layouts: list[torch.memory_format] = []

    def __call__(self, *xs: Tensor) -> TensorPair:
        """Return the outputs of the block."""
        self.layouts = [memory_format_of(x) for x in xs]
        return self.block(*xs)

    def modules(self) -> Iterable[nn.Module]:
        """Return the modules of the block."""
        return self.block.modules()

    def reverse(self, ys: Tensors, grads: Tensors, may_overwrite: bool) -> tuple[TensorPair, TensorPair, Gradients]:
        """Return the inputs, their gradients, and the gradients of the parameters."""
        return self.block.reverse(ys, grads, may_overwrite, self.layouts)


class ReversibleSequential(nn.Sequential):
    """Sequence of reversible blocks; saves only the output of the last block for backward, at any depth (`run_chain`).

    The two halves are halves of the channels. Unless ``store`` is set, only ``f`` and ``g`` of a block are called, so
    hooks on the block itself do not run.

    Args:
    - `blocks`: `ReversibleBlock`s or other links of two tensors (`zoo.ops.chain.Link`), or an OrderedDict of them.
    - `store`: save activations like autograd, for comparison. May be set at any time.
    - `grid_bits`: k from 0 to 22 rounds the halves to multiples of 2^-k, in all ``blocks``. The halves that backward
      reconstructs are then bit-identical to stored halves, if their absolute values are below 2^(24 - k) in float32.
      Backward compares digests, and raises VerificationError if one differs. None, as in the papers: reconstructed
      halves have rounding errors.

    Attributes:
    - `meter`: None, or a function of the index of a block and the relative error of its reconstructed input. Called in
      backward for each block, last one first; stores the inputs of all blocks. May be set at any time.

    Raises TypeError for a block that cannot be inverted.
    """

    def __init__(self, blocks: Iterable[nn.Module], *, store: bool = False, grid_bits: int | None = None) -> None:
        named = blocks if isinstance(blocks, OrderedDict) else {str(i): block for i, block in enumerate(blocks)}
        for name, block in named.items():
            if not (hasattr(block, "as_links") or hasattr(block, "reverse")):
                raise TypeError(
                    f"block {name}, a {type(block).__name__}, cannot be inverted; make it ReversibleBlock(f, g)"
                )
            if grid_bits is not None and hasattr(block, "grid_bits"):
                block.grid_bits = grid_bits
        super().__init__(OrderedDict(named))
        self.store = store
        self.grid_bits = grid_bits
        self.meter: ErrorCallback | None = None

    def forward(self, x: Tensor | TensorPair) -> Tensor:
        """Return the output in a new tensor, for x of shape (N, C, ...) or the pair of its halves.

        Raises ValueError for an odd C.
        """
        if isinstance(x, tuple):
            return self._run((*self, _Join()), *x)[0]
        _check_channels(x)
        return self._run((_Halve(), *self, _Join()), x)[0]

    def _run(self, links: tuple[Any, ...], *xs: Tensor) -> Tensors:
        return run_chain(links, *xs, store=self.store, meter=self.meter, grid_bits=self.grid_bits)

    @torch.no_grad()
    def inverse(self, y: Tensor) -> Tensor:
        """Return the input for the output y: exactly with a grid, otherwise up to rounding.

        Does not update running statistics. In training mode norms use batch statistics, so y must be the output for the
        whole batch.
        """
        _check_channels(y)
        pair = halves_in_layout(y)
        for block in reversed(list(self)):
            pair = block.inverse(*pair)  # type: ignore[operator]
        return torch.cat(pair, 1)


class _Halve(Link):
    """First link of a chain: splits the channels into two halves."""

    is_end = True

    def __call__(self, *xs: Tensor) -> TensorPair:
        return halves_in_layout(xs[0])

    def reverse(self, ys: Tensors, grads: Tensors, may_overwrite: bool) -> tuple[tuple[None], Tensors, Gradients]:
        return (None,), (torch.cat(grads, 1),), {}  # nothing needs the chain's input


class _Join(Link):
    """Last link of a chain: concatenates the halves, so that the chain and the next layer save one and the same tensor.

    In backward it splits only the gradient. The link before it, `_HalveOutput`, splits the output after autograd has
    released the gradient, so that two copies of both never exist at the same time.
    """

    is_end = True

    def __call__(self, *xs: Tensor) -> Tensor:
        return torch.cat(xs, 1)

    def as_links(self) -> tuple[_HalveOutput, _Join]:
        return _HalveOutput(), self

    def reverse(self, ys: Tensors, grads: Tensors, may_overwrite: bool) -> tuple[Tensors, TensorPair, Gradients]:
        return ys, halves_in_layout(grads[0]), {}


class _HalveOutput(Link):
    """Link before `_Join`: the identity in forward; splits the output in backward."""

    def __call__(self, *xs: Tensor) -> Tensors:
        return xs

    def reverse(self, ys: Tensors, grads: Tensors, may_overwrite: bool) -> tuple[TensorPair, Tensors, Gradients]:
        return halves_in_layout(ys[0]), grads, {}


def halves_in_layout(x: Tensor) -> TensorPair:
    """Return copies of the halves of the channels, in the memory format of x.

    Views would have other strides than the sums in the chain, and a recomputation on an input in another layout sums in
    another order and rounds differently in half precision.
    """
    if is_fx_proxy(x):
        return halves(x)
    layout = memory_format_of(x)
    x1, x2 = (half.contiguous(memory_format=layout) for half in halves(x))
    return x1, x2


def _check_channels(x: Tensor) -> None:
    if not is_fx_proxy(x) and (x.dim() < 2 or x.shape[1] % 2):
        raise ValueError(
            f"reversible blocks split (N, C, ...) into halves and need an even C, got shape {tuple(x.shape)}; pass a "
            "pair of halves of your own"
        )
