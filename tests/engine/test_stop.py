"""SIGTERM and SIGINT are remembered, agreed upon between all ranks, and handed back afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest
import torch.distributed as dist

from tests.dist.spawn import run_distributed
from zoo.engine.stop import SIGNALS, StopSignals


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_remembered_instead_of_ending_the_process(number: signal.Signals) -> None:
    with StopSignals() as stop:
        assert stop.agreed() is None
        os.kill(os.getpid(), number)
        assert stop.agreed() == number.name
        assert stop.agreed_at_once() == number.name


def test_the_handlers_of_before_are_back_afterwards_even_after_an_error() -> None:
    before = _handlers()
    with contextlib.suppress(RuntimeError), StopSignals():
        assert _handlers() != before
        raise RuntimeError
    assert _handlers() == before


def _handlers() -> list[object]:
    return [signal.getsignal(number) for number in SIGNALS]


def test_outside_the_main_thread_it_works_without_handlers() -> None:
    answers = []

    def use() -> None:
        with StopSignals() as stop:
            answers.append(stop.agreed())

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert answers == [None]


def _steps_until_stop(signalled_rank: int, step: int, at_once: bool) -> list[str | None]:
    answers = []
    with StopSignals(dist.new_group(backend="gloo")) as stop:
        for now in range(step + 4):
            if now == step and dist.get_rank() == signalled_rank:
                os.kill(os.getpid(), signal.SIGTERM)
            answers.append(stop.agreed_at_once() if at_once else stop.agreed())
            if answers[-1]:
                return answers
    return answers


@pytest.mark.dist
@pytest.mark.parametrize("signalled_rank", [0, 1])
def test_a_signal_to_one_rank_stops_all_ranks_at_the_same_next_step(signalled_rank: int) -> None:
    first, second = run_distributed(_steps_until_stop, 2, signalled_rank, 3, False)
    assert first == second == [None] * 4 + ["SIGTERM"]


@pytest.mark.dist
def test_agreeing_at_once_does_not_wait_for_another_step() -> None:
    first, second = run_distributed(_steps_until_stop, 2, 1, 3, True)
    assert first == second == [None] * 3 + ["SIGTERM"]
