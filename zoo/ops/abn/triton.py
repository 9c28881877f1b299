"""The CUDA kernels, in Triton: launchers for the device code in triton_kernels.py, with the formulas of reference.py.

Contiguous and channels_last tensors of any size are used in place; other layouts are copied to contiguous ones. Results
per channel are reduced in two stages, partial sums over fixed splits and their combination in a fixed order. There are
no atomics, so results are reproducible bit for bit. Launchers do not synchronize, and memory comes from torch's
allocator, so CUDA graphs can capture the kernels after a first call, which compiles them.

The tiling depends only on shape and dtype; there is no autotuning. A tile has 2048 elements, 16 per thread of 4 warps,
or half of that in float64. In contiguous memory where the positions of a channel are not divisible by a vector of 128
bits, a tile contains several channels, and the reduction per channel follows afterwards.

All programs of a kernel are resident at once, as many as the registers and shared memory of the compiled code allow
(`resident_blocks`), or run in nearly full waves (`split`). The number of splits, and with it the last bits of a sum,
depends on the device and the version of Triton, but does not change between runs.

The kernels are registered as operators (zoo_triton::), which torch.compile does not trace into. A compiled network runs
the same kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zoo.ops.abn.reference import Means, NormSettings, ReferenceKernels, laid_out
from zoo.ops.context import is_intercepted
from zoo.ops.operators import accumulate_dtype, new_vectors, operator

TILE = 2048
WARPS = 4
RESIDENT_PROGRAMS = 132 * 6  # assumed if unknown: typically 6 on each multiprocessor of an H100
LONGEST_ROW = 1024
MAX_STRIPS = 132 * 4  # strips of several channels, unless LONGEST_ROW needs more: resident at once on most devices
MAX_PIECES = 8  # most pieces per strip, if there are more strips than resident programs
COMBINED_SPLITS = 256  # splits that a program combines at a time
COMBINED_CHANNELS = 8  # channels that a program combines
COMBINE_WARPS = 8
#: The orders of operations of `normalize`: with mean m, inverse standard deviation s, weight w and bias b,
#: fma((x - m) w, s, b), fma(x - m, s w, b) and fma(x, s w, b - m (s w)). Found by comparing bits, since cuDNN
#: documents none: torch's own kernels use the first, cuDNN uses all three, depending on layout and size.
ORDERS = ("weight first", "centered", "line")
MAX_COMPILED = 4096  # cache entries, one per kernel and shape; the number of input shapes is unlimited


class TritonKernels(ReferenceKernels):
    """The kernels for CUDA."""

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, var = _function_or_operator("statistics", _run_statistics)(x)
        return mean, var

    def track_statistics(
        self, x: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float
    ) -> tuple[Tensor, Tensor]:
        run = _function_or_operator("track_statistics", _run_track_statistics)
        mean, var = run(x, running_mean, running_var, momentum)
        increment_version((running_mean, running_var))  # the kernel does not tell autograd that it has modified them
        return mean, var

    def local_statistics(self, x: Tensor) -> Tensor:
        packed: Tensor = _function_or_operator("local_statistics", _run_local_statistics)(x)
        return packed

    def group_statistics(
        self,
        gathered: Tensor,
        dtype: torch.dtype,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        run = _function_or_operator("group_statistics", _run_group_statistics)
        mean, var, count = run(gathered, dtype, running_mean, running_var, momentum)
        if running_mean is not None and running_var is not None:
            increment_version((running_mean, running_var))
        return mean, var, count

    def apply(
        self, x: Tensor, mean: Tensor, var: Tensor, settings: NormSettings, shortcut: Tensor | None = None
    ) -> Tensor:
        z: Tensor = _function_or_operator("apply", _run_apply)(x, mean, var, shortcut, *settings)
        return z

    def apply_(
        self, x: Tensor, mean: Tensor, var: Tensor, settings: NormSettings, shortcut: Tensor | None = None
    ) -> None:
        _function_or_operator("apply_", _run_apply_)(x, mean, var, shortcut, *settings)

    def reduce_gradients(
        self, z: Tensor, dz: Tensor, divisor: int, settings: NormSettings, shortcut: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        run = _function_or_operator("reduce_gradients", _run_reduce_gradients)
        means, dweight, dbias = run(z, dz, divisor, shortcut, *settings)
        return means, None if settings.weight is None else dweight, None if settings.bias is None else dbias

    def backward_reduce(
        self, z: Tensor, dz: Tensor, settings: NormSettings, shortcut: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        sums, _, _ = self.reduce_gradients(z, dz, 1, settings, shortcut)
        sum_dy, sum_dy_xhat = sums.unbind()
        return sum_dy, sum_dy_xhat

    def backward_apply(
        self, z: Tensor, dz: Tensor, var: Tensor, means: Means, settings: NormSettings, shortcut: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        mean_dy, mean_dy_xhat = means if means is not None else (None, None)
        run = _function_or_operator("backward_apply", _run_backward_apply)
        dx, dshortcut = run(z, dz, var, mean_dy, mean_dy_xhat, shortcut, *settings)
        return dx, None if shortcut is None else dshortcut


def _function_or_operator(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operator where calls are intercepted (`is_intercepted`), otherwise the function that implements it.

    Calling the function avoids the overhead of the dispatcher.
    """
    return getattr(torch.ops.zoo_triton, name).default if is_intercepted() else function


# The last arguments of the operators: the shortcut and the fields of NormSettings.
SETTINGS = "Tensor? shortcut, Tensor? weight, Tensor? bias, float eps, str activation, float activation_param"
_operator = functools.partial(operator, torch.library.Library("zoo_triton", "FRAGMENT"))


def _like_shortcut(z: Tensor, shortcut: Tensor | None) -> Tensor:
    """Return an uninitialized tensor for the gradient of the shortcut, empty without a shortcut."""
    return z.new_empty(0) if shortcut is None else torch.empty_like(z)


@_operator("statistics(Tensor x) -> (Tensor, Tensor)", new_vectors)
def _run_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    mean, var = new_vectors(x)
    _launch_statistics(x, mean, var)
    return mean, var


@_operator(
    "track_statistics(Tensor x, Tensor(a!) running_mean, Tensor(b!) running_var, float momentum) -> (Tensor, Tensor)",
    lambda x, *_: new_vectors(x),
)
def _run_track_statistics(
    x: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float
) -> tuple[Tensor, Tensor]:
    mean, var = new_vectors(x)
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
    """Write mean, variance and number of values of x (zeros if x is empty); update the running statistics."""
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
    """Write ``results`` and update the running statistics; ``places`` describes the layout of ``partial``."""
    moved = _vector(running[0]), _vector(running[1])
    rows = min(next_power_of_two(splits * places[-1]), COMBINED_SPLITS)
    numbers = momentum, splits, channels, *places, rows, COMBINED_CHANNELS
    programs = -(-channels // COMBINED_CHANNELS)
    _launch_programs("combine_statistics", partial, programs, COMBINE_WARPS, (partial, *results, *moved), numbers)
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


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    order: str,
    shortcut: Tensor | None = None,
    is_rectified: bool = False,
) -> Tensor:
    """Return a batch norm with given statistics, plus the shortcut, followed by ReLU if ``is_rectified``.

    The result has the bits of the separate operations, and the layout of x, which is contiguous or channels_last.

    Args:
    - `x`, `shortcut`: (N, C, ...) of one dtype.
    - `mean`, `invstd`: mean and inverse standard deviation of each channel, (C,).
    - `order`: one of `ORDERS`.
    """
    out = torch.empty_like(x)
    if x.numel():
        tensors = x, out, laid_out(shortcut, x), *map(_vector, (mean, invstd, weight, bias))
        _launch("normalize", x, tiling_of(x), tensors, (order, is_rectified))
    return out


def _new_gradients(z: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized tensors for the means and the gradients of weight and bias (empty without these)."""
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
    rows = min(next_power_of_two(splits * tiling.per_channel), COMBINED_SPLITS)
    numbers = splits, channels, divisor, tiling.per_channel, rows, COMBINED_CHANNELS
    programs = -(-channels // COMBINED_CHANNELS)
    _launch_programs("combine_sums", partial, programs, COMBINE_WARPS, (partial, weight, *results), numbers)
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
    """Return x if it is contiguous or channels_last, otherwise a copy in the closest such layout."""
    if _is_dense(x.shape, x.stride()):
        return x
    copy = torch.empty_like(x)
    if not _is_dense(copy.shape, copy.stride()):
        copy = torch.empty_like(x, memory_format=torch.contiguous_format)
    return copy.copy_(x)


def _restored(result: Tensor, like: Tensor, dense: Tensor) -> Tensor:
    """Return ``result`` in the layout of ``like``; ``dense`` is ``like`` or its copy in the result's layout."""
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
    """Launch a kernel that reads the dense tensor x, with as many programs as can be resident on its device.

    Returns the partial results of a reduction, (planes, splits, columns), and the number of splits.
    """
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        with torch.cuda.device_of(x):
            return _launch(name, x, tiling, tensors, constants, planes)
    key = name, x.get_device(), tiling, constants, *_cache_key(tensors)
    found = _compiled.get(key)
    if found is None:
        # The number of programs follows from the compiled code, and the size of the partial results from that number.
        # Their dtype is enough to compile.
        unknown, places = ((accumulate_dtype(x.dtype),), (1,)) if planes else ((), ())
        arguments = 1, *tiling.numbers, *places, *tiling.constants, *constants
        kernel, accumulate = _compile(name, x, WARPS, (*tensors, *unknown), arguments)
        found = kernel, accumulate, *split(tiling, _resident_programs(kernel, x.device))
        _cache_compiled(key, found)
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


def _launch_programs(
    name: str, x: Tensor, programs: int, warps: int, tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...]
) -> None:
    """Launch a kernel on the device of x, for values of its dtype.

    Binding arguments dominates Triton's launch time; the cache of compiled kernels avoids it. The key contains
    everything that the code depends on: device, dtypes, alignment of addresses, and numbers.
    """
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        with torch.cuda.device_of(x):
            return _launch_programs(name, x, programs, warps, tensors, numbers)
    key = name, x.get_device(), numbers, *_cache_key(tensors)
    found = _compiled.get(key)
    if found is None:
        found = _compile(name, x, warps, tensors, numbers)
        _cache_compiled(key, found)
    kernel, accumulate = found
    kernel[programs, 1, 1](*tensors, *numbers, accumulate)


def _cache_key(tensors: tuple[Tensor | None, ...]) -> list[tuple[torch.dtype, int] | None]:
    """Return the cache key of a kernel's tensors: their dtypes and the alignment of their addresses."""
    return [x if x is None else (x.dtype, x.data_ptr() % 16) for x in tensors]


def _compile(name: str, x: Tensor, warps: int, tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> tuple[Any, Any]:
    """Compile a kernel for these arguments; return it and its accumulation dtype. A dtype means an aligned tensor."""
    import triton.language as tl  # type: ignore

    from zoo.ops.abn import triton_kernels

    accumulate = tl.float64 if x.dtype == torch.float64 else tl.float32
    jitted = getattr(triton_kernels, name)
    # Fused multiply-add is the default in this version of Triton, but not in the next. `normalize` names its own.
    options = {"num_warps": warps, "enable_fp_fusion": name != "normalize"}
    kernel = jitted.warmup(*tensors, *numbers, accumulate, grid=(1,), **options)
    return jitted if kernel is None else kernel, accumulate  # the interpreter compiles nothing


def _cache_compiled(key: tuple[Any, ...], found: tuple[Any, ...]) -> None:
    if len(_compiled) >= MAX_COMPILED:
        _compiled.clear()
    _compiled[key] = found


def _resident_programs(kernel: Any, device: torch.device) -> int:
    """Return how many programs of a kernel can be resident on a device; a default without device or compiled code."""
    if device.type != "cuda" or not hasattr(kernel, "_init_handles"):
        return RESIDENT_PROGRAMS
    kernel._init_handles()  # loads the code, which sets n_regs
    properties: Any = torch.cuda.get_device_properties(device)  # the type stubs of some versions lack attributes
    limits = MultiprocessorLimits(
        properties.regs_per_multiprocessor,
        properties.shared_memory_per_multiprocessor,
        properties.max_threads_per_multi_processor,
    )
    return properties.multi_processor_count * resident_blocks(kernel.n_regs, kernel.metadata.shared, WARPS, limits)


class MultiprocessorLimits(NamedTuple):
    """The resources of one multiprocessor: 32-bit registers, bytes of shared memory, threads."""

    registers: int
    shared_bytes: int
    threads: int


def resident_blocks(registers: int, shared_bytes: int, warps: int, limits: MultiprocessorLimits) -> int:
    """Return how many blocks of a kernel can be resident on one multiprocessor; ``registers`` are per thread.

    Each of the four partitions of a multiprocessor allocates registers to warps in units of 256, and the system
    reserves 1024 bytes of shared memory per block (CUDA's occupancy calculator).
    """
    per_warp = -(-32 * registers // 256) * 256
    by_registers = 4 * (limits.registers // 4 // per_warp) // warps
    return max(1, min(by_registers, limits.shared_bytes // (shared_bytes + 1024), limits.threads // (32 * warps)))


@functools.cache
def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


class Tiling(NamedTuple):
    """Division of a tensor into tiles; triton_kernels.py defines the terms.

    ``strips`` is the number of strips, ``tiles`` the number of tiles per strip.
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
        """Arguments that Triton must not specialize on: outer, groups, units."""
        return self[:3]

    @property
    def constants(self) -> tuple[int, ...]:
        """Arguments that Triton specializes on: period, unit, rows, cols."""
        return self[3:7]

    @property
    def per_channel(self) -> int:
        """The number of partial results per channel and split."""
        return max(1, self.period)

    def results(self, pieces: int) -> tuple[int, int]:
        """Return the number of splits of a reduction, and the number of results per split."""
        if self.period:
            return pieces, self.units * self.unit
        return pieces * self.strips // self.groups, self.groups


def split(tiling: Tiling, resident: int) -> tuple[int, int]:
    """Return the number of pieces per strip, and the number of programs, for ``resident`` programs at a time.

    At most ``resident`` programs run. If there are more strips, each strip is split into the number of pieces (up to
    `MAX_PIECES`) that fills the last wave best.
    """
    strips, tiles = tiling.strips, tiling.tiles

    def time(pieces: int) -> int:  # tiles that the busiest program slot processes
        return -(-strips * pieces // resident) * -(-tiles // pieces)

    most = min(tiles, max(resident // strips, 1 if strips <= resident else MAX_PIECES))
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
    # Writing and reading three partial results of 4 bytes per column may move as many bytes as the tensor has.
    if widened and (not reducing or batch * item_bytes >= 24):
        row = channels * area
        cols = next_power_of_two(min(max(-(-row // MAX_STRIPS), 64), LONGEST_ROW, row))
        return _tiling(batch, 1, row, area, cols, item_bytes)
    return _tiling(batch, channels, area, 0, _width(area, 256, LONGEST_ROW), item_bytes)


def _tiling(outer: int, groups: int, inner: int, period: int, cols: int, item_bytes: int) -> Tiling:
    rows = min((TILE if item_bytes < 8 else TILE // 2) // cols, next_power_of_two(outer))
    # A row whose last tile ends beyond the 32-bit range gets the unit 1: its units and indices then have 64 bits.
    unit = math.gcd(inner, 16) if inner + cols <= 2**31 else 1
    strips = groups * -(-inner // cols)
    return Tiling(outer, groups, inner // unit, period, unit, rows, cols, strips, -(-outer // rows))


def _width(length: int, smallest: int, largest: int) -> int:
    """Return the widest power of two that pads ``length`` by at most a quarter, otherwise the one that pads least."""
    if length <= smallest:
        return next_power_of_two(length)
    padded = {
        width: -(-length // width) * width for width in (largest, largest // 2, largest // 4) if width >= smallest
    }
    return next((width for width in padded if padded[width] <= 1.25 * length), min(padded, key=padded.__getitem__))


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least the positive ``number``."""
    return 1 << (number - 1).bit_length()


@functools.lru_cache(maxsize=4096)
def _is_dense(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    return _is_packed(shape, stride) or _is_channels_last(shape, stride)


def _is_channels_last(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Return whether a tensor is dense in (N, ..., C) order, as every dense tensor with one position per image is."""
    last = _is_packed((shape[0], *shape[2:], shape[1]), (stride[0], *stride[2:], stride[1]))
    return shape[1] > 1 and stride[1] == 1 and last


def _is_packed(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether a tensor is contiguous: its elements are adjacent in memory, in order."""
    expected = 1
    for length, step in zip(reversed(shape), reversed(stride), strict=True):
        if length != 1 and step != expected:
            return math.prod(shape) == 0
        expected *= length
    return True
