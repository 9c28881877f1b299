"""Benchmarks measure the named quantities and write one format; no test depends on an absolute time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.refusals import refused
from zoo.benchmark import layer, memory_prediction, model, strategies
from zoo.benchmark.model import measure_strategies
from zoo.benchmark.network_setup import Setup, allow_many_compilations
from zoo.benchmark.results import Case, Results, markdown
from zoo.benchmark.strategies import (
    BASELINE,
    EAGER,
    Strategy,
    all_strategies,
    build_all,
    choose_strategies,
    compile_with_budget,
)
from zoo.config.architectures import ARCHITECTURES
from zoo.config.network import ExternalSpec, NetworkSpec
from zoo.errors import ConfigError
from zoo.layers import InPlaceABN
from zoo.memory.allocations import count_memory, measure_memory
from zoo.memory.timing import Clock, TimedStep, time_interleaved
from zoo.ops import backend, native
from zoo.remat._budget import parse_bytes

CPU = torch.device("cpu")


def setup_of(arch: str, **options: Any) -> Setup:
    return Setup(NetworkSpec(arch=arch), batch=2, size=32, **options)


TINY = setup_of("resnet18", structure=(1, 1, 1, 1))


pytestmark = [
    pytest.mark.slow,  # measures
    # Raised while torch.compile inspects an input that is not a leaf.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),  # decompositions of torch 2.11
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # and its torch.compile
]


NATIVE = pytest.mark.skipif(native.unavailable_reason() is not None, reason="the CPU kernels are not built")


def new_results() -> Results:
    return Results("model", "zoo benchmark model x", CPU, {"threads": 1, "rounds": 2})


def values_of(results: Results, metric: str) -> dict[str, float]:
    return {record["provider"]: record["median"] for record in results.records if record["metric"] == metric}


def test_table_has_words_for_yes_and_no(tmp_path: Path) -> None:
    results = new_results()
    for provider, value in (("lean", 1.0), ("other", 0.0)):
        results.add(Case("net", (2, 3), "float32", "contiguous"), provider, "same bits", "1", [value])
        results.add(Case("net", (2, 3), "float32", "contiguous"), provider, "ratio", "1", [value])
    rows = [line.split("|")[-3:-1] for line in results.write(tmp_path / "x").splitlines() if line.startswith("| net")]
    assert [[cell.strip() for cell in row] for row in rows] == [["yes", "1"], ["no", "0"]]


def test_json_file_has_all_of_record_and_of_header(tmp_path: Path) -> None:
    results = new_results()
    results.add(Case("net", (2, 3), "float32", "contiguous"), "ours", "time", "ms", [1.0, 2.0, 4.0])
    results.note("a remark")
    results.note("a remark")
    text = results.write(tmp_path / "some.name")
    content = json.loads((tmp_path / "some.name.json").read_text())
    assert content["records"] == [
        {"subject": "net", "provider": "ours", "shape": [2, 3], "dtype": "float32", "layout": "contiguous",
         "metric": "time", "unit": "ms", "median": 2.0, "spread": 1.5, "n": 3}
    ]  # fmt: skip
    assert {"machine", "versions", "commit", "settings", "command"} <= content.keys()
    assert content["settings"]["spread"] == "interquartile range"
    assert content["notes"] == ["a remark"]
    assert (tmp_path / "some.name.md").read_text() == text == markdown(content)


class _FakeClock(Clock):
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_steps_alternate_and_each_round_starts_with_different_step() -> None:
    clock, order = _FakeClock(), []

    def step(name: str, seconds: float) -> TimedStep:
        def run(times: int) -> None:
            order.append((name, times))
            clock.now += times * seconds

        return TimedStep(run)

    seconds = time_interleaved({"slow": step("slow", 0.5), "fast": step("fast", 0.002)}, clock, rounds=3, warmup=1)
    assert order[:2] == [("slow", 1), ("fast", 1)]  # the warm-up determines the calls per sample
    assert order[2:] == [("slow", 1), ("fast", 5), ("fast", 5), ("slow", 1), ("slow", 1), ("fast", 5)]
    assert seconds["slow"] == pytest.approx([0.5] * 3)
    assert seconds["fast"] == pytest.approx([0.002] * 3)


@pytest.fixture
def _no_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run captured graphs eagerly, because Inductor takes seconds per layer."""
    captured = strategies.lookup_backend("aot_eager_decomp_partition")
    monkeypatch.setattr(strategies, "lookup_backend", lambda name: captured)


@pytest.mark.usefixtures("_no_inductor")
def test_every_layer_has_all_metrics_and_bytes_known_by_hand() -> None:
    results = new_results()
    layer.measure_layers(results, [(2, 16, 14, 14)], ["float32"], ["contiguous"], rounds=2)
    providers = {record["provider"] for record in results.records if record["subject"] == "norm + activation"}
    assert {BASELINE, "checkpointed std-BN", "compiled std-BN", "compiled iABN", "iABN reference"} <= providers
    assert ("iABN native" in providers) == (native.unavailable_reason() is None)
    held = values_of(results, "held")
    assert held[BASELINE] == pytest.approx(2, abs=0.05)  # x and z
    assert held["iABN reference"] == pytest.approx(1, abs=0.05)  # z
    assert held["checkpointed std-BN"] < 2 * 1 + 0.05
    for metric in ("time", "time ratio", "peak"):
        assert all(value > 0 for value in values_of(results, metric).values())
    assert values_of(results, "time ratio")[BASELINE] == 1
    if native.unavailable_reason() is None:
        assert held["iABN native"] == pytest.approx(1, abs=0.05)


def test_timed_layer_overwrites_input_and_has_reference_gradients() -> None:
    x, dz = torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3)
    norm, other = InPlaceABN(4), InPlaceABN(4)
    token, buffer = torch.ones((), requires_grad=True), x.clone()
    z = norm(layer._AsOperationResult.apply(token, buffer))
    z.backward(dz)
    leaf = x.clone().requires_grad_()
    expected = other(leaf * 1)
    expected.backward(dz)
    torch.testing.assert_close(buffer, expected.detach())
    torch.testing.assert_close(norm.weight.grad, other.weight.grad)


@pytest.mark.usefixtures("_no_inductor")
def test_budgets_of_compiled_models_do_not_get_mixed_up() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*[part for _ in range(3) for part in (nn.Linear(64, 64), nn.GELU())])

    x, held = torch.randn(512, 64), []
    with allow_many_compilations():
        for budget in (1.0, 0.0, 1.0):
            model = build()
            call = compile_with_budget(model, budget)
            held.append(measure_memory(lambda: call(x).sum(), model.parameters()).held)  # noqa: B023
    assert held[0] == held[2]
    assert held[1] < held[0] / 2
    assert torch._functorch.config.activation_memory_budget == 1.0  # the process keeps its budget


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: setup_of("resnet19").build("standard", "plain"), ("resnet19", "resnet18")),
        (lambda: setup_of("resnet18", structure=(1, 1)).build("standard", "plain"), ("4 stages",)),
        (lambda: setup_of("revnext", structure=(1, 1)).build("standard", "plain"), ("revnext", "structure")),
        (lambda: setup_of("revnet38_cifar").reversible_twin(), ("resnet32_cifar",)),
        (lambda: choose_strategies(EAGER, ["nothing"]), ("'nothing'",)),
    ],
)
def test_impossible_setup_raises(call: Callable[[], object], names: tuple[str, ...]) -> None:
    refused(ConfigError, call, *names)


def test_every_value_of_memory_option_is_strategy() -> None:
    values = {memory for record in ARCHITECTURES.values() for memory in record.memory}
    assert {strategy.memory for strategy in EAGER} == values


def test_networks_are_measured_relative_to_eager_std_bn() -> None:
    results = new_results()
    measure_strategies(results, TINY, choose_strategies(EAGER, ["iABN plain", "iABN"]), rounds=2)
    assert [*values_of(results, "held")] == [BASELINE, "iABN plain", "iABN"]
    assert values_of(results, "held ratio")[BASELINE] == values_of(results, "step ratio")[BASELINE] == 1
    assert values_of(results, "held ratio")["iABN"] < values_of(results, "held ratio")["iABN plain"] < 1
    assert results.records[0]["subject"] == "resnet18 (1-1-1-1)"


def test_norms_of_external_network_are_not_replaced() -> None:
    results = new_results()
    setup = Setup(ExternalSpec(arch="torchvision:resnet18"), batch=4, size=64)
    measure_strategies(results, setup, choose_strategies(EAGER, ["std-BN*", "iABN", "RevNet"]), rounds=0)
    held = values_of(results, "held")
    assert [*held] == [
        BASELINE, "std-BN checkpointed", "std-BN checkpointed selectively", "std-BN lean", "std-BN lean 0.4",
    ]  # fmt: skip
    assert max(held["std-BN checkpointed"], held["std-BN lean"]) < held["std-BN checkpointed selectively"]
    assert held["std-BN checkpointed selectively"] < held[BASELINE]
    reason = "torchvision:resnet18 has its own norms, and its memory strategies are plain, checkpoint, lean"
    assert f"not measured: iABN ({reason})" in results.notes
    assert {record["subject"] for record in results.records} == {"torchvision:resnet18"}
    refused(ConfigError, lambda: replace(setup, structure=(1, 1)).build("standard", "plain"), "structure")


def test_failing_strategy_is_noted_unless_it_is_baseline() -> None:
    def refuse(model: nn.Module) -> nn.Module:
        model.register_forward_pre_hook(lambda *_: torch.zeros(2) + torch.zeros(3))
        return model

    results = new_results()
    failing = Strategy("refused", "standard", "plain", change=refuse)
    measure_strategies(results, TINY, [EAGER[0], failing], rounds=0)
    assert [*values_of(results, "held")] == [BASELINE]
    assert results.notes[0].startswith("not measured: resnet18 (1-1-1-1), refused (RuntimeError: The size of tensor a")
    refused(
        RuntimeError,
        lambda: measure_strategies(new_results(), TINY, [replace(failing, name=BASELINE)], rounds=0),
        "size of tensor a",
    )


def test_reversible_networks_are_measured_beside_ordinary_ones() -> None:
    results = new_results()
    measure_strategies(
        results, setup_of("resnet32_cifar"), choose_strategies(EAGER, ["*RevNet*", "std-BN checkpointed"]), rounds=0
    )
    held = values_of(results, "held")
    assert [*held] == [BASELINE, "std-BN checkpointed", "RevNet stored", "RevNet", "RevNet, iABN"]
    assert held["RevNet, iABN"] < held["RevNet"] < held["std-BN checkpointed"] < held["RevNet stored"]


@pytest.mark.parametrize(("text", "count"), [("16GiB", 2**34), ("1.5 MB", 1_500_000), ("7", 7), ("2kib", 2048)])
def test_memory_amounts_are_parsed(text: str, count: int) -> None:
    assert parse_bytes(text) == count


def test_one_image_more_than_the_largest_batch_does_not_fit() -> None:
    prediction = memory_prediction.MemoryPrediction(TINY, EAGER[0])
    limit = prediction.bytes_for(5)
    assert prediction.largest_batch(limit) == 5
    assert prediction.largest_batch(limit - 1) == 4
    assert prediction.largest_batch(1000) == 0


TOLERANCE = 0.05  # relative error of a prediction


def predict_and_count(setup: Setup, strategy: Strategy) -> tuple[int, int]:
    """Return the predicted and the measured peak of a step with the setup's batch, in bytes of tensors."""
    predicted, model = memory_prediction.MemoryPrediction(setup, strategy).bytes_for(setup.batch), strategy.build(setup)
    constant = (
        2 * sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers()) + setup.input_bytes
    )
    return predicted - constant, count_memory(setup.forward_of(model), model.parameters()).peak


def test_segmentation_is_measured_with_pixel_wise_loss() -> None:
    setup = Setup(NetworkSpec(arch="deeplab_resnet18", num_classes=5), batch=2, size=32)
    assert setup.input_bytes == 2 * 32 * 32 * (3 * 4 + 8)
    assert setup.forward_of(lambda images: images.new_zeros(2, 5, 32, 32))().item() == pytest.approx(2 * math.log(5))
    predicted, taken = predict_and_count(replace(setup, batch=4), EAGER[0])
    assert predicted == pytest.approx(taken, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("arch", "kernels"),
    [
        pytest.param("resnet50", "reference", marks=pytest.mark.exhaustive),
        pytest.param("resnet50", "native", marks=NATIVE),
        pytest.param("resnext50", "reference", marks=pytest.mark.exhaustive),
        pytest.param("resnext50", "native", marks=[NATIVE, pytest.mark.exhaustive]),
        pytest.param("densenet121", "reference", marks=pytest.mark.exhaustive),
        pytest.param("densenet121", "native", marks=[NATIVE, pytest.mark.exhaustive]),
    ],
)
def test_predictions_are_within_5_percent_of_real_steps(arch: str, kernels: str) -> None:
    setup = Setup(NetworkSpec(arch=arch), batch=6, size=64, structure=(1, 1, 1, 1))
    strategies = choose_strategies(EAGER, ["std-BN checkpointed", "iABN", "iABN checkpointed"])
    with backend.force_back_end(kernels):
        for strategy in build_all(new_results(), strategies, setup):
            predicted, taken = predict_and_count(setup, strategy)
            assert predicted == pytest.approx(taken, rel=TOLERANCE), strategy.name


def test_held_bytes_of_lean_networks_are_predicted() -> None:
    setup = Setup(ExternalSpec(arch="torchvision:resnet18"), batch=2, size=64)
    for strategy in choose_strategies(EAGER, ["std-BN lean*"]):
        real, abstract = strategy.build(setup), strategy.build(replace(setup, device=torch.device("meta")))
        taken = measure_memory(setup.forward_of(real), real.parameters())
        forward = replace(setup, device=torch.device("meta")).forward_of(abstract)
        predicted = count_memory(forward, abstract.parameters(), warmup=1)
        assert predicted.held == pytest.approx(taken.held, rel=TOLERANCE)


def test_lean_rule_takes_every_budget() -> None:
    model = nn.Linear(2, 2)
    compiled = [each for each in all_strategies([0.0, 0.5, 1.0]) if each.budget is not None]
    assert {each.budget for each in compiled if each.has_lean_rule} == {0.5, 1.0}
    for strategy in compiled:
        assert strategy.prepare(model) is not model


def front() -> dict[str, Any]:
    """Points as dense as in a real run."""
    results = Results("model", "zoo benchmark model x", CPU, {"threads": 1})
    case = Case("net", (2, 3, 8, 8), "float32", "contiguous")
    for index, strategy in enumerate(all_strategies([0.2, 0.5, 1.0])):
        results.add(case, strategy.name, "step ratio", "1", [1 + 0.05 * (index % 5)])
        for metric in ("peak ratio", "held ratio"):
            results.add(case, strategy.name, metric, "1", [1 - 0.04 * (index % 7)])
    results.add(case, "without a time", "peak ratio", "1", [0.1])
    return results.content()


def test_plot_is_a_png() -> None:
    pytest.importorskip("matplotlib")
    assert model.draw_strategies(front()).startswith(b"\x89PNG\r\n")


def test_strategies_are_points_grouped_by_kind() -> None:
    names = {line.label: list(line.names or ()) for line in model.lines_of(front(), "net", "peak")}
    assert names.keys() == {"std-BN", "iABN", "RevNet", "compiled std-BN", "compiled iABN"}
    assert names["compiled iABN"] == [f"compiled iABN, budget {budget}" for budget in ("0.2", "0.5", "1")]
    assert "compiled std-BN, lean rule, budget 0.5" in names["compiled std-BN"]
    assert {"std-BN", "std-BN checkpointed"} <= set(names["std-BN"])
    assert "without a time" not in {name for each in names.values() for name in each}
