"""SIGTERM and SIGINT are remembered, agreed upon between all ranks, and handed back afterwards."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.dist.spawn import PRELOADED, free_port, prepare_process, run_distributed
from zoo.engine import stop as stop_module
from zoo.engine.interrupts import RememberedInterrupt
from zoo.engine.process import open_process
from zoo.engine.stop import SIGNALS, StopSignals


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_remembered_instead_of_ending_the_process(number: signal.Signals) -> None:
    with StopSignals() as stop:
        assert stop.agreed() is None
        os.kill(os.getpid(), number)
        assert stop.agreed() == number.name
        assert stop.agreed_at_once() == number.name


def test_a_signal_that_a_launcher_passes_on_is_the_same_request() -> None:
    with StopSignals() as stop:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert stop.agreed() == "SIGINT"


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_second_signal_some_time_after_the_first_ends_the_process(
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


def _wait_for_ever(rank: int, port: int, folder: str) -> None:
    """Rank 0 waits inside a collective that rank 1 never joins."""
    prepare_process(rank, 2, port)
    stop_module.REPEAT_S = stop_module.GRACE_S = 0.2
    with open_process() as process, StopSignals(process.control):
        Path(folder, str(rank)).touch()
        if rank == 0:
            dist.all_reduce(torch.zeros(1), group=process.control)
        time.sleep(600)


@pytest.mark.dist
@pytest.mark.parametrize("number", SIGNALS)
def test_a_second_signal_ends_a_process_whose_collective_hangs(number: signal.Signals, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port = free_port()
    hanging, other = (context.Process(target=_wait_for_ever, args=(rank, port, str(tmp_path))) for rank in (0, 1))
    try:
        hanging.start()
        other.start()
        while len(list(tmp_path.iterdir())) < 2:
            assert hanging.is_alive()
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(hanging.pid, number)
        hanging.join(1)
        assert hanging.is_alive()
        os.kill(hanging.pid, number)
        hanging.join(20)
        assert hanging.exitcode == 128 + number
    finally:
        for process in (hanging, other):
            process.kill()
            process.join()


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


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors where Linux lists them")
def test_nothing_of_the_watch_is_left_behind() -> None:
    threads, descriptors = threading.active_count(), os.listdir("/proc/self/fd")
    for _ in range(3):
        with StopSignals():
            os.kill(os.getpid(), signal.SIGTERM)
    assert threading.active_count() == threads
    assert os.listdir("/proc/self/fd") == descriptors
    assert signal.set_wakeup_fd(-1) == -1


class _InterruptedDestructor:
    """An object whose destructor is interrupted; Python reports the exception and drops it."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_drops_before_training_is_raised_where_training_begins() -> None:
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with RememberedInterrupt():
            _InterruptedDestructor()
            handlers = _handlers()
            with pytest.raises(KeyboardInterrupt), StopSignals():
                pass
            assert _handlers() == handlers
        with StopSignals():
            pass
    finally:
        signal.signal(signal.SIGINT, former)


def test_an_interrupt_that_somebody_else_handles_is_left_to_them() -> None:
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with RememberedInterrupt():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, former)
