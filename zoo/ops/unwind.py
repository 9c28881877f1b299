"""Residual sums and maps that are not kept for backward but found again: by subtraction, or by computing them anew.

In a pre-activation network the sum before a block is the sum after it less what the block added, and that is one
convolution of a map which is kept anyway.  From the last sum of a stage all earlier ones follow, in the order in which
backward needs them.  The sum is formed in float32 (float64 for float64), so that half precision rounds it once and not
once per block; what rounding the last one loses is kept beside it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from zoo.ops.abn.backend import kernels_for
from zoo.ops.abn.functional import normalise
from zoo.ops.abn.kernels import NormSettings, accumulate_dtype
from zoo.ops.abn.norm_act_conv import Geometry, convolution_backward, convolution_dtype
from zoo.ops.abn.statistics import Statistics
from zoo.ops.recorded import without_autocast


class Convolution(NamedTuple):
    """How a convolution moves over its input, and in which dtype: under autocast in autocast's."""

    geometry: Geometry
    dtype: torch.dtype

    @classmethod
    def of(cls, conv: nn.Conv2d, z: Tensor) -> Convolution:
        """Return what ``conv`` does here to a map like z."""
        return cls(Geometry.of(conv), convolution_dtype(z))

    def __call__(self, z: Tensor, kernel: Tensor, offset: Tensor | None) -> Tensor:
        """Return the convolution of z in a new tensor, whatever autocast says here and now."""
        offset = None if offset is None else offset.to(self.dtype)
        with without_autocast(z.device.type):
            return F.conv2d(z.to(self.dtype), kernel.to(self.dtype), offset, *self.geometry)


class ResidualSum:
    """The sum of a stage: grows in forward, by `add`, and shrinks back in backward.

    Between the two only its last value is kept.  A value that some operation of forward saves, within `keeping`, is
    given back to it when it asks; it has to ask before backward goes on to the addition before.
    """

    def __init__(self, num_additions: int) -> None:
        self.num_additions = num_additions
        self.additions = 0
        self.total: Tensor | None = None

    def keeping(self, x: Tensor) -> AbstractContextManager[Any]:
        """Return a context in which x, the sum so far, is not saved; what there was before any addition is."""
        if self.additions == 0:
            return nullcontext()
        additions, dtype, is_x = self.additions, x.dtype, is_map_of(x)

        def earlier() -> Tensor:
            assert self.total is not None
            assert self.additions == additions
            return self.total.to(dtype)

        return saved_tensors_hooks(lambda saved: earlier if is_x(saved) else _Guarded(saved), _unpack)

    def add(self, z: Tensor, conv: nn.Conv2d, shortcut: Tensor, remade: Remade | None = None) -> Tensor:
        """Return the sum with the convolution of z added, in a new tensor; ``shortcut`` is the sum so far.

        z is kept for backward unless it is ``remade``.
        """
        self.additions += 1
        convolution = Convolution.of(conv, z)
        return _Add.apply(z, shortcut, conv.weight, conv.bias, convolution, self, self.additions, remade)


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        shortcut: Tensor,
        kernel: Tensor,
        offset: Tensor | None,
        convolution: Convolution,
        sums: ResidualSum,
        number: int,
        remade: Remade | None,
    ) -> Tensor:
        added = convolution(z, kernel, offset)
        if added.dtype == accumulate_dtype(added.dtype):
            x = total = added.add_(shortcut)
        else:
            before = shortcut.to(accumulate_dtype(added.dtype), copy=True) if sums.total is None else sums.total
            total = before.add_(added)
            x = total.to(added.dtype)
        is_rounded, is_last = x is not total, number == sums.num_additions
        sums.total = total if is_rounded and not is_last else None
        lost = (total - x).to(x.dtype) if is_rounded and is_last else None
        ctx.remade = None if remade is None or not z.requires_grad else remade.reader()
        kept = z if ctx.remade is None else None
        ctx.save_for_backward(kept, kernel, offset, x if is_last and number > 1 else None, lost)
        ctx.convolution, ctx.sums, ctx.number = convolution, sums, number
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        z, kernel, offset, x, lost = ctx.saved_tensors
        sums, convolution = ctx.sums, ctx.convolution
        z = z if ctx.remade is None else ctx.remade().read()
        if x is not None:  # the last sum, which is left as it is
            sums.total = x.to(accumulate_dtype(x.dtype), copy=True)
            sums.total = sums.total if lost is None else sums.total.add_(lost)
        sums.additions = ctx.number - 1
        sums.total = sums.total.sub_(convolution(z, kernel, offset)) if sums.additions else None
        needed = [ctx.needs_input_grad[0], *ctx.needs_input_grad[2:4]]
        geometry, dtype = convolution
        dz, dkernel, doffset = convolution_backward(dx, z, kernel, offset, geometry, dtype, needed)
        return dz, dx, dkernel, doffset, None, None, None, None


def redone_norm(
    source: Tensor, conv: nn.Conv2d | None, x: Tensor, statistics: Statistics, form: NormSettings
) -> tuple[Tensor, Remade]:
    """Return z = f(norm(x)), and what backward gets it from: it is computed again from ``source``.

    x is ``conv(source)`` and overwritten, or without ``conv`` it is the source and left as it is.  Both times the norm
    takes the same ``statistics``.  Raises RuntimeError in backward if the source has been modified.
    """
    kept = _Guarded(source.detach())
    if conv is not None:
        convolution = Convolution.of(conv, source)
        kernel, offset = _Guarded(conv.weight), None if conv.bias is None else _Guarded(conv.bias)

    def make() -> Tensor:
        x = kept()
        if conv is None:
            return kernels_for(x).apply(x, statistics.mean, statistics.var, form)
        z = convolution(x, kernel(), None if offset is None else offset())
        kernels_for(z).apply_(z, statistics.mean, statistics.var, form)
        return z

    remade = Remade(make)
    with remade.instead_of(lambda saved: saved.dim() > 1):  # the rest are vectors
        z = normalise(x, statistics, form, inplace=conv is not None)
    return z, remade


class Remade:
    """A map that its readers in backward get from ``make``, which runs for the first of them.

    It lives as long as autograd keeps it for one of them.
    """

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self.make = make
        self.num_readers = self.num_reads = 0
        self.value: Tensor | None = None

    def instead_of(self, is_map: Callable[[Tensor], bool]) -> AbstractContextManager[Any]:
        """Return a context in which this is saved instead of the map."""

        def pack(saved: Tensor) -> Any:
            if not is_map(saved):
                return _Guarded(saved)
            self.num_readers += 1
            return self.read

        return saved_tensors_hooks(pack, _unpack)

    def reader(self) -> weakref.ref[Remade]:
        """Count one more reader; return a reference that does not keep the map's source alive."""
        self.num_readers += 1
        return weakref.ref(self)

    @torch.no_grad()
    def read(self) -> Tensor:
        """Return the map; the last reader's is no longer held."""
        value = self.make() if self.value is None else self.value
        self.num_reads = (self.num_reads + 1) % self.num_readers
        self.value = value if self.num_reads else None
        return value


class _Guarded:
    """A tensor that must not be modified until it is asked for; torch itself does not look where hooks have saved."""

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


def is_map_of(x: Tensor) -> Callable[[Tensor], bool]:
    """Return the function that recognises x; it does not hold it, as what autograd saves holds its hooks."""
    storage, shape = x.untyped_storage()._cdata, x.shape
    return lambda saved: saved.shape == shape and saved.untyped_storage()._cdata == storage
