"""A limit on the peak of a training step is met with little recomputation, and an impossible limit raises."""

from __future__ import annotations

import copy
import gc
import random
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from itertools import chain, groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import zoo
from tests.remat.programs import are_equal, images, network, peak
from tests.step import step
from zoo.errors import ConfigError
from zoo.remat import Rematerializer, inductor_options, planning
from zoo.remat.budget import Decision
from zoo.remat.lean import lean, plain
from zoo.remat.memory_use import measure_memory
from zoo.torch_internals.data import observer

SIZE_PX = 64


class Count:
    """Counts the measured steps."""

    number = 0


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Count:
    count, measure = Count(), planning._measure

    def counted(*args: Any, **options: Any) -> planning.StepPeak:
        count.number += 1
        return measure(*args, **options)

    monkeypatch.setattr(planning, "_measure", counted)
    return count


def products(width: int = 128) -> nn.Module:
    """Return a network whose products all have the same price."""
    torch.manual_seed(0)
    return nn.Sequential(*chain.from_iterable((nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(12)))


def price(model: nn.Module) -> float:
    flops_per_byte: float = vars(model)["_zoo_lean"].flops_per_byte
    return flops_per_byte


def assert_met(build: Callable[[], nn.Module], x: Tensor, share: float) -> None:
    """Assert that the peak is met, at a share of the way from the least to that without a budget."""
    most, least = (peak(lean(build(), budget), x) for budget in (None, "1000000 FLOP/B"))
    limit = round(1.03 * (least + share * (most - least)))
    model = lean(build(), limit)
    found = peak(model, x)
    assert 0.9 * limit < found <= limit
    assert price(model) > 0


@pytest.mark.parametrize(
    "share", [0.5, pytest.param(0.1, marks=pytest.mark.exhaustive), pytest.param(0.8, marks=pytest.mark.exhaustive)]
)
def test_peak_is_close_below_limit_after_few_measured_steps(share: float, measured: Count) -> None:
    assert_met(products, torch.randn(768, 128), share)
    assert measured.number <= 1 + planning.MAX_TRIALS


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "mobilenet_v3_small",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("resnet18", "efficientnet_b0", "convnext_tiny", "densenet121", "swin_t")
        ),
    ],
)
def test_peak_of_whole_networks_is_close_below_limit(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 96, 96)
    build = getattr(torchvision.models, name)
    assert_met(build, x, 0.4)


@pytest.mark.parametrize("autocast", [False, True])
def test_all_results_are_bit_identical_to_plain_training(autocast: bool, measured: Count) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Hardtanh(-9, 9), nn.Sequential(nn.ReLU(inplace=True), network(), nn.Dropout(0.5)))

    limit = round(0.97 * peak(lean(build()), images(SIZE_PX)))
    plain, model = build(), build()
    lean(model[1], limit)
    for _ in range(2):
        assert are_equal(step(model, images(SIZE_PX), autocast), step(plain, images(SIZE_PX), autocast))
    assert measured.number >= 2


def test_generous_limit_recomputes_no_product(measured: Count) -> None:
    model, x = lean(products(), "1GB"), torch.randn(256, 128)
    model(x).sum().backward()
    assert price(model) == 0
    assert measured.number == 2


def test_unreachable_limit_raises_with_minimum() -> None:
    x = torch.randn(768, 128)
    least = peak(lean(products(), "1000000 FLOP/B"), x)
    match = r"without the state of the optimizer, .* at least \d+\.\d\d MB, more than the limit of 1\.00 MB"
    with pytest.raises(ConfigError, match=match) as error:
        lean(products(), "1MB")(x)
    minimum = float(str(error.value).split("at least ")[1].split()[0])
    assert minimum == pytest.approx((least - x.nbytes) / (1 - planning.MARGIN) / 1e6, rel=0.01)  # without the output


def test_existing_optimizer_state_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["torch.optim.optimizer"]
    monkeypatch.setattr(module, "_global_optimizer_post_hooks", OrderedDict())  # without the hooks of earlier tests
    planning.watch_optimizers.cache_clear()
    try:
        model, x = lean(nn.Linear(512, 512)), torch.randn(8, 512)
        optimizer = torch.optim.Adam(model.parameters())
        model(x).sum().backward()
        optimizer.step()
        with pytest.raises(ConfigError, match=r"budget of zoo\.lean: a training step takes at least"):
            lean(model, "1MB")(x)
    finally:
        planning.watch_optimizers.cache_clear()


def test_only_larger_batch_is_measured_again(measured: Count) -> None:
    model, x = products().to("meta"), torch.randn(768, 128, device="meta")
    most = zoo.memory_report(model, x, budget="1GB").peak
    optimizer = torch.optim.Adam(lean(model, round(1.05 * most)).parameters())
    counts, prices = [], []
    for size in (768, 768, 256):  # in the second step, the optimizer has its state
        model(x[:size]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(measured.number)
        prices.append(price(model))
    assert 1 < counts[0] == counts[1] == counts[2]
    assert prices[0] == 0 < prices[1] == prices[2]
    with pytest.raises(ConfigError, match="at least"):
        model(torch.randn(8192, 128, device="meta"))


def test_existing_gradients_are_part_of_peak() -> None:
    model, x = products(512), torch.randn(256, 512)
    limit = round(1.5 * peak(lean(products(512)), x))
    lean(model, limit)(x).sum().backward()
    before = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    planned = vars(model)["_zoo_lean"].planned
    model(x)
    gradients = sum(each.nbytes for each in before)
    step = planned.steps[price(model)]
    assert step.peak - gradients <= step.accumulating < step.peak
    assert are_equal([each.grad for each in model.parameters() if each.grad is not None], before)


def test_scalar_output_is_loss() -> None:
    class WithLoss(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            scores = super().forward(x)
            return {"loss": scores.mean(), "scores": scores}

    x = torch.randn(256, 128, device="meta")
    networks = WithLoss(128, 4096, device="meta"), nn.Linear(128, 4096, device="meta")
    peaks = [zoo.memory_report(each, x, budget="1GB").peak for each in networks]
    assert peaks[0] < peaks[1] - 4 * 256 * 4096  # no logarithm of the softmax


def test_outputs_hiding_tensors_raise() -> None:
    class Hiding(nn.Linear):
        def forward(self, x: Tensor) -> object:
            return object()

    with pytest.raises(ConfigError, match="no output of type object requires gradients"):
        lean(Hiding(2, 2), "1GB")(torch.randn(1, 2))


@pytest.mark.parametrize(
    ("use", "budget"),
    [(Rematerializer, "8GB"), (Rematerializer, 0.4), (Rematerializer, "40%"), (inductor_options, "8GB")],
)
def test_limit_needs_module(use: Callable[[float | str], object], budget: float | str) -> None:
    with pytest.raises(ConfigError, match=r"use zoo\.lean"):
        use(budget)


def share_of(model: nn.Module, x: Tensor) -> float:
    """Return the share of the bytes of plain training that a planned lean network holds."""
    log: list[Decision] = []
    budget = vars(model)["_zoo_lean"]
    with plain(model), Rematerializer(budget, log=log, parameters=[*model.parameters(), *model.buffers()]):
        model(x)
    return sum(each.lean_bytes for each in log) / sum(each.plain_bytes for each in log)


@pytest.mark.parametrize("share", [0.5, 0.3, 0.2])
@pytest.mark.parametrize(
    "name", ["resnet18", *(pytest.param(name, marks=pytest.mark.slow) for name in ("convnext_tiny", "swin_t"))]
)
def test_fraction_is_met_from_the_first_step_on(name: str, share: float) -> None:
    model, x = getattr(torchvision.models, name)().to("meta"), torch.randn(4, 3, 96, 96, device="meta")
    found = []
    handle = model.register_forward_hook(lambda *_: found.append(vars(model)["_zoo_lean"].flops_per_byte))
    lean(model, share)(x)
    handle.remove()
    assert len(found) == 1  # other passes leave nothing in the lists of hooks
    least = share_of(lean(copy.deepcopy(model), "1e9 FLOP/B"), x)
    assert share_of(model, x) <= max(share, 1.01 * least)


def test_fraction_is_planned_again_for_larger_batches_only() -> None:
    plain_model, model = products(), lean(products(), 0.4)
    calls: list[int] = []
    printed: Callable[[int], None] = calls.append
    model[0].register_forward_pre_hook(observer(lambda _, args: printed(len(args[0]))))
    for size in (512, 512, 256, 768):
        torch.manual_seed(1)
        x = torch.randn(size, 128)
        assert are_equal(step(plain_model, x), step(model, x))
    assert [(size, len(list(group))) for size, group in groupby(calls)] == [(512, 1 + 2), (256, 1), (768, 1 + 1)]
    assert share_of(model, x) <= 0.4


def test_fraction_supports_any_outputs() -> None:
    class Hiding(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return SimpleNamespace(scores=super().forward(x).exp().sin())

    x = torch.randn(256, 128)
    results = []
    for budget in (None, 0.3):
        torch.manual_seed(0)
        model = Hiding(128, 128)
        (lean(model, budget)(x) if budget else model(x)).scores.sum().backward()
        results.append([each.grad for each in model.parameters()])
    assert are_equal(*results)


@pytest.mark.parametrize("kind", ["frozen", "nothing saved", "lazy"])
def test_call_saving_nothing_is_not_planned(kind: str) -> None:
    build = {"frozen": network, "nothing saved": nn.Identity, "lazy": lambda: nn.LazyLinear(8)}[kind]
    model, x = lean(build(), 0.4), images(SIZE_PX)
    if kind == "frozen":
        model.requires_grad_(False)
    model(x)
    assert vars(model)["_zoo_lean"].planned.input_bytes == -1


@pytest.mark.slow
def test_on_meta_device_report_takes_no_memory() -> None:
    x = torch.randn(768, 128)
    limit = round(0.9 * peak(lean(products()), x))
    real = zoo.memory_report(products(), x, budget=limit)
    found = zoo.memory_report(products().to("meta"), x.to("meta"), budget=limit)
    assert found.peak == pytest.approx(real.peak, rel=0.06)
    assert f"lean {found.peak / 1e6:.3g} MB" in str(found)
    with pytest.raises(ConfigError, match="at least"):
        zoo.memory_report(products().to("meta"), x.to("meta"), budget="1MB")


@pytest.mark.parametrize("kind", ["frozen", "integers"])
def test_call_without_gradients_is_not_planned(kind: str, measured: Count) -> None:
    plain, x = network(), images(SIZE_PX)
    plain.requires_grad_(kind == "integers")
    model = lean(copy.deepcopy(plain), "1GB")
    for each in (plain, model):
        each.register_forward_hook(lambda *args: args[-1].argmax(1) if kind == "integers" else None)
    assert are_equal([plain(x)], [model(x)])
    assert are_equal(plain.buffers(), model.buffers())
    assert measured.number == (kind == "integers")
    if kind != "integers":
        head = nn.Linear(5, 2)
        head(model(x)).sum().backward()
        assert head.weight.grad is not None


def test_first_step_of_lazy_modules_is_not_planned(measured: Count) -> None:
    def lazy() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Dropout(), nn.LazyConv2d(4, 3))

    plain, model = lazy(), lean(lazy(), "1GB")
    for number in range(2):
        torch.manual_seed(1)
        expected = step(plain, images(SIZE_PX))
        torch.manual_seed(1)
        assert are_equal(expected, step(model, images(SIZE_PX)))
        assert bool(measured.number) == bool(number)


@pytest.mark.usefixtures("no_collector")
def test_planning_leaves_no_memory_in_cycles() -> None:
    model, x = lean(products(), "1GB"), torch.randn(256, 128)
    output = model(x)
    assert gc.collect() < 100
    output.sum().backward()


def test_planning_collects_its_own_garbage_alone() -> None:
    class Node:
        pass

    gc.disable()
    gc.unfreeze()  # what the tests have frozen
    try:
        node = Node()
        node.itself = node
        older = weakref.ref(node)
        del node
        lean(products(), "1GB")(torch.randn(256, 128)).sum().backward()
        assert older() is not None
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()
        gc.freeze()


def test_least_limit_suffices_if_outputs_are_freed() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8192))

    x = torch.randn(512, 64)
    with pytest.raises(ConfigError, match="at least") as error:
        lean(build(), "1MB")(x)
    least = round(1.001e6 * float(str(error.value).split("at least ")[1].split()[0]))
    model, target = lean(build(), least), torch.zeros(512, dtype=torch.long)
    existing = sum(each.nbytes for each in (*model.parameters(), x))
    with pytest.warns(planning.OutputsAreFreed, match="without assigning the outputs"):
        found = measure_memory(lambda: F.cross_entropy(model(x), target), model.parameters()).peak
    assert 0.9 * least < existing + found <= least
    assert found < peak(lean(build()), x) - existing - 4 * 500 * 8192  # the outputs


def test_planning_restores_all_generators() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.generator = nn.Linear(8, 8), torch.Generator().manual_seed(0)
            self.others = [random.Random(0), np.random.default_rng(0), np.random.RandomState(0)]

        def forward(self, x: Tensor) -> Tensor:
            draws = [random.random(), np.random.random(), *(each.random() for each in self.others)]
            self.drawn = (*draws, torch.rand(1).item(), torch.rand(1, generator=self.generator).item())
            return self.layer(x)

    drawn = []
    for budget in (None, "1GB"):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        model = lean(Dropping(), budget)
        model(torch.ones(1, 8))
        drawn.append(model.drawn)
    assert drawn[0] == drawn[1]


def test_profiler_of_user_continues() -> None:
    model, x = lean(products(), "1GB"), torch.randn(256, 128)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        model(x).sum().backward()
        zoo.memory_report(products(), x, budget="1GB")
    assert any(event.name == "aten::addmm" for event in profiler.events())


def test_planning_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    lean(nn.Sequential(nn.Linear(8, 8)), "1GB")(torch.ones(1, 8)).sum().backward()
    assert capfd.readouterr() == ("", "")


def test_products_read_by_recipes_count() -> None:
    def network() -> nn.Module:  # autograd saves the outputs of the ReLUs
        return nn.Sequential(*chain.from_iterable((nn.Linear(128, 128), nn.ReLU()) for _ in range(8)))

    assert_met(network, torch.randn(768, 128), 0.3)
