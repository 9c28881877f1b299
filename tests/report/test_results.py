"""A measured score stands beside the expected one of the same protocol."""

from __future__ import annotations

from zoo.config import Expected
from zoo.engine.validation import Result
from zoo.report.results import results_table


def _result(protocol: str) -> Result:
    return Result(top1=77.5, top5=93.25, loss=0.9, count=50_000, skipped=2, protocol=protocol)


def test_the_expected_score_follows_the_measured_one_of_its_protocol() -> None:
    expected = Expected.model_validate({"source": "README", "scores": {"tencrop32": {"top1": 78.0, "top5": 94.0}}})
    lines = results_table("net", [_result("center224"), _result("tencrop32-scale36")], expected).splitlines()
    assert [cell.strip() for cell in lines[3].split("|")[1:3]] == ["net", "tencrop32-scale36"]
    assert [cell.strip() for cell in lines[4].split("|")[1:-1]] == [
        *("expected: README", "tencrop32-scale36", "78.00", "94.00", "", "", ""),
    ]
    assert len(lines) == 5


def test_a_result_shows_all_its_numbers() -> None:
    line = results_table("net", [_result("center224")], None).splitlines()[2]
    assert [cell.strip() for cell in line.split("|")[1:-1]] == [
        *("net", "center224", "77.50", "93.25", "0.90", "50000", "2"),
    ]
