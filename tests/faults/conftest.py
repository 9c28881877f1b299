"""The tiny finished run of the command line's tests, and the table of faults that `make faults` prints at its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from tests.cli.conftest import finished

__all__ = ["finished"]

WIDTH = 110


@pytest.fixture
def count(examples: int, record_property: Callable[[str, object], None]) -> int:
    """Return the number of cases of a test of `tests.faults.fuzz`, which the table shows."""
    record_property("cases", examples)
    return examples


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-table", action="store_true", help="print the table: fault, cases, outcome")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print a row per test function, whose name is a sentence about a fault.

    Each set of parameters is a case. A test that goes through cases by itself says how many with
    `record_property("cases", number)`.
    """
    if not config.getoption("fault_table", default=False):
        return
    rows: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for kind in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(kind, []):
            if hasattr(report, "user_properties"):  # a file that could not be collected has none
                file, _, name = report.nodeid.partition("::")
                rows[file, name.partition("[")[0].removeprefix("test_").replace("_", " ")].append((kind, report))
    terminalreporter.section("fault -> cases -> outcome")
    for (file, name), reports in sorted(rows.items()):
        cases = sum(dict(report.user_properties).get("cases", 1) for _, report in reports)
        terminalreporter.line(f"{file.removeprefix('tests/'):32} {name[:WIDTH]:{WIDTH}} {cases:7,} {_outcome(reports)}")


def _outcome(reports: list[Any]) -> str:
    failed = sum(kind in ("failed", "error") for kind, _ in reports)
    skipped = [report for kind, report in reports if kind == "skipped"]
    if failed:
        return f"FAILED ({failed} of {len(reports)})"
    if skipped:
        reason = skipped[0].longrepr[2] if isinstance(skipped[0].longrepr, tuple) else ""
        return f"{len(skipped)} of {len(reports)} not run: {reason.removeprefix('Skipped: ')}"
    return "survived"
