"""The kernels for CUDA, in Triton; the formulas are those of reference.py, the code on the device is triton_kernels.py.

Contiguous and channels_last tensors are computed as they are, with any number of elements; anything else goes through
one contiguous copy per tensor. A result per channel is reduced in two stages, partial results in a fixed split and
their combination in a fixed order, without atomic operations, so that runs repeat bit for bit. Nothing waits for the
device, and memory comes from torch, so that CUDA graphs can record the kernels (after a first call, which compiles).

How a tensor is cut into tiles depends on its shape alone; nothing is tuned at run time. A tile has 2048 elements, 16
per thread of 4 warps. It is as wide as possible with at most a quarter of its lanes unused: up to 128 channels, or 1024
positions of one channel. The reductions start about 1024 programs and the other two kernels about 4096, in view of 132
processors (H100) that hold 4 to 8 each. Their speed was not measured.

The kernels are registered as operators (zoo_triton::) that torch.compile does not look into. There is nothing to fuse
them with, and so a compiled network runs the same kernels as any other.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.ops.abn.kernels import Means, NormSettings, accumulate_dtype

TILE = 2048
WARPS = 4
REDUCING_PROGRAMS = 1024
ELEMENTWISE_PROGRAMS = 4096
COMBINED_SPLITS = 256  # the number of splits that a program combines at a time

backward = None
track_statistics = None
forward_ = None


@functools.cache
def why_not() -> str | None:
    """Return why the kernels cannot be used, None where they can."""
    if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
        return None  # they will not run here, and importing Triton takes longer than importing all of zoo
    try:
        import zoo.ops.abn.triton_kernels  # noqa: F401
    except ImportError as error:
        return f"triton is not installed: {error}"
    return None


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance per channel, shape (C,); zeros for a tensor without elements."""
    mean, var = torch.ops.zoo_triton.statistics(x)
    return mean, var


def apply(x: Tensor, mean: Tensor, var: Tensor, settings: NormSettings, shortcut: Tensor | None = None) -> Tensor:
    """Return z in a new tensor of the dtype and strides of x."""
    z: Tensor = torch.ops.zoo_triton.apply(x, mean, var, shortcut, *settings)
    return z


def apply_(x: Tensor, mean: Tensor, var: Tensor, settings: NormSettings, shortcut: Tensor | None = None) -> None:
    """Overwrite x with z."""
    torch.ops.zoo_triton.apply_(x, mean, var, shortcut, *settings)


def backward_reduce(
    z: Tensor, dz: Tensor, settings: NormSettings, shortcut: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return sum(dy) and sum(dy x_hat) per channel, shape (C,), in the accumulation dtype."""
    sum_dy, sum_dy_xhat = torch.ops.zoo_triton.backward_reduce(z, dz, shortcut, *settings)
    return sum_dy, sum_dy_xhat


def backward_apply(
    z: Tensor, dz: Tensor, var: Tensor, means: Means, settings: NormSettings, shortcut: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return dx and, with a shortcut, its gradient dy, in new tensors."""
    mean_dy, mean_dy_xhat = means if means is not None else (None, None)
    dx, dshortcut = torch.ops.zoo_triton.backward_apply(z, dz, var, mean_dy, mean_dy_xhat, shortcut, *settings)
    return dx, None if shortcut is None else dshortcut


# The last arguments of the operators: the shortcut and the fields of NormSettings.
SETTINGS = "Tensor? shortcut, Tensor? weight, Tensor? bias, float eps, str activation, float activation_param"
_library = torch.library.Library("zoo_triton", "FRAGMENT")


def _operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], None]:
    """Register a function as an operator without autograd; ``fake`` returns results without values."""

    def register(function: Callable[..., Any]) -> None:
        name = schema.partition("(")[0]
        # With flexible_layout the operators take any layout. Without it the compiler copies the channels_last outputs
        # of convolutions.
        tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
        _library.define(schema, tags=tags)
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"zoo_triton::{name}", fake, lib=_library)

    return register


def _two_vectors(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = accumulate_dtype(x.dtype)
    return x.new_empty(x.shape[1], dtype=dtype), x.new_empty(x.shape[1], dtype=dtype)


def _like_shortcut(z: Tensor, shortcut: Tensor | None) -> Tensor:
    """Return an uninitialised tensor for the gradient of the shortcut; without a shortcut it has no elements."""
    return z.new_empty(0) if shortcut is None else torch.empty_like(z)


@_operator("statistics(Tensor x) -> (Tensor, Tensor)", _two_vectors)
def _run_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.numel() == 0:
        mean, var = _two_vectors(x)
        return mean.zero_(), var.zero_()
    x = _dense(x)
    tiling = tiling_of(x, REDUCING_PROGRAMS)
    partial = _partial(x, tiling, 3)
    _launch("statistics", x, tiling, x, *partial)
    return _combine("combine_statistics", partial)


@_operator(f"apply(Tensor x, Tensor mean, Tensor var, {SETTINGS}) -> Tensor", lambda x, *_: torch.empty_like(x))
def _run_apply(x: Tensor, mean: Tensor, var: Tensor, shortcut: Tensor | None, *fields: Any) -> Tensor:
    dense = _dense(x)
    z = torch.empty_like(dense)
    _launch_apply(dense, z, mean, var, NormSettings(*fields), shortcut)
    return _restored(z, x, dense)


@_operator(f"apply_(Tensor(a!) x, Tensor mean, Tensor var, {SETTINGS}) -> ()", lambda *_: None)
def _run_apply_(x: Tensor, mean: Tensor, var: Tensor, shortcut: Tensor | None, *fields: Any) -> None:
    dense = _dense(x)
    _launch_apply(dense, dense, mean, var, NormSettings(*fields), shortcut)
    if dense is not x:
        x.copy_(dense)


def _launch_apply(
    x: Tensor, z: Tensor, mean: Tensor, var: Tensor, settings: NormSettings, shortcut: Tensor | None
) -> None:
    if x.numel():
        tensors = x, z, _laid_out(shortcut, x), *map(_vector, (mean, var, settings.weight, settings.bias))
        _launch("apply", x, tiling_of(x, ELEMENTWISE_PROGRAMS), *tensors, **_constants(settings))


@_operator(f"backward_reduce(Tensor z, Tensor dz, {SETTINGS}) -> (Tensor, Tensor)", _two_vectors)
def _run_backward_reduce(z: Tensor, dz: Tensor, shortcut: Tensor | None, *fields: Any) -> tuple[Tensor, Tensor]:
    if z.numel() == 0:
        sum_dy, sum_dy_xhat = _two_vectors(z)
        return sum_dy.zero_(), sum_dy_xhat.zero_()
    settings = NormSettings(*fields)
    z = _dense(z)
    tiling = tiling_of(z, REDUCING_PROGRAMS)
    partial = _partial(z, tiling, 2)
    vectors = _vector(settings.weight), _vector(settings.bias)
    tensors = z, _laid_out(dz, z), _laid_out(shortcut, z), *vectors, *partial
    _launch("backward_reduce", z, tiling, *tensors, **_constants(settings, z))
    return _combine("combine_sums", partial)


@_operator(
    f"backward_apply(Tensor z, Tensor dz, Tensor var, Tensor? mean_dy, Tensor? mean_dy_xhat, {SETTINGS})"
    " -> (Tensor, Tensor)",
    lambda z, dz, var, mean_dy, mean_dy_xhat, shortcut, *_: (torch.empty_like(z), _like_shortcut(z, shortcut)),
)
def _run_backward_apply(
    z: Tensor,
    dz: Tensor,
    var: Tensor,
    mean_dy: Tensor | None,
    mean_dy_xhat: Tensor | None,
    shortcut: Tensor | None,
    *fields: Any,
) -> tuple[Tensor, Tensor]:
    settings = NormSettings(*fields)
    dense = _dense(z)
    dx, dshortcut = torch.empty_like(dense), _like_shortcut(dense, shortcut)
    if z.numel():
        tensors = dense, _laid_out(dz, dense), _laid_out(shortcut, dense)
        vectors = map(_vector, (var, settings.weight, settings.bias, mean_dy, mean_dy_xhat))
        outputs = dx, None if shortcut is None else dshortcut
        tiling = tiling_of(dense, ELEMENTWISE_PROGRAMS)
        _launch("backward_apply", dense, tiling, *tensors, *vectors, *outputs, **_constants(settings, dense))
    return _restored(dx, z, dense), dshortcut if shortcut is None else _restored(dshortcut, z, dense)


def _constants(settings: NormSettings, z: Tensor | None = None) -> dict[str, Any]:
    """Return the constants that a kernel is compiled with; given the output z, also the rounding unit of its dtype."""
    constants = {"EPS": settings.eps, "ACTIVATION": settings.activation, "PARAM": settings.activation_param}
    return constants if z is None else constants | {"ROUNDING": torch.finfo(z.dtype).eps / 2}


def _partial(x: Tensor, tiling: Tiling, count: int) -> list[Tensor]:
    """Return ``count`` uninitialised (splits, C) tensors."""
    return [x.new_empty((tiling.splits, x.shape[1]), dtype=accumulate_dtype(x.dtype)) for _ in range(count)]


def _dense(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy where it is neither contiguous nor channels_last."""
    return x if is_channels_last(x) else x.contiguous()


def _laid_out(x: Tensor | None, like: Tensor) -> Tensor | None:
    """Return x in the layout of the dense tensor ``like``."""
    if x is None or x.stride() == like.stride():
        return x
    return torch.empty_like(like).copy_(x)


def _restored(result: Tensor, like: Tensor, dense: Tensor) -> Tensor:
    """Return a result in the layout of the tensor ``like``, of which ``dense`` may be a copy in another layout."""
    return result if dense is like else torch.empty_like(like).copy_(result)


def _vector(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _launch(name: str, x: Tensor, tiling: Tiling, *tensors: Tensor | None, **constants: Any) -> None:
    """Start one of the kernels that read the dense tensor x."""
    *sizes, channels_last, unit, rows, cols = tiling
    constants |= {"CHANNELS_LAST": channels_last, "UNIT": unit, "ROWS": rows, "COLS": cols}
    _start(name, x, tiling.programs, WARPS, *tensors, *sizes, **constants)


def _combine(name: str, partial: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return two (C,) tensors, which a kernel combines from (splits, C) ones; with one split they are the first two."""
    splits, channels = partial[0].shape
    if splits == 1:
        return partial[0].view(channels), partial[1].view(channels)
    first, second = partial[0].new_empty(channels), partial[0].new_empty(channels)
    rows = min(power_above(splits), COMBINED_SPLITS)
    _start(name, first, -(-channels // 8), 8, *partial, first, second, splits, channels, ROWS=rows, COLS=8)
    return first, second


def _start(name: str, x: Tensor, programs: int, warps: int, *arguments: Any, **constants: Any) -> None:
    """Start a kernel on the device of x, for values of its dtype."""
    import triton.language as tl  # type: ignore

    from zoo.ops.abn import triton_kernels

    accumulate = tl.float64 if x.dtype == torch.float64 else tl.float32
    # Fused multiply-add is the default of the present Triton, but not of the next one.
    options = {"num_warps": warps, "enable_fp_fusion": True}
    with torch.cuda.device_of(x):
        getattr(triton_kernels, name)[(programs,)](*arguments, ACC=accumulate, **constants, **options)


class Tiling(NamedTuple):
    """How a tensor is cut into the programs of one kernel, by its shape alone; the words are in triton_kernels.py."""

    outer: int
    groups: int
    units: int
    span: int
    channels_last: bool
    unit: int
    rows: int
    cols: int

    @property
    def splits(self) -> int:
        """Return how many programs share a channel."""
        pieces = -(-self.outer // self.span)
        return pieces if self.channels_last else pieces * self._chunks

    @property
    def programs(self) -> int:
        """Return how many programs there are."""
        return -(-self.outer // self.span) * self.groups * self._chunks

    @property
    def _chunks(self) -> int:
        return -(-self.units * self.unit // self.cols)


def tiling_of(x: Tensor, programs: int) -> Tiling:
    """Return the tiling of a contiguous or channels_last tensor for about ``programs`` programs."""
    batch, channels = x.shape[:2]
    area = x.numel() // (batch * channels)
    if is_channels_last(x):
        return _tiling(batch * area, 1, channels, True, programs)
    return _tiling(batch, channels, area, False, programs)


@functools.lru_cache(maxsize=1024)
def _tiling(outer: int, groups: int, inner: int, channels_last: bool, programs: int) -> Tiling:
    cols = _width(inner, 32, 128) if channels_last else _width(inner, 256, 1024)
    rows = min(TILE // cols, power_above(outer))
    pieces = max(1, programs // (groups * -(-inner // cols)))
    span = rows * -(-outer // (rows * pieces))
    # A row too long for 32-bit numbers gets the unit 1, so that its units have 64 bits, and its indices, too.
    unit = math.gcd(inner, 16) if inner < 2**31 else 1
    return Tiling(outer, groups, inner // unit, span, channels_last, unit, rows, cols)


def _width(length: int, smallest: int, largest: int) -> int:
    """Return the widest power of two that pads ``length`` by at most a quarter, or else the one that pads least."""
    if length <= smallest:
        return power_above(length)
    padded = {
        width: -(-length // width) * width for width in (largest, largest // 2, largest // 4) if width >= smallest
    }
    return next((width for width in padded if padded[width] <= 1.25 * length), min(padded, key=padded.__getitem__))


def power_above(number: int) -> int:
    """Return the smallest power of two that is at least ``number``, which is positive."""
    return 1 << (number - 1).bit_length()


def is_channels_last(x: Tensor) -> bool:
    """Return whether x is a dense (N, ..., C) tensor; True as well where there is one position per image."""
    return x.shape[1] > 1 and x.stride(1) == 1 and x.movedim(1, -1).is_contiguous()
