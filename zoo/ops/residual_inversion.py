"""Inverts residual sums by subtraction in backward, and recomputes norm outputs, instead of saving both.

In a pre-activation network, the sum before a block is the sum after it minus the block's output, which is one
convolution of a saved map. All earlier sums of a stage follow from the last one, in the order in which backward needs
them. Sums are accumulated in float32 (float64 for float64), so half precision rounds once per stage instead of once per
block. The rounding error of the last sum is saved with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from zoo.ops.abn.backend import kernels_for
from zoo.ops.abn.functional import normalise
from zoo.ops.abn.kernels import NormSettings, accumulate_dtype
from zoo.ops.abn.statistics import Statistics
from zoo.ops.convolution import Convolution
from zoo.torch_internals import storage_id


class ResidualSum:
    """The residual sum of a stage, which grows in forward, by `add`, and shrinks again in backward.

    Between forward and backward only its last value is kept. Within `saved_instead_of`, an operation of forward that
    would save an earlier value gets it from here in backward; it has to ask before backward undoes the next addition.

    Args:
    - `num_additions`: number of calls of `add` in forward.
    """

    def __init__(self, num_additions: int) -> None:
        self.num_additions = num_additions
        self.additions = 0
        self.total: Tensor | None = None

    def saved_instead_of(self, x: Tensor) -> AbstractContextManager[Any]:
        """Return a context in which operations do not save the present sum x, but ask for it here in backward.

        Before the first addition they save x itself.
        """
        if self.additions == 0:
            return nullcontext()
        additions, dtype, is_x = self.additions, x.dtype, is_same_as(x)

        def total_of_then() -> Tensor:
            assert self.total is not None
            assert self.additions == additions
            return self.total.to(dtype)

        return saved_tensors_hooks(lambda saved: total_of_then if is_x(saved) else _Unmodified(saved), _unpack)

    def add(self, z: Tensor, conv: nn.Conv2d, shortcut: Tensor, recomputed_z: Recomputed | None = None) -> Tensor:
        """Return the sum with the convolution of z added, in a new tensor; ``shortcut`` is the sum so far.

        z is kept for backward, unless ``recomputed_z`` provides it.
        """
        self.additions += 1
        convolution = Convolution.of(conv, z)
        return _Add.apply(z, shortcut, conv.weight, conv.bias, convolution, self, self.additions, recomputed_z)


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        shortcut: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        convolution: Convolution,
        sums: ResidualSum,
        number: int,
        recomputed_z: Recomputed | None,
    ) -> Tensor:
        added = convolution(z, weight, bias)
        if added.dtype == accumulate_dtype(added.dtype):
            x = total = added.add_(shortcut)
        else:
            before = shortcut.to(accumulate_dtype(added.dtype), copy=True) if sums.total is None else sums.total
            total = before.add_(added)
            x = total.to(added.dtype)
        is_rounded, is_last = x is not total, number == sums.num_additions
        sums.total = total if is_rounded and not is_last else None
        lost = (total - x).to(x.dtype) if is_rounded and is_last else None
        ctx.recomputed_z = None if recomputed_z is None or not z.requires_grad else recomputed_z.add_reader()
        last_sum = x if is_last and number > 1 else None
        ctx.save_for_backward(z if ctx.recomputed_z is None else None, weight, bias, last_sum, lost)
        ctx.convolution, ctx.sums, ctx.number = convolution, sums, number
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        z, weight, bias, last_sum, lost = ctx.saved_tensors
        sums, convolution = ctx.sums, ctx.convolution
        z = z if ctx.recomputed_z is None else ctx.recomputed_z().read()
        if last_sum is not None:  # the stage's output, which others may still read
            sums.total = last_sum.to(accumulate_dtype(last_sum.dtype), copy=True)
            sums.total = sums.total if lost is None else sums.total.add_(lost)
        sums.additions = ctx.number - 1
        sums.total = sums.total.sub_(convolution(z, weight, bias)) if sums.additions else None
        needed = [ctx.needs_input_grad[0], *ctx.needs_input_grad[2:4]]
        dz, dweight, dbias = convolution.backward(dx, z, weight, bias, needed)
        return dz, dx, dweight, dbias, None, None, None, None


def recomputed_norm(
    source: Tensor, conv: nn.Conv2d | None, x: Tensor, statistics: Statistics, settings: NormSettings
) -> tuple[Tensor, Recomputed]:
    """Return z = f(norm(x)), and a `Recomputed` that computes z again from ``source`` in backward.

    z is not kept.

    x is ``conv(source)`` and overwritten, or without ``conv`` it is the source and left as it is. The norm takes the
    same ``statistics`` both times. Raises RuntimeError in backward if the source has been modified.
    """
    unmodified = _Unmodified(source.detach())
    if conv is not None:
        convolution = Convolution.of(conv, source)
        weight, bias = _Unmodified(conv.weight), None if conv.bias is None else _Unmodified(conv.bias)

    def compute() -> Tensor:
        x = unmodified()
        if conv is None:
            return kernels_for(x).apply(x, statistics.mean, statistics.var, settings)
        z = convolution(x, weight(), None if bias is None else bias())
        kernels_for(z).apply_(z, statistics.mean, statistics.var, settings)
        return z

    recomputed = Recomputed(compute)
    with recomputed.saved_instead_of(lambda saved: saved.dim() > 1):  # the other tensors are vectors
        z = normalise(x, statistics, settings, inplace=conv is not None)
    return z, recomputed


class Recomputed:
    """A tensor that is not kept: in backward ``compute`` makes it for its first reader, and the others get the same.

    Autograd keeps this object alive as long as an operation that saved it in place of the tensor.
    """

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self.compute = compute
        self.num_readers = self.num_reads = 0
        self.value: Tensor | None = None

    def saved_instead_of(self, is_tensor: Callable[[Tensor], bool]) -> AbstractContextManager[Any]:
        """Return a context in which operations save this instead of the tensor that ``is_tensor`` recognises."""

        def pack(saved: Tensor) -> Any:
            if not is_tensor(saved):
                return _Unmodified(saved)
            self.num_readers += 1
            return self.read

        return saved_tensors_hooks(pack, _unpack)

    def add_reader(self) -> weakref.ref[Recomputed]:
        """Count one more reader; return a reference that does not keep the tensor's source alive."""
        self.num_readers += 1
        return weakref.ref(self)

    @torch.no_grad()
    def read(self) -> Tensor:
        """Return the tensor, and release it after the last reader."""
        value = self.compute() if self.value is None else self.value
        self.num_reads = (self.num_reads + 1) % self.num_readers
        self.value = value if self.num_reads else None
        return value


class _Unmodified:
    """A saved tensor that must not be modified before backward reads it; torch does not check what hooks save."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version

    def __call__(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} that backward needs has been modified by an inplace "
                f"operation (it is at version {self.tensor._version}, expected was version {self.version}); clone it "
                "before"
            )
        return self.tensor


def _unpack(packed: Callable[[], Tensor]) -> Tensor:
    return packed()


def is_same_as(x: Tensor) -> Callable[[Tensor], bool]:
    """Return the function that recognises x among saved tensors; it does not hold x, which would keep it alive."""
    storage, shape = storage_id(x.untyped_storage()), x.shape
    return lambda saved: saved.shape == shape and storage_id(saved.untyped_storage()) == storage
