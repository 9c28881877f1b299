"""The kernels for CUDA, in Triton; the formulas are those of reference.py, the code on the device is triton_kernels.py.

Contiguous and channels_last tensors are computed as they are, with any number of elements; anything else goes through
one contiguous copy per tensor. A result per channel is reduced in two stages, partial results in a fixed split and
their combination in a fixed order, without atomic operations, so that runs repeat bit for bit. Nothing waits for the
device, and memory comes from torch, so that CUDA graphs can record the kernels (after a first call, which compiles).

How a tensor is cut into tiles depends on its shape and dtype alone; nothing is tuned at run time. A tile has 2048
elements, 16 per thread of 4 warps, or half of that in float64. Where memory is contiguous and no vector of 128 bits
divides a channel's positions, a tile holds several channels, and what is reduced is folded per channel afterwards.

The programs of a kernel are all on the device at once, as many as fit on its processors by the registers and the shared
memory of the compiled code (`resident_blocks`), or come in nearly full waves (`split`). Into how many splits a sum is
cut, and so its last bits, depends on the device and on the version of Triton, but is the same from run to run. Their
speed was not measured.

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

from zoo.ops.abn.kernels import Means, NormSettings, accumulate_dtype, laid_out
from zoo.ops.operators import operator
from zoo.torch_internals import are_transforms_active, num_dispatch_modes

TILE = 2048
WARPS = 4
PLACES = 132 * 6  # programs of a kernel where no device says how many fit: 6 are usual on each processor of an H100
LONGEST_ROW = 1024
MOST_STRIPS = 132 * 4  # of rows of several channels, if they need not be longer: as many as fit on most devices at once
MOST_PIECES = 8  # of each strip, where there are more strips than places
COMBINED_SPLITS = 256  # the number of splits that a program combines at a time
COMBINED_CHANNELS = 8  # of so many channels
COMBINING_WARPS = 8
MOST_COMPILED = 4096  # of the entries below there is one per kernel and shape, and a run may never see the last shape

backward = None
forward_ = None


@functools.cache
def unavailable_reason() -> str | None:
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
    watched = torch.compiler.is_compiling() or num_dispatch_modes() > 0 or are_transforms_active()
    return getattr(torch.ops.zoo_triton, name).default if watched else function


# The last arguments of the operators: the shortcut and the fields of NormSettings.
SETTINGS = "Tensor? shortcut, Tensor? weight, Tensor? bias, float eps, str activation, float activation_param"
_operator = functools.partial(operator, torch.library.Library("zoo_triton", "FRAGMENT"))


def _two_vectors(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = accumulate_dtype(x.dtype)
    return x.new_empty(x.shape[1], dtype=dtype), x.new_empty(x.shape[1], dtype=dtype)


def _like_shortcut(z: Tensor, shortcut: Tensor | None) -> Tensor:
    """Return an uninitialized tensor for the gradient of the shortcut; without a shortcut it has no elements."""
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
    x, channels = _dense(x), x.shape[1]
    tiling = tiling_of(x, reducing=True)
    partial, splits = _launch("statistics", x, tiling, (x,), planes=3)
    columns, size = channels * tiling.per_channel, partial[0].numel()
    places = columns, size, 2 * size, True, tiling.per_channel
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
    places = 2 * channels + 1, channels, 2 * channels, False, 1
    _combine_statistics(gathered, len(gathered), channels, places, results, (running_mean, running_var), momentum)
    return results


def _combine_statistics(
    partial: Tensor,
    splits: int,
    channels: int,
    places: tuple[int, int, int, bool, int],
    results: tuple[Tensor | None, ...],
    running: tuple[Tensor | None, Tensor | None],
    momentum: float,
) -> None:
    """Write ``results`` and move the running statistics; ``places`` says where things are in ``partial``."""
    moved = _vector(running[0]), _vector(running[1])
    rows = min(power_above(splits * places[-1]), COMBINED_SPLITS)
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
        tensors = x, z, laid_out(shortcut, x), *map(_vector, (mean, var, settings.weight, settings.bias))
        _launch("apply", x, tiling_of(x), tensors, settings[2:])


def _new_gradients(z: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized tensors for the means and the gradients of weight and bias, of no elements without these."""
    means = z.new_empty(2, z.shape[1], dtype=accumulate_dtype(z.dtype))
    dweight, dbias = (z.new_empty(0) if v is None else torch.empty_like(v) for v in (weight, bias))
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
    z, channels = _dense(z), z.shape[1]
    tiling = tiling_of(z, reducing=True)
    weight = _vector(settings.weight)
    tensors = z, laid_out(dz, z), laid_out(shortcut, z), weight, _vector(settings.bias)
    constants = *settings[2:], _rounding(z.dtype)
    partial, splits = _launch("backward_reduce", z, tiling, tensors, constants, planes=2)
    results = means, None if settings.weight is None else dweight, None if settings.bias is None else dbias
    rows = min(power_above(splits * tiling.per_channel), COMBINED_SPLITS)
    numbers = splits, channels, divisor, tiling.per_channel, rows, COMBINED_CHANNELS
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
        tensors = dense, laid_out(dz, dense), laid_out(shortcut, dense)
        vectors = map(_vector, (var, settings.weight, settings.bias, mean_dy, mean_dy_xhat))
        outputs = dx, None if shortcut is None else dshortcut
        constants = *settings[2:], _rounding(z.dtype)
        _launch("backward_apply", dense, tiling_of(dense), (*tensors, *vectors, *outputs), constants)
    return _restored(dx, z, dense), dshortcut if shortcut is None else _restored(dshortcut, z, dense)


def _dense(x: Tensor) -> Tensor:
    """Return x, or a copy of the closest layout where it is neither contiguous nor channels_last."""
    if _is_dense(x.shape, x.stride()):
        return x
    copy = torch.empty_like(x)
    if not _is_dense(copy.shape, copy.stride()):
        copy = torch.empty_like(x, memory_format=torch.contiguous_format)
    return copy.copy_(x)


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
    constants: tuple[Any, ...] = (),
    planes: int = 0,
) -> tuple[Tensor, int]:
    """Start one of the kernels that read the dense tensor x, with so many programs as are on its device at once.

    Return the partial results of a reduction, (planes, splits, columns), and the number of splits.
    """
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        with torch.cuda.device_of(x):
            return _launch(name, x, tiling, tensors, constants, planes)
    key = name, x.get_device(), tiling, constants, *_compiled_for(tensors)
    found = _compiled.get(key)
    if found is None:
        arguments = stand_ins(tiling, accumulate_dtype(x.dtype), tensors, constants, planes)
        kernel, accumulate = _compile(name, x, WARPS, *arguments)
        found = kernel, accumulate, *split(tiling, _places(kernel, x.device))
        _remember(key, found)
    kernel, accumulate, pieces, programs = found
    if planes == 0:
        kernel[programs, 1, 1](*tensors, pieces, *tiling.numbers, *tiling.constants, *constants, accumulate)
        return x, 0
    splits, columns = tiling.results(pieces)
    partial = x.new_empty(planes, splits, columns, dtype=accumulate_dtype(x.dtype))
    numbers = pieces, *tiling.numbers, splits * columns, *tiling.constants, *constants
    kernel[programs, 1, 1](*tensors, partial, *numbers, accumulate)
    return partial, splits


_compiled: dict[tuple[Any, ...], Any] = {}


def stand_ins(
    tiling: Tiling,
    accumulate: torch.dtype,
    tensors: tuple[Tensor | None, ...],
    constants: tuple[Any, ...],
    planes: int,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return arguments for which a kernel is compiled as for the real ones, before the number of its programs is known.

    They are the tensors, a dtype in the place of the partial results, and the numbers.
    """
    partial, places = ((accumulate,), (1,)) if planes else ((), ())
    return (*tensors, *partial), (1, *tiling.numbers, *places, *tiling.constants, *constants)


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
    key = name, x.get_device(), numbers, *_compiled_for(tensors)
    found = _compiled.get(key)
    if found is None:
        found = _compile(name, x, warps, tensors, numbers)
        _remember(key, found)
    kernel, accumulate = found
    kernel[programs, 1, 1](*tensors, *numbers, accumulate)


def _compiled_for(tensors: tuple[Tensor | None, ...]) -> list[tuple[torch.dtype, int] | None]:
    """Return what the code of a kernel depends on in its tensors: their dtypes, and whether addresses are aligned."""
    return [x if x is None else (x.dtype, x.data_ptr() % 16) for x in tensors]


def _compile(name: str, x: Tensor, warps: int, tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return a kernel for arguments such as these, and its accumulation dtype; a dtype stands for an aligned tensor."""
    import triton.language as tl  # type: ignore

    from zoo.ops.abn import triton_kernels

    accumulate = tl.float64 if x.dtype == torch.float64 else tl.float32
    jitted = getattr(triton_kernels, name)
    # Fused multiply-add is the default of the present Triton, but not of the next one.
    options = {"num_warps": warps, "enable_fp_fusion": True}
    kernel = jitted.warmup(*tensors, *numbers, accumulate, grid=(1,), **options)
    return jitted if kernel is None else kernel, accumulate  # the interpreter compiles nothing


def _remember(key: tuple[Any, ...], found: tuple[Any, ...]) -> None:
    if len(_compiled) >= MOST_COMPILED:
        _compiled.clear()
    _compiled[key] = found


def _places(kernel: Any, device: torch.device) -> int:
    """Return how many programs of a kernel are on a device at once; `PLACES` without a device or compiled code."""
    if device.type != "cuda" or not hasattr(kernel, "_init_handles"):
        return PLACES
    kernel._init_handles()  # loads the code, which the number of its registers is known after
    properties: Any = torch.cuda.get_device_properties(device)  # the type stubs of some versions lack attributes
    room = Room(
        properties.regs_per_multiprocessor,
        properties.shared_memory_per_multiprocessor,
        properties.max_threads_per_multi_processor,
    )
    return properties.multi_processor_count * resident_blocks(kernel.n_regs, kernel.metadata.shared, WARPS, room)


class Room(NamedTuple):
    """What one processor of a device has for its blocks: registers of 32 bits, bytes of shared memory, threads."""

    registers: int
    shared_bytes: int
    threads: int


def resident_blocks(registers: int, shared_bytes: int, warps: int, room: Room) -> int:
    """Return how many blocks of a kernel with so many registers per thread are on one processor at once.

    Registers are given out to warps in units of 256, by each of the four quarters of a processor, and 1024 bytes of
    shared memory are taken by the system for each block (CUDA's occupancy calculator).
    """
    per_warp = -(-32 * registers // 256) * 256
    by_registers = 4 * (room.registers // 4 // per_warp) // warps
    return max(1, min(by_registers, room.shared_bytes // (shared_bytes + 1024), room.threads // (32 * warps)))


@functools.cache
def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


class Tiling(NamedTuple):
    """How a tensor is cut into tiles; the words are in triton_kernels.py.

    ``strips`` is how many strips there are and ``tiles`` how many tiles each of them has.
    """

    outer: int
    groups: int
    units: int
    period: int
    unit: int
    rows: int
    cols: int
    strips: int
    tiles: int

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers that a kernel takes for one tensor as for any other of its kind: outer, groups, units."""
        return self[:3]

    @property
    def constants(self) -> tuple[int, ...]:
        """The numbers that a kernel is compiled for."""
        return self[3:7]

    @property
    def per_channel(self) -> int:
        """The number of partial results of a channel in each split."""
        return max(1, self.period)

    def results(self, pieces: int) -> tuple[int, int]:
        """Return the number of splits of a reduction, and how many results each of them has."""
        if self.period:
            return pieces, self.units * self.unit
        return pieces * self.strips // self.groups, self.groups


def split(tiling: Tiling, places: int) -> tuple[int, int]:
    """Return into how many pieces each strip is cut, and the number of programs.

    There are at most ``places`` of them. If there are more strips, then there is the number up to `MOST_PIECES` that
    leaves the fewest places empty at the end.
    """
    strips, tiles = tiling.strips, tiling.tiles

    def time(pieces: int) -> int:  # in tiles that the busiest place has to do
        return -(-strips * pieces // places) * -(-tiles // pieces)

    most = min(tiles, max(places // strips, 1 if strips <= places else MOST_PIECES))
    pieces = min(range(1, most + 1), key=time)
    return pieces, strips * pieces


def tiling_of(x: Tensor, reducing: bool = False) -> Tiling:
    """Return the tiling of a contiguous or channels_last tensor, for a reduction or for an elementwise kernel."""
    return _tiling_of(x.shape, x.stride(), x.element_size(), reducing)


@functools.lru_cache(maxsize=4096)
def _tiling_of(shape: torch.Size, stride: tuple[int, ...], item_bytes: int, reducing: bool) -> Tiling:
    batch, channels = shape[:2]
    area = math.prod(shape[2:])
    if _is_channels_last(shape, stride):
        return _tiling(batch * area, 1, channels, 1, _width(channels, 32, 128), item_bytes)
    vector = 16 // item_bytes
    widened = math.gcd(area, vector) < math.gcd(channels * area, vector)
    # Three partial results of 4 bytes per column, written and read again, may be as many bytes as the tensor.
    if widened and (not reducing or batch * item_bytes >= 24):
        row = channels * area
        cols = power_above(min(max(-(-row // MOST_STRIPS), 64), LONGEST_ROW, row))
        return _tiling(batch, 1, row, area, cols, item_bytes)
    return _tiling(batch, channels, area, 0, _width(area, 256, LONGEST_ROW), item_bytes)


def _tiling(outer: int, groups: int, inner: int, period: int, cols: int, item_bytes: int) -> Tiling:
    rows = min((TILE if item_bytes < 8 else TILE // 2) // cols, power_above(outer))
    # A row whose last tile ends beyond 32-bit numbers gets the unit 1, so that its units have 64 bits, and its indices,
    # too.
    unit = math.gcd(inner, 16) if inner + cols <= 2**31 else 1
    strips = groups * -(-inner // cols)
    return Tiling(outer, groups, inner // unit, period, unit, rows, cols, strips, -(-outer // rows))


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
