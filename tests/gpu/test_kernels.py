"""The Triton kernels on a GPU: large tensors, repeatability, recorded graphs, no waiting, and compiled networks.

tests/ops/abn/test_triton.py has the cases that Triton's interpreter computes, too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.formula import relative_error
from tests.ops.norm_cases import ACTIVATIONS, FLOATS, LAYOUTS, REFERENCE, TRITON, Case, lay_out, make, run
from tests.synchronization import no_synchronization
from zoo.ops.abn.functional import inplace_abn
from zoo.ops.abn.kernels import kernels_for
from zoo.ops.abn.reference import NormSettings
from zoo.ops.backend import force_back_end, unavailable_reason

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(unavailable_reason("triton") is not None, reason=str(unavailable_reason("triton"))),
]
LAYER_SHAPES = [(8, 64, 112, 112), (8, 256, 56, 56), (8, 512, 28, 28), (8, 1024, 14, 14), (8, 2048, 7, 7)]
ODD_SHAPES = [(2, 176, 14, 14), (5, 3, 225, 223), (1, 1, 1000, 1001), (4099, 37), (2, 24, 5, 6, 7), (2, 64, 3, 2)]


def test_cuda_tensor_selects_triton_kernels():
    assert kernels_for(torch.zeros(1, device="cuda")) is TRITON


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float64", *FLOATS])
@pytest.mark.parametrize("shape", LAYER_SHAPES + ODD_SHAPES)
def test_layers_of_real_size_equal_float64_reference(shape, dtype, layout):
    case = Case(dtype, layout, "elu", shape, shortcut=True, weight=0.8)
    ours = run(TRITON, case, "cuda")
    truth = run(REFERENCE, case, "cuda", exact=True)
    tolerance = 1e-10 if dtype == "float64" else 32 * torch.finfo(getattr(torch, dtype)).eps
    assert {name for name in ours if not relative_error(ours[name], truth[name]) < tolerance} == set()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_runs_are_bit_identical_under_load(dtype, layout):
    case = Case(dtype, layout, "leaky_relu", (16, 64, 113, 97), shortcut=True)
    first = run(TRITON, case, "cuda")
    other = torch.cuda.Stream()
    for _ in range(5):
        with torch.cuda.stream(other):
            noise = torch.randn(4096, 4096, device="cuda")
            noise @ noise
        again = run(TRITON, case, "cuda")
        assert all(torch.equal(first[name], again[name]) for name in first)
    torch.cuda.synchronize()


def step(x: Tensor, dz: Tensor, shortcut: Tensor | None, settings: NormSettings) -> list[Tensor]:
    """Return the results of one training step of a norm, in new tensors."""
    mean, var = TRITON.statistics(x)
    z = TRITON.apply(x, mean, var, settings, shortcut)
    sums = TRITON.backward_reduce(z, dz, settings, shortcut)
    count = x.numel() // x.shape[1]
    dx, dshortcut = TRITON.backward_apply(z, dz, var, (sums[0] / count, sums[1] / count), settings, shortcut)
    return [t for t in (mean, var, z, *sums, dx, dshortcut) if t is not None]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recorded_graph_replays_new_input_as_eager_computes_it(layout):
    x, dz, shortcut, settings = make(Case("bfloat16", layout, shape=(8, 64, 57, 56), shortcut=True), "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(x, dz, shortcut, settings)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step(x, dz, shortcut, settings)
    x.copy_(torch.randn_like(x) * 3 - 1)
    graph.replay()
    for replayed, eager in zip(recorded, step(x, dz, shortcut, settings), strict=True):
        assert torch.equal(replayed, eager)


@pytest.mark.parametrize("layout", [*LAYOUTS, "transposed"])
def test_no_operation_synchronizes_with_device(layout):
    x, dz, shortcut, settings = make(Case("bfloat16", layout, shape=(4, 64, 28, 28), shortcut=True), "cuda")
    step(x, dz, shortcut, settings)
    with no_synchronization():
        step(x, dz, shortcut, settings)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_backward_allocates_nothing_of_full_size_but_its_gradients(layout):
    x, dz, shortcut, settings = make(Case("bfloat16", layout, shape=(8, 64, 112, 112), shortcut=True), "cuda")
    mean, var = TRITON.statistics(x)
    TRITON.apply_(x, mean, var, settings, shortcut)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sums = TRITON.backward_reduce(x, dz, settings, shortcut)
    gradients = TRITON.backward_apply(x, dz, var, sums, settings, shortcut)
    full_size = sum(g.numel() * g.element_size() for g in gradients if g is not None)
    assert torch.cuda.max_memory_allocated() - before < 1.1 * full_size


def network(x: Tensor, vectors: list[Tensor], kernel: Tensor, activation: str, inplace: bool) -> Tensor:
    """Return six convolutions with norms, every other one with a residual sum in the norm."""
    shortcut = None
    for weight, bias in zip(vectors[::2], vectors[1::2], strict=True):
        y = F.conv2d(x, kernel, padding=1)
        param = ACTIVATIONS[activation]
        x = inplace_abn(
            y, weight, bias, None, None, activation=activation, activation_param=param,
            inplace=inplace, shortcut=shortcut,
        )  # fmt: skip
        shortcut = x if shortcut is None else None
    return x


def run_network(function: Any, layout: str, dtype: torch.dtype, activation: str, inplace: bool = True) -> list[Tensor]:
    """Return output and all gradients of the network."""
    generator = torch.Generator().manual_seed(0)
    x = lay_out(torch.randn(4, 16, 20, 24, generator=generator), layout)
    kernel = torch.randn(16, 16, 3, 3, generator=generator) / 12
    vectors = [torch.rand(16, generator=generator) + 0.5 for _ in range(12)]
    leaves = [t.to("cuda", dtype).requires_grad_() for t in (x, kernel)]
    parameters = [v.cuda().requires_grad_() for v in vectors]
    out = function(leaves[0], parameters, leaves[1], activation, inplace)
    return [out, *torch.autograd.grad(out.float().square().mean(), leaves + parameters)]


@pytest.fixture
def _full_precision(monkeypatch):
    """Compute float32 convolutions in float32, so that results in another order differ by roundings only."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


COMPILED = [
    *((layout, "leaky_relu", {"mode": mode})
      for layout in LAYOUTS for mode in ("default", "max-autotune-no-cudagraphs", "reduce-overhead")),
    ("channels_last", "elu", {"dynamic": True}),
]  # fmt: skip


@pytest.mark.usefixtures("_full_precision")
@pytest.mark.filterwarnings("default")  # the compiler's advice on precision and processors
@pytest.mark.parametrize(("layout", "activation", "options"), COMPILED)
def test_compiled_network_equals_eager(layout, activation, options):
    torch._dynamo.reset()
    eager = run_network(network, layout, torch.float32, activation)
    compiled = torch.compile(network, fullgraph=True, **options)
    for _ in range(3):  # for recorded graphs
        for ours, truth in zip(run_network(compiled, layout, torch.float32, activation), eager, strict=True):
            assert relative_error(ours, truth) < 1e-4


@pytest.mark.usefixtures("_full_precision")
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-5), (torch.bfloat16, 0.2)])
def test_network_gives_outputs_and_gradients_of_reference(dtype, tolerance, layout, inplace):
    ours = run_network(network, layout, dtype, "leaky_relu", inplace)
    with force_back_end("reference"):
        truth = run_network(network, layout, dtype, "leaky_relu", inplace)
    # Rounding errors of bfloat16 grow over six layers: the largest gradient differs from float32 by as much.
    for result, expected in zip(ours, truth, strict=True):
        assert relative_error(result, expected) < tolerance


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_elements_than_32_bits_count_are_right(layout):
    shape = (3, 8, 2**14, 5800)
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("needs 40 GB of memory")
    x = lay_out(torch.zeros(1, 8, 1, 1, dtype=torch.bfloat16, device="cuda").expand(shape), layout)
    assert x.numel() > 2**31
    x[-1, -1, -1, -2:] = 3.0  # at the end of memory
    mean, _ = TRITON.statistics(x)
    count = x.numel() // 8
    assert mean[:-1].abs().max() == 0
    assert relative_error(mean[-1:] * count, torch.tensor([6.0], device="cuda")) < 1e-5
    settings, zero = NormSettings(None, None, 1.0, "leaky_relu", 0.01), torch.zeros(8, device="cuda")
    TRITON.apply_(x, zero, zero, settings)  # eps is 1: nothing changes
    assert x[-1, -1, -1, -2:].tolist() == [3.0, 3.0]
    sums = TRITON.backward_reduce(x, x, settings)
    assert sums[0].tolist() == [0.0] * 7 + [6.0]
    dx, _ = TRITON.backward_apply(x, x, zero, None, settings)
    assert torch.equal(dx[-1, -1, -1], x[-1, -1, -1])


def test_tensor_on_another_device_than_current_one_is_computed_there():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    case = Case("float32", "channels_last", shortcut=True)
    here, there = run(TRITON, case, "cuda:0"), run(TRITON, case, "cuda:1")
    assert all(torch.equal(here[name], there[name].to("cuda:0")) for name in here)
