"""Recovers a Ctrl-C that Python drops, for instance while torch is imported; does not import torch itself."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class RememberedInterrupt:
    """Context in which SIGINT raises KeyboardInterrupt, as it does by default, and is recorded.

    Python drops exceptions that are raised in a destructor or in the callback of a weak reference. If the signal
    arrives there, for instance during an import, the KeyboardInterrupt is lost; `raise_if_lost` raises it again. The
    context does nothing outside the main thread, and where SIGINT is ignored or has another handler.
    """

    def __init__(self) -> None:
        self._was_received = False
        self._is_installed = False

    def __enter__(self) -> RememberedInterrupt:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self)
            self._is_installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        self._was_received = True
        raise KeyboardInterrupt

    @staticmethod
    def raise_if_lost(handler: object) -> None:
        """Raise KeyboardInterrupt if ``handler`` is such a context and has received a signal."""
        if isinstance(handler, RememberedInterrupt) and handler._was_received:
            raise KeyboardInterrupt
