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
from torch.autograd.graph import increment_version

from zoo.ops.abn.kernels import Means, NormSettings, accumulate_dtype

TILE = 2048
WARPS = 4
REDUCING_PROGRAMS = 1024
ELEMENTWISE_PROGRAMS = 4096
COMBINED_SPLITS = 256  # the number of splits that a program combines at a time
COMBINED_CHANNELS = 8  # of so many channels
COMBINING_WARPS = 8
MOST_COMPILED = 4096  # of the entries below there is one per kernel and shape, and a run may never see the last shape

backward = None
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
    mean, var = _called("statistics", _run_statistics)(x)
    return mean, var


def track_statistics(x: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance, and move the running statistics in place by ``momentum`` towards them."""
    mean, var = _called("track_statistics", _run_track_statistics)(x, running_mean, running_var, momentum)
    increment_version((running_mean, running_var))  # autograd does not see that the kernel changes them
    return mean, var


def local_statistics(x: Tensor) -> Tensor:
    """Return mean, biased variance and number of values, (2 C + 1,) in float64, as a process sends them to others."""
    packed: Tensor = _called("local_statistics", _run_local_statistics)(x)
    return packed


def group_statistics(
    gathered: Tensor, dtype: torch.dtype, running_mean: Tensor | None, running_var: Tensor | None, momentum: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, biased variance and number of values of a group, and move the running statistics towards them."""
    run = _called("group_statistics", _run_group_statistics)
    mean, var, count = run(gathered, dtype, running_mean, running_var, momentum)
    if running_mean is not None and running_var is not None:
        increment_version((running_mean, running_var))
    return mean, var, count


def apply(x: Tensor, mean: Tensor, var: Tensor, settings: NormSettings, shortcut: Tensor | None = None) -> Tensor:
    """Return z in a new tensor of the dtype and strides of x."""
    z: Tensor = _called("apply", _run_apply)(x, mean, var, shortcut, *settings)
    return z


def apply_(x: Tensor, mean: Tensor, var: Tensor, settings: NormSettings, shortcut: Tensor | None = None) -> None:
    """Overwrite x with z."""
    _called("apply_", _run_apply_)(x, mean, var, shortcut, *settings)


def backward_reduce(
    z: Tensor, dz: Tensor, settings: NormSettings, shortcut: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return sum(dy) and sum(dy x_hat) per channel, shape (C,), in the accumulation dtype."""
    sums, _, _ = _called("reduce_gradients", _run_reduce_gradients)(z, dz, 1, shortcut, *settings)
    sum_dy, sum_dy_xhat = sums.unbind()
    return sum_dy, sum_dy_xhat


def reduce_gradients(
    z: Tensor, dz: Tensor, divisor: int, settings: NormSettings, shortcut: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the two sums over ``divisor``, (2, C), and the gradients of weight and bias in their dtypes, or None."""
    run = _called("reduce_gradients", _run_reduce_gradients)
    means, dweight, dbias = run(z, dz, divisor, shortcut, *settings)
    return means, None if settings.weight is None else dweight, None if settings.bias is None else dbias


def backward_apply(
    z: Tensor, dz: Tensor, var: Tensor, means: Means, settings: NormSettings, shortcut: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return dx and, with a shortcut, its gradient dy, in new tensors."""
    mean_dy, mean_dy_xhat = means if means is not None else (None, None)
    run = _called("backward_apply", _run_backward_apply)
    dx, dshortcut = run(z, dz, var, mean_dy, mean_dy_xhat, shortcut, *settings)
    return dx, None if shortcut is None else dshortcut


def _called(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operator, or in plain eager mode the function behind it, which saves the way through the dispatcher.

    The operator is for whatever looks at operations: torch.compile, transforms, dispatch modes.
    """
    watched = (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )
    return getattr(torch.ops.zoo_triton, name).default if watched else function


# The last arguments of the operators: the shortcut and the fields of NormSettings.
SETTINGS = "Tensor? shortcut, Tensor? weight, Tensor? bias, float eps, str activation, float activation_param"
_library = torch.library.Library("zoo_triton", "FRAGMENT")


def _operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as an operator without autograd; ``fake`` returns results without values."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        # With flexible_layout the operators take any layout. Without it the compiler copies the channels_last outputs
        # of convolutions.
        tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
        _library.define(schema, tags=tags)
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"zoo_triton::{name}", fake, lib=_library)
        return function

    return register


def _two_vectors(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = accumulate_dtype(x.dtype)
    return x.new_empty(x.shape[1], dtype=dtype), x.new_empty(x.shape[1], dtype=dtype)


def _like_shortcut(z: Tensor, shortcut: Tensor | None) -> Tensor:
    """Return an uninitialised tensor for the gradient of the shortcut; without a shortcut it has no elements."""
    return z.new_empty(0) if shortcut is None else torch.empty_like(z)


@_operator("statistics(Tensor x) -> (Tensor, Tensor)", _two_vectors)
def _run_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    mean, var = _two_vectors(x)
    _launch_statistics(x, mean, var)
    return mean, var


@_operator(
    "track_statistics(Tensor x, Tensor(a!) running_mean, Tensor(b!) running_var, float momentum) -> (Tensor, Tensor)",
    _two_vectors,
)
def _run_track_statistics(
    x: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float
) -> tuple[Tensor, Tensor]:
    mean, var = _two_vectors(x)
    _launch_statistics(x, mean, var, running=(running_mean, running_var), momentum=momentum)
    return mean, var


@_operator("local_statistics(Tensor x) -> Tensor", lambda x: x.new_empty(2 * x.shape[1] + 1, dtype=torch.float64))
def _run_local_statistics(x: Tensor) -> Tensor:
    channels = x.shape[1]
    packed = x.new_empty(2 * channels + 1, dtype=torch.float64)
    _launch_statistics(x, packed, packed[channels:], packed[2 * channels :])
    return packed


def _launch_statistics(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    count: Tensor | None = None,
    running: tuple[Tensor | None, Tensor | None] = (None, None),
    momentum: float = 0.0,
) -> None:
    """Write mean, variance and number of values of x, zeros without elements, and move the running ones."""
    if x.numel() == 0:
        for result in (mean, var) if count is None else (mean, var, count):
            result.zero_()
        return
    x = _dense(x)
    tiling = tiling_of(x, REDUCING_PROGRAMS)
    splits, channels = tiling.splits, x.shape[1]
    partial = x.new_empty((3, splits, channels), dtype=accumulate_dtype(x.dtype))
    _launch("statistics", x, tiling, (x, partial), (splits * channels,))
    places = channels, splits * channels, 2 * splits * channels, 1
    _combine_statistics(partial, splits, channels, places, (mean, var, count), running, momentum)


def _vectors_of_group(gathered: Tensor, dtype: torch.dtype, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    channels = gathered.shape[1] // 2
    mean, var, count = (gathered.new_empty(shape, dtype=dtype) for shape in ((channels,), (channels,), ()))
    return mean, var, count


@_operator(
    "group_statistics(Tensor gathered, ScalarType dtype, Tensor(a!)? running_mean, Tensor(b!)? running_var,"
    " float momentum) -> (Tensor, Tensor, Tensor)",
    _vectors_of_group,
)
def _run_group_statistics(
    gathered: Tensor, dtype: torch.dtype, running_mean: Tensor | None, running_var: Tensor | None, momentum: float
) -> tuple[Tensor, Tensor, Tensor]:
    results = _vectors_of_group(gathered, dtype)
    channels = results[0].numel()
    places = 2 * channels + 1, channels, 2 * channels, 0
    _combine_statistics(gathered, len(gathered), channels, places, results, (running_mean, running_var), momentum)
    return results


def _combine_statistics(
    partial: Tensor,
    splits: int,
    channels: int,
    places: tuple[int, int, int, int],
    results: tuple[Tensor | None, ...],
    running: tuple[Tensor | None, Tensor | None],
    momentum: float,
) -> None:
    """Write ``results`` and move the running statistics; ``places`` says where things are in ``partial``."""
    moved = _vector(running[0]), _vector(running[1])
    rows = min(power_above(splits), COMBINED_SPLITS)
    numbers = momentum, splits, channels, *places, rows, COMBINED_CHANNELS
    programs = -(-channels // COMBINED_CHANNELS)
    _start("combine_statistics", partial, programs, COMBINING_WARPS, (partial, *results, *moved), numbers)
    for old, new in zip(running, moved, strict=True):
        if old is not None and new is not None and old is not new:
            old.copy_(new)


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
        _launch("apply", x, tiling_of(x, ELEMENTWISE_PROGRAMS), tensors, (), settings[2:])


def _new_gradients(z: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialised tensors for the means and the gradients of weight and bias, of no elements without these."""
    means = z.new_empty((2, z.shape[1]), dtype=accumulate_dtype(z.dtype))
    dweight, dbias = (z.new_empty(0) if v is None else v.new_empty(v.shape) for v in (weight, bias))
    return means, dweight, dbias


@_operator(
    f"reduce_gradients(Tensor z, Tensor dz, SymInt divisor, {SETTINGS}) -> (Tensor, Tensor, Tensor)",
    lambda z, dz, divisor, shortcut, weight, bias, *_: _new_gradients(z, weight, bias),
)
def _run_reduce_gradients(
    z: Tensor, dz: Tensor, divisor: int, shortcut: Tensor | None, *fields: Any
) -> tuple[Tensor, Tensor, Tensor]:
    settings = NormSettings(*fields)
    means, dweight, dbias = _new_gradients(z, settings.weight, settings.bias)
    if z.numel() == 0:
        return means.zero_(), dweight.zero_(), dbias.zero_()
    z = _dense(z)
    tiling = tiling_of(z, REDUCING_PROGRAMS)
    splits, channels = tiling.splits, z.shape[1]
    partial = z.new_empty((2, splits, channels), dtype=means.dtype)
    weight = _vector(settings.weight)
    tensors = z, _laid_out(dz, z), _laid_out(shortcut, z), weight, _vector(settings.bias), partial
    constants = *settings[2:], _rounding(z.dtype)
    _launch("backward_reduce", z, tiling, tensors, (splits * channels,), constants)
    results = means, None if settings.weight is None else dweight, None if settings.bias is None else dbias
    numbers = splits, channels, divisor, min(power_above(splits), COMBINED_SPLITS), COMBINED_CHANNELS
    programs = -(-channels // COMBINED_CHANNELS)
    _start("combine_sums", partial, programs, COMBINING_WARPS, (partial, weight, *results), numbers)
    return means, dweight, dbias


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
        constants = *settings[2:], _rounding(z.dtype)
        tiling = tiling_of(dense, ELEMENTWISE_PROGRAMS)
        _launch("backward_apply", dense, tiling, (*tensors, *vectors, *outputs), (), constants)
    return _restored(dx, z, dense), dshortcut if shortcut is None else _restored(dshortcut, z, dense)


def _dense(x: Tensor) -> Tensor:
    """Return x, or a copy of the closest layout where it is neither contiguous nor channels_last."""
    if _is_dense(x.shape, x.stride()):
        return x
    copy = torch.empty_like(x)
    if not _is_dense(copy.shape, copy.stride()):
        copy = torch.empty_like(x, memory_format=torch.contiguous_format)
    return copy.copy_(x)


def _laid_out(x: Tensor | None, like: Tensor) -> Tensor | None:
    """Return x in the layout of the dense tensor ``like``."""
    if x is None or x.stride() == like.stride():
        return x
    return torch.empty_like(like).copy_(x)


def _restored(result: Tensor, like: Tensor, dense: Tensor) -> Tensor:
    """Return a result in the layout of the tensor ``like``, of which ``dense`` may be a copy in another layout."""
    return result if dense is like else torch.empty_like(like).copy_(result)


def _vector(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.is_contiguous() else x.contiguous()


def _launch(
    name: str,
    x: Tensor,
    tiling: Tiling,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[int, ...],
    constants: tuple[Any, ...] = (),
) -> None:
    """Start one of the kernels that read the dense tensor x."""
    _start(name, x, tiling.programs, WARPS, tensors, (*tiling[:4], *numbers, *tiling[4:8], *constants))


_compiled: dict[tuple[Any, ...], Any] = {}


def _start(
    name: str, x: Tensor, programs: int, warps: int, tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...]
) -> None:
    """Start a kernel on the device of x, for values of its dtype.

    Binding its arguments takes Triton longer than anything else here, so that what it compiled is kept under all that
    the code depends on: device, dtypes, whether addresses are aligned, and the numbers.
    """
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        with torch.cuda.device_of(x):
            return _start(name, x, programs, warps, tensors, numbers)
    key = name, x.get_device(), numbers, *[t if t is None else (t.dtype, t.data_ptr() % 16) for t in tensors]
    found = _compiled.get(key)
    if found is None:
        _compile_and_start(key, x, programs, warps, tensors, numbers)
    else:
        kernel, accumulate = found
        kernel[programs, 1, 1](*tensors, *numbers, accumulate)


def _compile_and_start(
    key: tuple[Any, ...],
    x: Tensor,
    programs: int,
    warps: int,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[Any, ...],
) -> None:
    import triton.language as tl  # type: ignore

    from zoo.ops.abn import triton_kernels

    accumulate = tl.float64 if x.dtype == torch.float64 else tl.float32
    # Fused multiply-add is the default of the present Triton, but not of the next one.
    options = {"num_warps": warps, "enable_fp_fusion": True}
    kernel = getattr(triton_kernels, key[0])[(programs,)](*tensors, *numbers, accumulate, **options)
    if kernel is not None:  # the interpreter compiles nothing
        if len(_compiled) >= MOST_COMPILED:
            _compiled.clear()
        _compiled[key] = kernel, accumulate


@functools.cache
def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


class Tiling(NamedTuple):
    """How a tensor is cut into the programs of one kernel, by its shape alone; the words are in triton_kernels.py.

    ``splits`` is how many programs share a channel, ``programs`` how many there are.
    """

    outer: int
    groups: int
    units: int
    span: int
    channels_last: bool
    unit: int
    rows: int
    cols: int
    splits: int
    programs: int


def tiling_of(x: Tensor, programs: int) -> Tiling:
    """Return the tiling of a contiguous or channels_last tensor for about ``programs`` programs."""
    return _tiling_of(x.shape, x.stride(), programs)


@functools.lru_cache(maxsize=4096)
def _tiling_of(shape: torch.Size, stride: tuple[int, ...], programs: int) -> Tiling:
    batch, channels = shape[:2]
    area = math.prod(shape[2:])
    if _is_channels_last(shape, stride):
        return _tiling(batch * area, 1, channels, True, programs)
    return _tiling(batch, channels, area, False, programs)


def _tiling(outer: int, groups: int, inner: int, channels_last: bool, programs: int) -> Tiling:
    cols = _width(inner, 32, 128) if channels_last else _width(inner, 256, 1024)
    rows = min(TILE // cols, power_above(outer))
    pieces = max(1, programs // (groups * -(-inner // cols)))
    span = rows * -(-outer // (rows * pieces))
    # A row whose last tile ends beyond 32-bit numbers gets the unit 1, so that its units have 64 bits, and its indices,
    # too.
    unit = math.gcd(inner, 16) if inner + cols <= 2**31 else 1
    chunks, pieces = -(-inner // cols), -(-outer // span)
    splits = pieces if channels_last else pieces * chunks
    return Tiling(outer, groups, inner // unit, span, channels_last, unit, rows, cols, splits, pieces * groups * chunks)


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


@functools.lru_cache(maxsize=4096)
def _is_dense(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    return _is_packed(shape, stride) or _is_channels_last(shape, stride)


def _is_channels_last(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Return whether a tensor is a dense (N, ..., C) one; True as well where there is one position per image."""
    last = _is_packed((shape[0], *shape[2:], shape[1]), (stride[0], *stride[2:], stride[1]))
    return shape[1] > 1 and stride[1] == 1 and last


def _is_packed(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether the elements of a tensor follow each other in memory without gaps."""
    expected = 1
    for length, step in zip(reversed(shape), reversed(stride), strict=True):
        if length != 1 and step != expected:
            return math.prod(shape) == 0
        expected *= length
    return True
