"""Machines that disappear, hang or are slow in the middle of an epoch: the others say which, and the run goes on."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dist.hosts import Host, Launch
from tests.dist.runs import (
    END_S,
    LIMIT_S,
    MODULE,
    Run,
    assert_same_bits,
    assert_same_order,
    distance,
)
from zoo.engine.checkpoint import CHECKPOINT

pytestmark = [pytest.mark.dist, pytest.mark.exhaustive]

# After the limit of silence: a beat, the words of rank 0 to the others, the end of the processes and of their launcher.
REACTION_S = 15.0
PAUSE_S = "0.3"  # before each step, so that faults come in the middle of an epoch
ROUNDING = 1e-5
SILENCE = rf"no sign of life from rank 1 on host1 for {LIMIT_S:.0f} s"
NO_MAIN = "rank 0 on host0 or its launcher cannot be reached"


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run with two processes that nobody disturbs."""
    run = Run(tmp_path_factory.mktemp("straight") / "run")
    run.train_here(2)
    return run


def _power_off(launch: Launch, index: int) -> None:
    launch.machines[index].send(signal.SIGKILL)


def _hang(launch: Launch, index: int) -> None:
    launch.machines[index].send(signal.SIGSTOP)


def _pull_cable(launch: Launch, index: int) -> None:
    launch.machines[index].set_link("down")


def _verdicts(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if "the other processes cannot go on alone" in line]


@pytest.mark.parametrize(
    ("fault", "index", "message"),
    [
        (_power_off, 1, "no sign of life from rank 1 on host1, killed or out of reach"),
        (_hang, 1, SILENCE),
        (_pull_cable, 1, SILENCE),
        (_hang, 0, NO_MAIN),
        (_power_off, 0, NO_MAIN),
    ],
)
def test_when_a_machine_is_lost_the_others_end_and_name_it_in_one_line(
    fault: Callable[[Launch, int], None],
    index: int,
    message: str,
    machines: list[Host],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    run = Run(tmp_path / "run")
    with run.started(machines, pauses_s={0: PAUSE_S}) as launch:
        launch.wait_for(lambda: run.num_drawn() >= 4, END_S)
        fault(launch, index)
        others = [other for other in range(3) if other != index]
        seconds = launch.wait_for(lambda: all(_verdicts(launch.printed(other)) for other in others), END_S)
        machines[index].set_link("up")
        record_property("seconds", seconds)
        for other in others:
            (verdict,) = _verdicts(launch.printed(other))
            assert re.search(message, verdict)
            assert "Traceback (most recent call last)" not in launch.printed(other).partition(verdict)[0]
    assert seconds < LIMIT_S + REACTION_S
    assert (run.log / CHECKPOINT).exists()


def test_a_slow_machine_is_waited_for(machines: list[Host], straight: Run, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with run.started(machines[:2], pauses_s={1: f"0,0,{1.5 * LIMIT_S},0"}) as launch:
        launch.wait_for_end([0, 1], END_S)
        assert [launcher.returncode for launcher in launch.launchers] == [0, 0]
        assert _verdicts(launch.printed(0) + launch.printed(1)) == []
    assert_same_bits(straight, run)


def test_a_killed_process_is_started_again_and_the_run_is_the_same(
    machines: list[Host], straight: Run, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    with run.started(machines[:2], "--max-restarts", "3", pauses_s={0: PAUSE_S}) as launch:
        for number, index in enumerate((1, 0), start=1):
            launch.wait_for(lambda: len(run.firsts()) == number and run.num_drawn() >= 5, END_S)  # noqa: B023
            (pid,) = launch.pids(index, MODULE)
            os.kill(pid, signal.SIGKILL)
        launch.wait_for_end([0, 1], END_S)
        assert [launcher.returncode for launcher in launch.launchers] == [0, 0], launch.printed(0)
    assert_same_order(straight, run, num_attempts=3)
    assert_same_bits(straight, run)


def test_a_machine_that_was_cut_off_for_a_while_goes_on_with_the_others(
    machines: list[Host], straight: Run, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    with run.started(machines[:2], "--max-restarts", "3", pauses_s={0: PAUSE_S}) as launch:
        launch.wait_for(lambda: run.num_drawn() >= 5, END_S)
        machines[1].set_link("down")
        launch.wait_for(lambda: len(_verdicts(launch.printed(0))) == len(_verdicts(launch.printed(1))) == 1, END_S)
        machines[1].set_link("up")
        launch.wait_for_end([0, 1], END_S)
        assert [launcher.returncode for launcher in launch.launchers] == [0, 0], launch.printed(0)
    assert_same_order(straight, run, num_attempts=2)
    assert_same_bits(straight, run)


def test_the_run_goes_on_without_a_machine_that_is_lost_and_is_the_same_to_rounding(
    machines: list[Host], straight: Run, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    options = ("--nnodes", "1:2", "--max-restarts", "3")
    with run.started(machines[:2], *options, pauses_s={0: PAUSE_S}, more=("--allow-world-size-change",)) as launch:
        launch.wait_for(lambda: run.num_drawn() >= 5, END_S)
        machines[1].send(signal.SIGKILL)
        launch.wait_for_end([0], END_S)
        assert launch.launchers[0].returncode == 0, launch.printed(0)
    assert_same_order(straight, run, num_attempts=2)
    assert 0 < distance(straight, run) < ROUNDING
