"""Cuts connections on which too little arrives: the timeouts of requests are between two bytes, however few come."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any

from requests.adapters import HTTPAdapter


class Watchdog:
    """A clock that runs from `expect` to `rest`; when it has run out, the connections of its adapters are shut down.

    Whoever reads from them then sees the end of the answer or an error, and ``has_cut`` tells why.
    """

    def __init__(self) -> None:
        self.has_cut = False
        self._sockets: list[socket.socket] = []
        self._timer: threading.Timer | None = None

    def expect(self, limit_s: float) -> None:
        """Start the clock anew: the next thing has to come within ``limit_s`` seconds."""
        self._stop()
        self._timer = threading.Timer(limit_s, self._cut)
        self._timer.daemon = True
        self._timer.start()

    def rest(self) -> None:
        """Stop the clock and forget what was cut."""
        self._stop()
        self.has_cut = False

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def add(self, connected: socket.socket) -> None:
        """Watch a socket, from its connection on."""
        self._sockets.append(connected)
        if self.has_cut:
            self._cut()

    def _cut(self) -> None:
        self.has_cut = True
        cut, self._sockets = self._sockets, []  # those of the next try, which may begin at once, are not among them
        for connected in cut:
            with suppress(OSError):  # closed by now
                socket.socket.shutdown(connected, socket.SHUT_RDWR)  # of TLS sockets too without the farewell of TLS


class WatchedAdapter(HTTPAdapter):
    """What requests sends its requests through, with connections that a watchdog may cut."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        super().__init__()

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """Make the manager of direct connections."""
        super().init_poolmanager(*args, **kwargs)
        self._watch(self.poolmanager)

    def proxy_manager_for(self, *args: Any, **kwargs: Any) -> Any:
        """Return the manager of connections through a proxy."""
        manager = super().proxy_manager_for(*args, **kwargs)
        self._watch(manager)
        return manager

    def _watch(self, manager: Any) -> None:
        pools = manager.pool_classes_by_scheme
        manager.pool_classes_by_scheme = {scheme: _watched(pool, self._watchdog) for scheme, pool in pools.items()}


def _watched(pool: Any, watchdog: Watchdog) -> Any:
    """Return a kind of connection pool whose connections tell the watchdog of their sockets."""
    if hasattr(pool, "watchdog"):  # made by an earlier call
        return pool

    class Connection(pool.ConnectionCls):
        def connect(self) -> None:
            super().connect()
            watchdog.add(self.sock)

    return type(pool.__name__, (pool,), {"ConnectionCls": Connection, "watchdog": watchdog})
