"""Random programs, and all programs that once failed, compute the same bits with and without lean."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.remat.hunt.found import FOUND, VERDICTS
from tests.remat.hunt.judge import (
    RIGHT,
    WRONG,
    Verdict,
    compiled_programs,
    judge,
    judge_compiled,
    programs,
    shrink,
)
from tests.remat.hunt.programs import Program, program
from tests.remat.hunt.writer import write
from zoo.remat import _recording as recording
from zoo.remat._limit import Measurement
from zoo.remat._rules import RULES, rule_of
from zoo.remat.inductor import _partition as partition


@pytest.mark.parametrize("budget", [None, 0.3])
@pytest.mark.parametrize("name", FOUND, ids=str)
def test_regression_program_trains_correctly(name: str, budget: float | None) -> None:
    found = FOUND[name]
    verdict = judge(found if found.budget is not None else replace(found, budget=budget))
    assert verdict.verdict in VERDICTS.get(name, (RIGHT,)), verdict


@pytest.mark.parametrize("name", [name for name in FOUND if FOUND[name].turn], ids=str)
def test_program_that_changes_trains_correctly_within_bytes(name: str) -> None:
    verdict = judge(replace(FOUND[name], budget="4MB"))
    Measurement.finish()
    assert verdict.verdict == RIGHT, verdict


def describe(program: Program, verdict: Verdict) -> str:
    return f"{verdict.verdict}: {verdict.detail}\n{shrink(program, seconds=10.0)}"


#: The programs of this seed run control flow, which compiles.
COMPILING = pytest.param(25, 3, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("count", "seed"),
    [
        *((25, seed) for seed in (0, 1, 2, 4, 5, 6, 7)),
        COMPILING,
        pytest.param(20000, 8, marks=pytest.mark.exhaustive),
    ],
)
def test_random_programs_train_correctly(count: int, seed: int) -> None:
    for each, verdict in programs(count, seed):
        assert not verdict.is_failure, describe(each, verdict)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("count", "seed"), [(5, 0), pytest.param(200, 2, marks=pytest.mark.exhaustive)])
def test_random_programs_have_results_of_inductor_with_lean_rule(count: int, seed: int) -> None:
    for each, verdict in compiled_programs(count, seed):
        assert not verdict.is_failure, f"{verdict.verdict}: {verdict.detail}\n{each}"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_wrong_recomputation_by_inductor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    call = partition._Rewriting._call

    def call_wrongly(self: Any, user: Any, target: Any, *others: Any) -> Any:
        aten = torch.ops.aten
        return call(self, user, aten.add.Tensor if target is aten.mul.Tensor else target, *others)

    found = program("a = conv(x); b = sigmoid(a); c = mul(b, b); d = conv(c)")
    assert judge_compiled(found).verdict == RIGHT
    monkeypatch.setattr(partition._Rewriting, "_call", call_wrongly)
    assert judge_compiled(found).verdict == WRONG


@pytest.mark.slow
def test_wrong_rule_is_found_and_its_program_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    silu = torch.ops.aten.silu.default
    monkeypatch.setattr(recording, "_traits", {})
    monkeypatch.setitem(RULES, silu, rule_of(silu)._replace(repeat=torch.ops.aten.sigmoid.default))
    wrong = next(each for each, verdict in programs(2000, seed=0) if verdict.verdict == WRONG)
    smallest = shrink(wrong)
    assert judge(smallest).verdict == WRONG
    assert len(smallest.steps) <= 4
    calling_it = {"silu", "silu_", "autocast", "norm_cast", "norm_cast_tracked", "norm_of_bfloat16"}
    assert calling_it & {step.name for step in smallest.steps}
    monkeypatch.undo()
    assert judge(smallest).verdict == RIGHT


def test_program_round_trips_and_depends_only_on_seed() -> None:
    for seed in range(20):
        found, _ = write(seed)
        assert eval(str(found), {"program": program}) == found
        assert write(seed)[0] == found
