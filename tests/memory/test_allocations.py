"""Two independent counters of a step's bytes agree with each other, with manual calculation and with the process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from tests.remat.programs import Scalar
from zoo.layers import InPlaceABN
from zoo.memory.allocations import Memory, count_memory, measure_memory, summarize
from zoo.remat._step_log import Change

Counter = Callable[..., Memory]
COUNTERS = [measure_memory, count_memory]
CHANNELS = 8
UNIT = 4 * CHANNELS * 64 * 64 * 4  # bytes of one activation of the net below
NORMS: dict[str, Callable[[], list[nn.Module]]] = {
    "out of place": lambda: [nn.BatchNorm2d(CHANNELS), nn.LeakyReLU(0.01)],
    "in-place activation": lambda: [nn.BatchNorm2d(CHANNELS), nn.LeakyReLU(0.01, inplace=True)],
    "in-place norm": lambda: [InPlaceABN(CHANNELS)],
}


def net(norm: str, device: str = "cpu", is_lean: bool = False) -> tuple[Callable[[], Tensor], list[nn.Parameter]]:
    """Return the forward of six times convolution -> norm -> activation and a last convolution, and the parameters."""
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False), *NORMS[norm]()]
    model = nn.Sequential(*layers, nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False)).to(device)
    model = zoo.lean(model) if is_lean else model
    x = torch.randn(4, CHANNELS, 64, 64, device=device)
    return lambda: model(x).square().mean(), list(model.parameters())


@pytest.mark.parametrize("counter", COUNTERS)
@pytest.mark.parametrize(("norm", "units"), [("out of place", 18), ("in-place activation", 12), ("in-place norm", 6)])
def test_held_bytes_equal_manual_count(counter: Counter, norm: str, units: int) -> None:
    # The last convolution's output is saved by the square; the image is not counted, statistics are vectors.
    assert counter(*net(norm)).held / UNIT == pytest.approx(units + 1, abs=0.01)


@pytest.mark.parametrize("norm", NORMS)
def test_meta_device_holds_the_same_bytes_as_real_one(norm: str) -> None:
    # An allocator rounds nothing up on the CPU; only the 4-byte scratch of reductions differs.
    assert count_memory(*net(norm, "meta")).held == pytest.approx(measure_memory(*net(norm)).held, abs=256)


@pytest.mark.parametrize("counter", COUNTERS)
def test_peak_of_elementwise_operations_equals_manual_count(counter: Counter) -> None:
    weight = nn.Parameter(torch.ones(1000))
    memory = counter(lambda: weight.exp().sum(), [weight])
    # The exponential is kept, and alive while the gradient is computed from it.
    assert memory.held == pytest.approx(4000, abs=64)
    assert memory.gradients == 4000
    assert memory.peak == pytest.approx(8000, abs=64)
    assert memory.peak_without_gradients == pytest.approx(4000, abs=64)


def sine_of_overwritten(x: Tensor, first: nn.Module) -> Tensor:
    hidden = first(x)
    out = hidden.sin().exp()
    return out + hidden.mul_(2)  # lean training copies it before: the recipe of the sine starts from it


#: Networks for which lean training packs masks into bits, or copies tensors, while dispatch modes are disabled.
HIDDEN: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: Scalar(lambda x, first: F.dropout(first(x).relu(), 0.5).sin(), nn.Linear(64, 64)),
    "frozen layers": lambda: Scalar(
        lambda x, first, frozen: F.relu(frozen(F.relu(frozen(first(x))))),
        nn.Conv1d(64, 64, 3),
        nn.Conv1d(64, 64, 3).requires_grad_(False),
    ),
    "overwritten input": lambda: Scalar(sine_of_overwritten, nn.Linear(64, 64)),
    "dropout of attention": lambda: Scalar(
        lambda x, first: F.dropout((first(x) @ x.mT).softmax(-1), 0.1) @ x, nn.Linear(64, 64)
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_counted_bytes_of_lean_training_include_bits_and_copies(name: str) -> None:
    torch.manual_seed(0)
    model, x = zoo.lean(HIDDEN[name]()), torch.randn(8, 64, 64)
    counted, measured = (counter(lambda: model(x), model.parameters(), warmup=1) for counter in COUNTERS[::-1])
    assert [counted.held, counted.peak] == pytest.approx([measured.held, measured.peak], abs=256)


class _Hiding(torch.autograd.Function):
    """Multiplies by two, and hides a copy of its input from autograd."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        hidden = x.clone()
        ctx.recompute = lambda: hidden
        return 2 * x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return 2 * grad + 0 * ctx.recompute()


@pytest.mark.parametrize("counter", COUNTERS)
def test_tensors_hidden_in_closures_are_counted(counter: Counter) -> None:
    weight = nn.Parameter(torch.ones(1000))
    assert counter(lambda: _Hiding.apply(weight).sum(), [weight]).held == pytest.approx(4000, abs=64)


@pytest.mark.slow
def test_tensors_inside_compiled_graph_are_counted() -> None:
    first, second, x = nn.Parameter(torch.ones(64, 512)), nn.Parameter(torch.ones(512, 64)), torch.ones(256, 64)
    compiled = torch.compile(lambda: ((x @ first) @ second).square().sum(), backend="aot_eager", fullgraph=True)
    held = measure_memory(compiled, [first, second]).held
    assert held == pytest.approx(4 * (256 * 512 + 256 * 64), abs=64)  # both products, nothing else


def test_tensors_from_before_the_step_do_not_count() -> None:
    weight = nn.Parameter(torch.ones(1000))
    older = [torch.ones(10_000)]

    def forward() -> Tensor:
        older.clear()
        return weight.exp().sum()

    assert measure_memory(forward, [weight], warmup=0).held == pytest.approx(4000, abs=64)
    assert weight.grad is None


def test_reused_address_counts_while_its_tensor_is_alive() -> None:
    changes = [Change(1, 100), Change(1, 0), Change(1, 70), Change(2, 20), Change(2, 0), Change(9, 0), Change(3, 50)]
    assert summarize(changes, 4, set()) == Memory(held=90, peak=120, peak_without_gradients=120, gradients=0)
    assert summarize(changes, 4, {3}) == Memory(held=90, peak=120, peak_without_gradients=100, gradients=50)
    assert summarize(changes, 7, {1}) == Memory(held=120, peak=120, peak_without_gradients=100, gradients=70)


PROCESS = """
import gc, re, torch
from torch import nn
from zoo.memory.allocations import measure_memory
from zoo.layers import InPlaceABN

def status(key):
    return 1024 * int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read()).group(1))

model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(64, 64, bias=False), InPlaceABN(64))])
x = torch.randn(100_000, 64)
memory = measure_memory(lambda: model(x).square().sum(), model.parameters())
gc.collect()
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
loss = model(x).square().sum()
held = status("VmRSS") - before
loss.backward()
print(memory.held, held, memory.peak, status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_operating_system_reports_the_same_bytes() -> None:
    # Every tensor in pages of its own, given back when it is freed.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    finished = subprocess.run(
        [sys.executable, "-c", PROCESS], env=environment, capture_output=True, text=True, check=True
    )
    held, held_seen, peak, peak_seen = map(int, finished.stdout.split())
    assert held_seen == pytest.approx(held, rel=0.01)
    assert peak_seen == pytest.approx(peak, rel=0.01)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("is_lean", [False, True])
def test_statistics_of_gpu_allocator_are_unchanged(norm: str, is_lean: bool) -> None:
    forward, parameters = net(norm, "cuda", is_lean)
    memory = measure_memory(forward, parameters)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    loss = forward()
    held = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
    loss.backward()
    assert memory.held == held
    assert memory.peak == torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
