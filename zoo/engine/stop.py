"""Stopping between two steps on SIGTERM or SIGINT, at the same step on every rank."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """While entered, SIGTERM and SIGINT are only remembered; `agreed` says when all ranks know of one.

    A signal may reach any subset of the ranks at any time, and all have to save the same step. Each call of
    `agreed` starts an all-reduce of one integer over ``control`` (Gloo, on the host) and waits for the one that
    the call before had started: a step hides the exchange, and no GPU is waited for. Handlers are those of
    before again at the end; outside the main thread, where Python allows no handlers, there are none.
    """

    def __init__(self, control: dist.ProcessGroup | None = None) -> None:
        self._control = control
        self._received = 0
        self._exchange: tuple[torch.Tensor, dist.Work] | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._remember) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if kind is None:
            self._finish_exchange()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._received = number

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
        """As `agreed`, but signals that came before this call count too; waits for the slowest rank."""
        return self.agreed() or self.agreed()

    def _finish_exchange(self) -> int:
        if self._exchange is None:
            return 0
        number, work = self._exchange
        self._exchange = None
        work.wait()
        return int(number)


def _name(number: int) -> str | None:
    return signal.Signals(number).name if number else None
