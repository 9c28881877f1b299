"""Several machines train, go on and score as one machine does with as many processes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.dist.hosts import Host, torchrun
from tests.dist.runs import END_S, MODULE, Run, assert_same_bits, assert_same_order
from zoo.cli import main
from zoo.engine.checkpoint import CHECKPOINT

pytestmark = pytest.mark.dist


def test_two_machines_train_as_one_machine_with_two_processes(machines: list[Host], tmp_path: Path) -> None:
    one, two = Run(tmp_path / "one"), Run(tmp_path / "two")
    one.train_here(2)
    two.train(machines[:2])
    assert_same_order(one, two, num_attempts=1)
    assert_same_bits(one, two)


@pytest.mark.exhaustive
def test_three_machines_that_are_stopped_go_on_as_one_machine_that_is_not(machines: list[Host], tmp_path: Path) -> None:
    one, three = Run(tmp_path / "one"), Run(tmp_path / "three")
    one.train_here(3)
    with three.started(machines, pauses_s={0: "0.3"}) as launch:
        launch.wait_for(lambda: three.num_drawn() >= 3, END_S)
        (pid,) = launch.pids(1, MODULE)
        os.kill(pid, signal.SIGTERM)  # as a scheduler does that takes this machine away
        launch.wait_for_end([0, 1, 2], END_S)
        assert all("SIGTERM at step" in launch.printed(index) for index in range(3))
    three.train(machines)
    assert_same_order(one, three, num_attempts=2)
    assert_same_bits(one, three)


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [2, 3])
def test_machines_score_as_one_process_does(count: int, machines: list[Host], tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.train_here(1)
    command = ["validate", str(run.config), str(run.data), "--weights", str(run.log / CHECKPOINT), "-j", "0", "--json"]
    assert main([*command, str(tmp_path / "single.json")]) == 0
    with torchrun(machines[:count], "zoo", [*command, str(tmp_path / "several.json")], tmp_path, {}) as launch:
        launch.wait_for_end(list(range(count)), END_S)
        assert launch.launchers[0].returncode == 0, launch.printed(0)
    single, several = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("single", "several"))
    for key in ("top1", "top5", "count"):
        assert several[key] == single[key]
    assert several["loss"] == pytest.approx(single["loss"], rel=1e-6)
