"""SIGTERM and SIGINT are recorded, agreed upon by all ranks, and raised afterwards."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist

from tests.dist.spawn import run_distributed
from tests.engine.tiny import this_process
from zoo.engine import _stop as stop_module
from zoo.engine._stop import SIGNALS, StopSignals


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_is_recorded_instead_of_ending_process(number: signal.Signals) -> None:
    with StopSignals() as stop:
        assert stop.agreed() is None
        os.kill(os.getpid(), number)
        assert stop.agreed() == number.name
        assert stop.agreed_at_once() == number.name


def test_signal_forwarded_by_launcher_is_not_second_signal() -> None:
    with StopSignals() as stop:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert stop.agreed() == "SIGINT"


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_second_signal_ends_process(
    number: signal.Signals, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_module, "REPEAT_S", 0.05)

    def send_twice() -> None:
        with StopSignals():
            os.kill(os.getpid(), number)
            time.sleep(0.1)
            os.kill(os.getpid(), number)

    with pytest.raises(error) as caught:
        send_twice()
    if isinstance(caught.value, SystemExit):
        assert caught.value.code == 143


def _steps_until_stop(signaled_rank: int, step: int, at_once: bool) -> list[str | None]:
    answers = []
    with StopSignals(this_process()) as stop:
        for now in range(step + 4):
            if now == step and dist.get_rank() == signaled_rank:
                os.kill(os.getpid(), signal.SIGTERM)
            answers.append(stop.agreed_at_once() if at_once else stop.agreed())
            if answers[-1]:
                return answers
    return answers


@pytest.mark.dist
@pytest.mark.parametrize(("signaled_rank", "at_once"), [(0, False), (1, False), (1, True)])
def test_signal_to_one_rank_stops_all_ranks_at_the_same_step(signaled_rank: int, at_once: bool) -> None:
    first, second = run_distributed(_steps_until_stop, 2, signaled_rank, 3, at_once)
    assert first == second == [None] * (3 if at_once else 4) + ["SIGTERM"]
