"""Time and memory of a norm with its activation, forward and backward, for every back end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zoo.benchmark.network_setup import MEMORY_FORMATS, allow_many_compilations
from zoo.benchmark.results import Case, Results
from zoo.benchmark.strategies import BASELINE, compile_with_budget
from zoo.engine._precision import DTYPES
from zoo.layers.checkpointing import checkpoint
from zoo.layers.norm import InPlaceABN
from zoo.memory.allocations import clear_gradients, measure_memory
from zoo.memory.timing import Clock, TimedStep, ratios, time_interleaved
from zoo.ops import backend

SHAPES = (
    (32, 64, 112, 112),
    (32, 256, 56, 56),
    (32, 512, 28, 28),
    (32, 1024, 14, 14),
    (2, 64, 7, 7),
    (2, 2048, 7, 7),
)  # fmt: skip


class Provider(NamedTuple):
    """An implementation of norm and activation.

    Args:
    - `layer`: the module with the parameters.
    - `call`: the measured function: the layer or a wrapper.
    - `context`: returns a context manager for ``call``, for example to force a back end.
    """

    layer: nn.Module
    call: Callable[[Tensor], Tensor]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def providers(channels: int, device: torch.device) -> dict[str, Provider]:
    """Return all implementations by name. The first is the baseline of the ratios."""

    def standard(inplace: bool = True) -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(channels), nn.LeakyReLU(0.01, inplace)).to(device)

    def ours(name: str) -> Provider:
        layer = InPlaceABN(channels).to(device)
        return Provider(layer, layer, lambda: backend.force_back_end(name))

    eager, checkpointed, fused = standard(), standard(), InPlaceABN(channels).to(device)
    compiled = standard(inplace=False)  # inductor is several times slower than eager for the in-place activation
    by_name = {
        BASELINE: Provider(eager, eager),
        "checkpointed std-BN": Provider(checkpointed, lambda x: checkpoint(checkpointed, x)),
        "compiled std-BN": Provider(compiled, _compiled(compiled)),
        "compiled iABN": Provider(fused, _compiled(fused)),
        "iABN reference": ours("reference"),
    }
    for name, (kind, unavailable_reason) in backend.DEVICES.items():
        if kind == device.type and unavailable_reason() is None:
            by_name[f"iABN {name}"] = ours(name)
    return by_name


def _compiled(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    return compile_with_budget(layer, 1.0, fullgraph=True, dynamic=False)


def measure_layers(
    results: Results,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[str],
    layouts: Sequence[str],
    rounds: int,
) -> None:
    """Measure memory, time and relative time of each provider for each combination of shape, dtype and layout."""
    for shape, dtype, layout in product(shapes, dtypes, layouts):
        case = Case("norm + activation", shape, dtype, layout)
        _measure_case(results, case, providers(shape[1], results.device), rounds)


def _measure_case(results: Results, case: Case, by_name: dict[str, Provider], rounds: int) -> None:
    """Add memory and times of the providers."""
    print(f"{case.subject} {'x'.join(map(str, case.shape))} {case.dtype} {case.layout}", file=sys.stderr, flush=True)
    dtype, layout = DTYPES[case.dtype], MEMORY_FORMATS[case.layout]
    x, dz = (torch.randn(case.shape, device=results.device).to(dtype).contiguous(memory_format=layout) for _ in "xz")
    with allow_many_compilations():
        for name, provider in by_name.items():
            with provider.context():
                memory = measure_memory(_forward(provider, x, dz), provider.layer.parameters())
            results.add(case, name, "held", "tensors", [memory.held / x.nbytes])
            results.add(case, name, "peak", "tensors", [memory.peak / x.nbytes])
        steps = {name: _layer_step(provider, x, dz) for name, provider in by_name.items()}
        seconds = time_interleaved(steps, Clock(results.device), rounds=rounds)
    torch.compiler.reset()  # each case compiles its own layers
    baseline = seconds[next(iter(by_name))]
    for name, values in seconds.items():
        results.add(case, name, "time", "ms", [1e3 * value for value in values])
        results.add(case, name, "time ratio", "1", ratios(values, baseline))


class _AsOperationResult(torch.autograd.Function):
    """Returns x as the output of an operation, so that it requires grad and may be overwritten."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, x: Tensor) -> Tensor:
        # Shares the memory of x without autograd's knowledge.
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.detach())  # type: ignore[call-overload]

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[None, None]:
        return None, None


def _layer_step(provider: Provider, x: Tensor, dz: Tensor) -> TimedStep:
    """Return a step of forward and backward of the layer, including dx. Copies x before each sample."""
    token = torch.ones((), device=x.device, requires_grad=True)
    buffer = x.clone()

    def run(times: int) -> None:
        with provider.context():
            for _ in range(times):
                provider.call(_AsOperationResult.apply(token, buffer)).backward(dz)
                clear_gradients(provider.layer.parameters())

    return TimedStep(run, lambda: buffer.copy_(x))


def _forward(provider: Provider, x: Tensor, dz: Tensor) -> Callable[[], Tensor]:
    """Return a forward pass with one operation before and one after the layer."""
    token = torch.ones((), dtype=x.dtype, device=x.device, requires_grad=True)
    return lambda: (provider.call(x * token) * dz).sum()
