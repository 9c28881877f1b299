"""Stopping between two steps on SIGTERM or SIGINT, at the same step on every rank; a second signal ends at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from zoo.engine.interrupts import RememberedInterrupt

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Launchers send a signal on to processes that have received it already, as members of the group. Within this time the
# two are one request.
REPEAT_S = 5.0
GRACE_S = 5.0
EXIT_OF_SIGNAL = 128  # plus its number, as shells report it


class StopSignals:
    """A context in which the first SIGTERM or SIGINT is only remembered; `agreed` says when all ranks know of one.

    A signal may reach any subset of the ranks at any time, and all have to save the same step. Each call of `agreed`
    therefore starts an all-reduce of one integer over ``control`` (Gloo, on the host) and waits for the one that the
    call before had started. A step hides the time of the exchange, and no GPU is waited for. At the end the former
    signal handlers are restored. Outside the main thread, where Python allows no handlers, none are set. Entering the
    context raises KeyboardInterrupt if a `RememberedInterrupt` has received one that was lost.

    A second signal, `REPEAT_S` or more after the first, raises KeyboardInterrupt or SystemExit. Python calls no handler
    while a collective operation that hangs keeps the main thread inside torch. A thread therefore watches too, and ends
    the process `GRACE_S` after the second signal.
    """

    def __init__(self, control: dist.ProcessGroup | None = None) -> None:
        self._control = control
        self._received = 0
        self._first = _FirstRequest()
        self._exchange: tuple[torch.Tensor, dist.Work] | None = None
        self._former: dict[signal.Signals, Any] = {}
        self._watch: _Watch | None = None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._watch = _Watch()
            self._former = {number: signal.signal(number, self._remember) for number in SIGNALS}
            try:
                RememberedInterrupt.raise_if_lost(self._former[signal.SIGINT])
            except KeyboardInterrupt:
                self._restore()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
        if kind is None:
            self._finish_exchange()

    def _restore(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if self._watch is not None:
            self._watch.close()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        if self._first.is_repeated():
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(EXIT_OF_SIGNAL + number)

    def agreed(self) -> str | None:
        """Return the name of the signal if all ranks stop here, else None; every rank has to call it.

        With several ranks a signal is agreed upon at the next call but one at the latest.
        """
        if self._control is None:
            return _name(self._received)
        answer = self._finish_exchange()
        if not answer:
            number = torch.tensor(int(self._received))
            work = dist.all_reduce(number, dist.ReduceOp.MAX, group=self._control, async_op=True)
            self._exchange = number, work
        return _name(answer)

    def agreed_at_once(self) -> str | None:
        """Return the same as `agreed`, but with all signals that came before this call; wait for the slowest rank."""
        return self.agreed() or self.agreed()

    def _finish_exchange(self) -> int:
        if self._exchange is None:
            return 0
        number, work = self._exchange
        self._exchange = None
        work.wait()
        return int(number)


class _FirstRequest:
    """Remembers when the first signal came."""

    def __init__(self) -> None:
        self._time_s: float | None = None

    def is_repeated(self) -> bool:
        """Return whether a signal that has just come is a second request, and not the first one sent on again."""
        now_s = time.monotonic()
        if self._time_s is None:
            self._time_s = now_s
        return now_s - self._time_s >= REPEAT_S


class _Watch:
    """A thread that ends the process some time after a second request, unless it is closed before.

    The signal handler inside Python writes the number of each signal into a pipe, whatever the main thread is doing.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._former = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zoo-signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and restore the former file descriptor for wakeups."""
        signal.set_wakeup_fd(self._former, warn_on_full_buffer=False)
        self._closed.set()
        # Closing the pipe alone would not wake the thread, as forked processes hold the writing side too.
        os.write(self._writer, b"\0")
        self._thread.join()
        os.close(self._writer)
        os.close(self._reader)

    def _run(self) -> None:
        first = _FirstRequest()
        while not self._closed.is_set():
            (number,) = os.read(self._reader, 1)
            if number in SIGNALS and first.is_repeated() and not self._closed.wait(GRACE_S):
                print(f"{_name(number)} again: ended without saving", file=sys.stderr, flush=True)
                os._exit(EXIT_OF_SIGNAL + number)


def _name(number: int) -> str | None:
    return signal.Signals(number).name if number else None
