"""What the Triton kernels of a network's norms should take on a GPU: predicted from their compiled code, not measured.

The model is this. All programs of a kernel are on the device at once, or in waves one after the other, and all of a
wave go from tile to tile in step. The slowest of three things decides how long a step is: the bytes of all those tiles
at the rate of a copy; their instructions, of which a processor issues four for 32 threads per cycle; and a single tile,
which takes `LATENCY_S` and its own instructions. A launch costs `LAUNCH_S` and the combination of partial results
`COMBINE_S`, beside the bytes of these. What a cache holds of the sweep before is not counted, nor what the host needs
to launch kernels.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zoo.benchmark.compiled_kernels import Kernel, compile_kernels
from zoo.benchmark.network_setup import LAYOUTS, Setup
from zoo.benchmark.results import Case, Results
from zoo.engine.precision import DTYPES
from zoo.layers.norm import ABN
from zoo.ops.abn.triton import WARPS, Room, split

LATENCY_S = 0.6e-6  # of a load from memory while others wait for theirs
LAUNCH_S = 2.0e-6
COMBINE_S = 4.5e-6
TINY_KERNELS = 1  # of torch: the count of the batches


class Gpu(NamedTuple):
    """A GPU by its data sheet; a copy is taken to reach nine tenths of the bandwidth in it."""

    capability: int
    processors: int
    room: Room
    clock_hz: float
    bandwidth: float

    @property
    def copy_rate(self) -> float:
        """The bytes that a copy reads and writes in a second."""
        return 0.9 * self.bandwidth


GPUS = {
    "A100": Gpu(80, 108, Room(65536, 167936, 2048), 1.41e9, 2.04e12),
    "H100": Gpu(90, 132, Room(65536, 233472, 2048), 1.98e9, 3.35e12),
    "H200": Gpu(90, 132, Room(65536, 233472, 2048), 1.98e9, 4.8e12),
    "B200": Gpu(100, 148, Room(65536, 233472, 2048), 1.96e9, 8.0e12),
}


class Norm(NamedTuple):
    """A norm of a network: the shape of its input, its activation, and whether it has a shortcut."""

    shape: tuple[int, ...]
    activation: str
    shortcut: bool


def norms_of(setup: Setup) -> list[Norm]:
    """Return the norms of a network in the order in which a step calls them; ``setup`` is on the meta device."""
    norms: list[Norm] = []

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        activation = layer.activation
        assert isinstance(activation, str)
        norms.append(Norm(tuple(tensors[0].shape), activation, len(tensors) > 1))

    model = setup.build("inplace", "plain")
    for module in model.modules():
        if isinstance(module, ABN):
            module.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        model(setup.random_images())
    return norms


def predict_norms(results: Results, setup: Setup, gpu_name: str) -> None:
    """Add what each kind of norm of a network should take on a GPU, and all of them together."""
    gpu, dtype = GPUS[gpu_name], DTYPES[setup.dtype]
    case, provider = setup.case, f"predicted for {gpu_name}"
    total_s = total_bytes = launches = 0.0
    for norm, count in Counter(norms_of(setup)).items():
        x = torch.empty(norm.shape, dtype=dtype, device="meta").contiguous(memory_format=LAYOUTS[setup.layout])
        kernels = compile_kernels(x, norm.activation, norm.shortcut, gpu.capability)
        seconds = {name: kernel_seconds(kernel, x.element_size(), gpu) for name, kernel in kernels.items()}
        reductions = sum(kernel.planes > 0 for kernel in kernels.values())
        tail = sum(combination_seconds(kernel, gpu) for kernel in kernels.values())
        started = len(kernels) + reductions + TINY_KERNELS
        layer_s = sum(seconds.values()) + tail + LAUNCH_S * (started - reductions)
        moved = {name: x.numel() * x.element_size() * (k.loads + k.stores) for name, k in kernels.items()}
        subject = f"{case.subject}, {norm.activation}{' with shortcut' if norm.shortcut else ''}"
        row = Case(subject, norm.shape, setup.dtype, setup.layout)
        results.add(row, provider, "layers", "1", [count])
        results.add(row, provider, "launches", "1", [started])
        results.add(row, provider, "bytes", "MB", [sum(moved.values()) / 1e6])
        for name, value in seconds.items():
            results.add(row, provider, name, "% of the copy's rate", [100 * moved[name] / gpu.copy_rate / value])
        results.add(row, provider, "time", "us", [1e6 * layer_s])
        results.add(row, provider, "all", "% of the copy's rate", [100 * sum(moved.values()) / gpu.copy_rate / layer_s])
        total_s, total_bytes = total_s + count * layer_s, total_bytes + count * sum(moved.values())
        launches += count * started
    everything = Case(f"{case.subject}, all norms", case.shape, case.dtype, case.layout)
    results.add(everything, provider, "launches", "1", [launches])
    results.add(everything, provider, "bytes", "MB", [total_bytes / 1e6])
    results.add(everything, provider, "time", "us", [1e6 * total_s])
    share = 100 * total_bytes / gpu.copy_rate / total_s
    results.add(everything, provider, "all", "% of the copy's rate", [share])
    results.note("predicted, not measured: nothing of this has run on a GPU")
    results.note(
        f"assumed of {gpu_name}: a copy at {gpu.copy_rate / 1e12:.2f} TB/s, {gpu.processors} processors, "
        f"{LATENCY_S * 1e6:g} us until a load arrives, {LAUNCH_S * 1e6:g} us per launch, {COMBINE_S * 1e6:g} us to "
        "combine partial results; caches and the host are left out"
    )


def kernel_seconds(kernel: Kernel, item_bytes: int, gpu: Gpu) -> float:
    """Return how long a kernel is on the device, with the partial results that it writes."""
    tiling, code = kernel.tiling, kernel.code
    places = gpu.processors * code.blocks(gpu.room)
    pieces, programs = split(tiling, places)
    waves = math.ceil(programs / places)
    resident = min(programs, places)
    # What a tile has beyond the end of a row or of the tensor is not moved, but takes instructions.
    elements = tiling.outer * tiling.groups * tiling.units * tiling.unit / (tiling.strips * tiling.tiles)
    tile_bytes = elements * item_bytes * (kernel.loads + kernel.stores)
    warp_instructions = tiling.rows * tiling.cols * code.instructions / 32
    alone_s = LATENCY_S + warp_instructions / WARPS / gpu.clock_hz
    issued_s = warp_instructions / 4 / gpu.clock_hz * resident / gpu.processors
    step_s = max(alone_s, issued_s, resident * tile_bytes / gpu.copy_rate)
    steps = math.ceil(tiling.tiles / pieces)
    return waves * steps * step_s + _partial_bytes(kernel, pieces) / gpu.copy_rate


def combination_seconds(kernel: Kernel, gpu: Gpu) -> float:
    """Return how long the kernel that combines the partial results of this one takes, with its launch, or 0."""
    pieces, _ = split(kernel.tiling, gpu.processors * kernel.code.blocks(gpu.room))
    return COMBINE_S + _partial_bytes(kernel, pieces) / gpu.copy_rate if kernel.planes else 0.0


def _partial_bytes(kernel: Kernel, pieces: int) -> int:
    splits, columns = kernel.tiling.results(pieces)
    return 4 * kernel.planes * splits * columns
