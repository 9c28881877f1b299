"""Clocks that go backwards or far ahead: no result or cache depends on what time it is."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.engine.tiny import differences
from zoo.cli import main
from zoo.engine.checkpoint import read

CENTURY_S = 100 * 365 * 86400.0
NOW_S = time.time()
JUMPS: dict[str, Callable[[int], float]] = {
    "backwards": lambda call: NOW_S - 3600.0 * call,
    "a century ahead": lambda call: NOW_S + CENTURY_S if call > 5 else NOW_S,
}


@pytest.fixture(params=JUMPS)
def jumping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()
    monkeypatch.setattr(time, "time", lambda: JUMPS[request.param](next(calls)))


@pytest.mark.usefixtures("jumping")
def test_a_run_whose_clock_jumps_has_the_bits_and_the_log_of_one_whose_clock_does_not(
    finished: Run, tmp_path: Path
) -> None:
    log_dir = tmp_path / "log"
    command = ["train", str(finished.config), str(finished.data), "--log-dir", str(log_dir), "-j", "0", "-p", "1"]
    assert main(command) == 0
    assert differences(read(finished.checkpoint), read(log_dir / "checkpoint.pth.tar")) == []
    records = [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]
    expected = [json.loads(line) for line in (finished.log_dir / "metrics.jsonl").read_text().splitlines()]
    assert [(record["event"], record.get("step")) for record in records] == [
        (record["event"], record.get("step")) for record in expected
    ]
    assert main([*command, "--resume", "auto"]) == 0
