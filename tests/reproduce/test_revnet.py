"""`zoo reproduce revnet` measures its numbers as described, and every published number has a row."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.reproduce.runs import by_key, run_of
from zoo.config.parse import experiments_dir, load_experiment
from zoo.reproduce import error_rates
from zoo.reproduce import revnet_figure4 as figures
from zoo.reproduce import revnet_table1 as table1
from zoo.reproduce import revnet_tables2to5 as tables2to5
from zoo.reproduce.comparison import ReportSection
from zoo.reproduce.paper_networks import build_for_training
from zoo.reproduce.published_numbers import published_number, published_numbers
from zoo.reproduce.training_runs import TrainingRun

NUMBERS = published_numbers("revnet")
WHOLE = {"num_training_images": 50_000, "num_validation_images": 10_000}


def states(section: ReportSection) -> dict[str, str]:
    return {key: comparison.verdict.state for key, comparison in by_key(section).items()}


class PredictionByHand:
    """Predicts 100 bytes, and 10 for each image."""

    def __init__(self, per_image: int) -> None:
        self.per_image = per_image

    def bytes_for(self, batch: int) -> int:
        return 100 + self.per_image * batch

    def largest_batch(self, memory_bytes: int) -> int:
        return (memory_bytes - 100) // self.per_image


@pytest.mark.parametrize(
    ("per_image", "images", "states_of"),
    [(10, 96, "better off"), (16, 60, "reproduced off"), (7, 137, "better reproduced")],
)
def test_predicted_networks_fit_into_memory(
    monkeypatch: pytest.MonkeyPatch, per_image: int, images: int, states_of: str
) -> None:
    made = {"plain": PredictionByHand(30), "auto": PredictionByHand(per_image)}
    monkeypatch.setattr(tables2to5, "MemoryPrediction", lambda _, strategy, **__: made[strategy.memory])
    found = by_key(tables2to5.measure_fits())
    keys = ("section7.1/per_gpu", "section7.2/images")
    assert [found[key].measured for key in keys] == [images, images]
    assert " ".join(found[key].verdict.state for key in keys) == states_of
    assert (found["section7.2/layers"].measured, found["section7.2/layers"].verdict.state) == (602, "reproduced")


@pytest.mark.parametrize(
    ("strategy", "calls"),
    # Of 4 blocks, the first is run 3 times and the third twice; a G that ends a checkpoint runs one time less.
    [("naive", 1), ("reversible", 2), ("checkpoint recursively", 13 / 8)],
)
def test_calls_of_f_and_g_are_counted(strategy: str, calls: float) -> None:
    assert table1.measure_cost(table1.CHAIN_STRATEGIES[strategy], 4).calls == calls


def test_operation_counts_equal_manual_count() -> None:
    """A product of 2 x 5 with 3 x 5 numbers takes 30 multiplications; so does each backward product."""
    layer, x = nn.Linear(5, 3, bias=False), torch.randn(2, 5, requires_grad=True)
    with table1.OperationLog() as forward:
        y = layer(x).sum()
    with table1.OperationLog() as backward:
        y.backward()
    assert (forward.total, backward.total) == (2 * 30, 4 * 30)


def test_reconstruction_takes_one_more_forward_pass() -> None:
    forward, backward = table1.count_operations(build_for_training("revnet38_cifar", "meta"))
    _, stored = table1.count_operations(build_for_training("revnet38_cifar", "meta", memory="plain"))
    assert (backward - stored) / forward == pytest.approx(1, abs=0.1)


def test_parameter_counts_equal_published_ones() -> None:
    found = {key: comparison.verdict for key, comparison in by_key(tables2to5.measure_parameters()).items()}
    assert len(found) == 14
    assert {verdict.state for verdict in found.values()} == {"reproduced"}
    assert found["table2/revnet104/parameters_1000"].reason == "+0.5 %", "the same tolerance as in Table 5"
    assert published_number("revnet", "table2/revnet104/parameters_1000").finding


def test_outputs_of_imagenet_networks_equal_manual_sum() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Flatten(), nn.ReLU())
    assert tables2to5.sum_of_outputs(model, 8) == 4 * (4 * 64 + 2 * 4 * 64 + 4 * 16)


@pytest.mark.slow
def test_revnet_104_exceeds_published_memory_ratio() -> None:
    section = tables2to5.measure_imagenet_memory(size=64)
    paper, shipped = (c.verdict.state for c in section.comparisons if c.published == NUMBERS["table5/ratio"])
    assert (paper, shipped, states(section)["table5/revnet104/parameters"]) == ("reproduced", "better", "reproduced")


def test_errors_are_judged_by_spread_of_runs() -> None:
    name, number = "revnet38_cifar10", tables2to5.CIFAR_ERRORS["revnet38_cifar10"]  # 7.24 %

    def state(*top1: float, **counts: int) -> tuple[str, int, float | None]:
        runs = [run_of(name, each, seed=seed, **{**WHOLE, **counts}) for seed, each in enumerate(top1)]
        (found,) = error_rates.errors_of(name, number, runs)
        assert found.measured == pytest.approx(100 - sum(top1) / len(top1))
        return found.verdict.state, found.n, found.spread

    assert state(92.5, 92.6, 92.7) == ("reproduced", 3, pytest.approx(0.1 / math.sqrt(3)))
    assert state(92.5, 92.7)[0] == "underpowered", "two runs reproduce nothing"
    assert state(91.0, 91.2) == ("off", 2, pytest.approx(0.1))
    assert state(92.0, 93.4)[0] == "underpowered", "within the tolerance, but so would be many others"
    assert state(90.0, 94.0)[0] == "underpowered", "the difference is less than twice its error"
    of_one = pytest.approx(math.hypot(100 * math.sqrt(0.927 * 0.073 / 10_000), 0.5))
    assert state(92.7) == ("underpowered", 1, of_one), "runs of the same settings differ"
    assert state(92.0)[0] == "underpowered"
    assert state(91.0)[0] == "off"
    assert state(92.5, 92.7, num_validation_images=2_000)[0] == "underpowered"
    assert state(80.0, 80.1, num_training_images=10_000)[0] == "underpowered", "a part of the images, with any score"


def test_runs_without_number_of_images_are_underpowered() -> None:
    name, number = "revnet38_cifar10", tables2to5.CIFAR_ERRORS["revnet38_cifar10"]
    (found,) = error_rates.errors_of(name, number, [run_of(name, top1, seed=int(top1)) for top1 in (92.0, 93.0)])
    assert str(found.verdict).startswith("underpowered: the number of images trained on is not recorded; +0.26 points")


def test_unfinished_run_gives_its_training_command() -> None:
    for comparison in tables2to5.report_cifar_errors([]).comparisons:
        assert comparison.measured is None
        assert str(comparison.verdict) == f"not measured: `zoo train {comparison.published.network} DATA`"
    begun = run_of("revnet38_cifar10", 10.0, num_epochs=3)
    found = by_key(tables2to5.report_cifar_errors([begun]))["table3/revnet38_cifar10"]
    assert found.verdict.reason.endswith("; a run has 3 of 160 epochs")


def trained(name: str, *top1: float, **changes: Any) -> list[TrainingRun]:
    return [run_of(name, each, seed=seed, **WHOLE, **changes) for seed, each in enumerate(top1)]


def test_revnets_are_compared_with_their_resnets() -> None:
    worse = [*trained("revnet38_cifar10", 92.0, 92.1), *trained("resnet32_cifar10", 93.0, 93.1)]
    better = [*trained("revnet164_cifar10", 95.0, 95.1), *trained("resnet164_cifar10", 93.0, 93.1)]
    missing, first, second = tables2to5.report_differences([*worse, *better]).comparisons
    assert missing.verdict.state == "not measured"
    assert "resnet110_cifar10" in missing.verdict.reason
    assert "revnet38_cifar10," not in missing.verdict.reason
    assert (first.measured, first.verdict.state, first.n) == (pytest.approx(1.0), "off", 2)
    assert (second.measured, second.verdict.state) == (pytest.approx(-2.0), "reproduced")


def metered(run: TrainingRun, *degrees: float | None) -> TrainingRun:
    return replace(run, angles=[{"step": 10 * step, "degrees": value} for step, value in enumerate(degrees, start=1)])


def test_angles_are_drawn_beside_length_of_stable_training() -> None:
    (run,) = trained(figures.LONG_CIFAR_EXPERIMENT, 94.0)
    section = figures.report_reconstruction([metered(run, 0.5, 9.0, 3.0)])
    more = by_key(section)["figure4/more_epochs"]
    assert (more.measured, more.verdict.state) == (4, "reproduced")
    assert section.panels[0].lines[0].y == [0.5, 9.0, 3.0]


def test_non_finite_angle_is_not_drawn() -> None:
    (run,) = trained(figures.CIFAR_EXPERIMENT, 94.0)
    section = figures.report_reconstruction([metered(run, 1.0, None)])
    assert section.panels[0].lines[0].y == [1.0]


def test_jump_of_error_after_regular_training_is_unstable() -> None:
    (run,) = trained(figures.LONG_CIFAR_EXPERIMENT, 94.0)
    jumped = replace(run, epochs=[*run.epochs[:-1], {"epoch": 164, "val_top1": 90.0}])
    assert states(figures.report_reconstruction([jumped]))["figure4/more_epochs"] == "off"


def test_longer_training_adds_epochs_and_meter() -> None:
    regular, longer = (
        load_experiment(experiments_dir() / f"{name}.json").model_dump()
        for name in (figures.CIFAR_EXPERIMENT, figures.LONG_CIFAR_EXPERIMENT)
    )
    more = NUMBERS["figure4/more_epochs"].number
    longer["optimizer"]["schedule"]["epochs"] -= more
    longer["training"]["gradient_angle_meter"] = 0
    assert {**longer, "expected": None} == {**regular, "expected": None}
