"""A test of the default run that takes too long fails; a slow test does not, and neither does one with a reason."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.time_limit import ALLOWED, WALL_FACTOR, describe_excess

ROOT = Path(__file__).parents[1]
EXAMPLES = """
import subprocess, sys
import pytest

WORK = "import time; end = time.process_time() + 0.3\\nwhile time.process_time() < end: pass"

def test_quick(): pass
def test_busy(): exec(WORK)
def test_busy_child(): subprocess.run([sys.executable, "-c", WORK], check=True)
@pytest.mark.slow
def test_marked(): exec(WORK)
@pytest.mark.slow
@pytest.mark.smoke
def test_marked_twice(): exec(WORK)
"""


def test_a_test_of_the_default_run_that_computes_too_long_fails(tmp_path: Path) -> None:
    (tmp_path / "test_examples.py").write_text(EXAMPLES)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    smoke\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.time_limit", "-rA", "--tb=line", "--time-limit", "0.02"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    found = re.findall(r"^(PASSED|FAILED) test_examples\.py::(\w+)", printed, re.MULTILINE)
    assert {name: outcome for outcome, name in found} == {
        "test_quick": "PASSED",
        "test_busy": "FAILED",
        "test_busy_child": "FAILED",
        "test_marked": "PASSED",
        "test_marked_twice": "FAILED",
    }, printed
    assert "s of processor time" in printed
    assert "mark it slow" in printed


@pytest.mark.parametrize(
    ("cpu_s", "wall_s", "load", "excess"),
    [
        (1.9, 1.9, 0.1, None),
        (2.1, 2.1, 0.1, "2.1 s of processor time, and may take 2.0 s"),
        (2.1, 9.0, 3.0, None),  # on a loaded machine
        (6.1, 9.0, 3.0, "6.1 s of processor time, and may take 6.0 s"),
        (0.1, 2 * WALL_FACTOR - 1, 0.1, None),
        (0.1, 2 * WALL_FACTOR + 1, 0.1, "21.0 s, mostly waiting, and may take 20.0 s"),
    ],
)
def test_the_limit_grows_with_the_load_and_allows_some_waiting(
    cpu_s: float, wall_s: float, load: float, excess: str | None
) -> None:
    found = describe_excess(cpu_s, wall_s, 2.0, load)
    assert found == (excess and f"the test took {excess}")


@pytest.mark.parametrize("test", ALLOWED)
def test_each_exception_is_a_test_and_has_a_reason(test: str) -> None:
    path, _, name = test.partition("::")
    functions = {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if hasattr(node, "name")}
    assert name in functions
    assert ALLOWED[test]
