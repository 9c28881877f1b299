"""Stopping between two steps on SIGTERM or SIGINT, at the same step on every rank."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Launchers forward a signal to processes that have received it already, as members of the process group. Within this
# time two signals count as one request.
REPEAT_S = 5.0
EXIT_OF_SIGNAL = 128  # plus its number, as shells report it
DATA_FAULT = "data fault"  # the reason to stop that is no signal, see `StopSignals.ask`
NUMBER_OF_FAULT = 128  # above all signals, so that it wins the all-reduce
LAG = 2  # steps from a request on one rank to the stop of all


class StopSignals:
    """Context in which the first SIGTERM or SIGINT is only recorded; `agreed` tells when all ranks know of it.

    A signal may reach any subset of the ranks at any time, and all ranks have to save the same step. Each call of
    `agreed` therefore starts an all-reduce of one integer over ``control`` (Gloo, on the host) and waits for the
    all-reduce that the previous call started. A step hides the communication, and no GPU is waited for.

    A second signal, `REPEAT_S` or more after the first, raises KeyboardInterrupt or SystemExit. While a collective
    operation hangs Python runs no signal handler: only SIGKILL then ends the process.

    The former signal handlers are restored at the end. Outside the main thread, where Python allows no handlers, none
    are installed.
    """

    def __init__(self, control: dist.ProcessGroup | None = None) -> None:
        self._control = control
        self._received = 0
        self._has_fault = False
        self._first_s: float | None = None
        self._exchange: tuple[torch.Tensor, dist.Work] | None = None
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
        if kind is None:
            self._finish_exchange()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        if self._first_s is None:
            self._first_s = time.monotonic()
        elif time.monotonic() - self._first_s >= REPEAT_S:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(EXIT_OF_SIGNAL + number)

    def ask(self) -> None:
        """Ask all ranks to stop, as a signal does, because this rank has no further batch."""
        self._has_fault = True

    def agreed(self) -> str | None:
        """Return the name of the signal, or `DATA_FAULT`, if all ranks stop here, else None; every rank has to call it.

        With several ranks the answer lags behind the signal by one call.
        """
        asked = NUMBER_OF_FAULT if self._has_fault else int(self._received)
        if self._control is None:
            return _name(asked)
        answer = self._finish_exchange()
        if not answer:
            number = torch.tensor(asked)
            work = dist.all_reduce(number, dist.ReduceOp.MAX, group=self._control, async_op=True)
            self._exchange = number, work
        return _name(answer)

    def agreed_at_once(self) -> str | None:
        """Return the same as `agreed`, including all signals before this call; wait for the slowest rank."""
        return self.agreed() or self.agreed()

    def _finish_exchange(self) -> int:
        if self._exchange is None:
            return 0
        number, work = self._exchange
        self._exchange = None
        work.wait()
        return int(number)


def _name(number: int) -> str | None:
    if number == NUMBER_OF_FAULT:
        return DATA_FAULT
    return signal.Signals(number).name if number else None
