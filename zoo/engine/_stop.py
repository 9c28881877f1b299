"""Stopping between two steps on SIGTERM or SIGINT, at the same step on every rank."""

from __future__ import annotations

import _thread
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zoo.engine._process import Process

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Launchers forward a signal to processes that already received it as members of the process group. Two signals within
# this time count as one request.
REPEAT_S = 5.0
# Time that a signaled rank waits for its next batch, and then for the other ranks. torchrun kills its processes after
# 30 seconds.
STALL_S = 10.0
PAUSE_S = 0.05
EXIT_OF_SIGNAL = 128  # plus the number of the signal, as shells report it
DATA_FAULT = "data fault"  # reason to stop without a signal, see `StopSignals.ask`
NUMBER_OF_FAULT = 128  # larger than all signals, so that it wins the all-reduce
LAG = 2  # steps from a request on one rank to the stop of all

BatchT = TypeVar("BatchT")


class StopRequested(BaseException):
    """A signal stops the run between two batches. An ``except Exception`` of a data set does not catch it.

    Args:
    - `signal_name`: name of the signal.
    - `is_agreed`: whether all ranks stop here; otherwise this rank has only waited too long for its batch.
    """

    def __init__(self, signal_name: str, is_agreed: bool) -> None:
        super().__init__(signal_name)
        self.signal_name, self.is_agreed = signal_name, is_agreed


class StopSignals:
    """Context manager that only records the first SIGTERM or SIGINT; `agreed` tells when all ranks know of it.

    A signal may reach any subset of the ranks at any time, and all ranks have to save the same step. Each call of
    `agreed` therefore starts an all-reduce of one integer over the ``control`` group of the process (Gloo, on the host)
    and waits for the all-reduce that the previous call started. A step hides the communication, without waiting for a
    GPU.

    The first signal is logged at once. While the process waits for a batch (`waits`), which may never come, the signal
    raises `StopRequested`: at once in a single process, and with several ranks after `STALL_S`, because they can only
    save together.

    A second signal, `REPEAT_S` or more after the first, raises KeyboardInterrupt or SystemExit. While a collective
    operation hangs Python runs no signal handler: only SIGKILL then ends the process.

    Restores the former signal handlers at the end. Outside the main thread, Python does not allow handlers, and none
    are installed.
    """

    def __init__(self, process: Process | None = None) -> None:
        self._process = process or Process()
        self._received = 0
        self._has_fault = False
        self._first_s: float | None = None
        self._wait_start_s: float | None = None  # None between two waits
        self._has_stalled = False
        self._is_logged, self._is_over = threading.Event(), threading.Event()
        self._exchange: tuple[torch.Tensor, dist.Work] | None = None
        self._num_exchanges = 0
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._is_over.set()
        if self._received:
            self._is_logged.wait(1.0)  # before the caller reports how the run ended
        if kind is None:
            self._finish_exchange()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._has_stalled:  # the signal is from `_watch`
            self._has_stalled = False
            self._end_wait()
            return
        self._received = number
        if self._first_s is None:
            self._first_s = time.monotonic()
            # The main thread may be printing or holding a lock, so it can neither log here nor use `threading`.
            _thread.start_new_thread(self._watch, (number,))
        elif time.monotonic() - self._first_s >= REPEAT_S:
            raise ending_by(number)
        if self._process.control is None:
            self._end_wait()

    def _watch(self, number: int) -> None:
        """Log the signal, and with several ranks interrupt a wait for a batch that lasts longer than `STALL_S`."""
        again = "press Ctrl-C again" if number == signal.SIGINT else "send another signal"
        name = _name(number)
        logger.info("%s: saving after this batch; %s after %.0f s to stop without saving", name, again, REPEAT_S)
        self._is_logged.set()
        begin_s = time.monotonic()
        while self._process.control is not None and not self._is_over.wait(PAUSE_S):
            start_s = self._wait_start_s
            if start_s is not None and time.monotonic() - max(start_s, begin_s) >= STALL_S:
                self._has_stalled = True
                signal.pthread_kill(threading.main_thread().ident or 0, number)

    def waits(self, batches: Iterable[BatchT]) -> Iterator[BatchT]:
        """Yield the batches. Raises StopRequested if a signal arrives while waiting for a batch."""
        iterator = iter(batches)
        while True:
            self._wait_start_s = time.monotonic()
            if self._received and self._process.control is None:
                self._end_wait()
            try:
                batch = next(iterator, None)
            finally:
                self._wait_start_s = None
            if batch is None:
                return
            yield batch

    def _end_wait(self) -> None:
        """Raise StopRequested if the main thread waits for a batch."""
        if self._wait_start_s is not None:
            self._wait_start_s = None
            raise StopRequested(signal.Signals(self._received).name, self._process.control is None)

    def await_ranks(self, step: int) -> bool:
        """Return whether all ranks gave up waiting for a batch after ``step`` steps, so that they can save together.

        A rank may instead wait in a step, for the gradients of a rank without a batch. Waits up to `STALL_S`.
        """
        store, rank = self._process.store, self._process.rank
        if store is None:
            return False
        keys = [f"stalled/{step}/{number}" for number in range(self._process.world_size)]
        store.set(keys[rank], str(self._num_exchanges))
        deadline_s = time.monotonic() + STALL_S
        while not store.check(keys):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(PAUSE_S)
        # A rank in a validation may be one batch ahead of another.
        for _ in range(max(int(store.get(key)) for key in keys) - self._num_exchanges):
            self.agreed()
        return True

    def ask(self) -> None:
        """Ask all ranks to stop, like a signal, because this rank has no further batch."""
        self._has_fault = True

    def agreed(self) -> str | None:
        """Return the name of the signal, or `DATA_FAULT`, if all ranks stop here, otherwise None.

        Every rank has to call it. With several ranks the answer lags behind the signal by one call.
        """
        asked = NUMBER_OF_FAULT if self._has_fault else int(self._received)
        if self._process.control is None:
            return _name(asked)
        answer = self._finish_exchange()
        if not answer:
            number = torch.tensor(asked)
            work = dist.all_reduce(number, dist.ReduceOp.MAX, group=self._process.control, async_op=True)
            self._exchange = number, work
            self._num_exchanges += 1
        return _name(answer)

    def agreed_at_once(self) -> str | None:
        """Like `agreed`, but includes all signals before this call, and waits for the slowest rank."""
        return self.agreed() or self.agreed()

    def _finish_exchange(self) -> int:
        if self._exchange is None:
            return 0
        number, work = self._exchange
        self._exchange = None
        work.wait()
        return int(number)


@contextmanager
def end_workers_on_error(stop_workers: Callable[[], object]) -> Iterator[None]:
    """Calls ``stop_workers`` on an exception, and makes SIGTERM raise SystemExit.

    Otherwise hung workers would outlive the process or keep it from ending. Does not replace a user's handler for
    SIGTERM, nor any handler outside the main thread.
    """
    is_main = threading.current_thread() is threading.main_thread()
    sets_handler = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if sets_handler:
        signal.signal(signal.SIGTERM, _end)
    try:
        yield
    except BaseException:
        stop_workers()
        raise
    finally:
        if sets_handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    raise ending_by(number)


def ending_by(number: int) -> BaseException:
    """Return the exception that ends a process on a signal: KeyboardInterrupt or SystemExit."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(EXIT_OF_SIGNAL + number)


def _name(number: int) -> str | None:
    if number == NUMBER_OF_FAULT:
        return DATA_FAULT
    return signal.Signals(number).name if number else None
