"""A local web server that serves one file, correctly or with a scripted fault per request."""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[["Handler"], None]


class Server(ThreadingHTTPServer):
    """Serves ``content`` under any path and records the requests; the first ones get the answers of ``script``."""

    daemon_threads = True

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = content
        self.script: list[Answer] = []
        self.usual: Answer = whole
        self.requests: list[tuple[str, str | None]] = []
        self.is_over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *args: Any) -> None:
        """Print nothing about clients that close the connection."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers["Range"]))
        answer = self.server.script.pop(0) if self.server.script else self.server.usual
        answer(self)

    def log_message(self, *args: Any) -> None:
        pass

    @property
    def offset(self) -> int:
        return int(re.findall(r"\d+", self.headers["Range"] or "0")[0])

    def head(self, status: int, headers: dict[str, Any]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()

    def begin(self, length: int | None = None) -> bytes:
        """Send the headers of the requested range and return its bytes; ``length`` replaces the true Content-Length."""
        whole_length, rest = len(self.server.content), self.server.content[self.offset :]
        headers = {"Content-Type": "application/octet-stream", "Content-Length": length or len(rest)}
        if self.offset:
            headers["Content-Range"] = f"bytes {self.offset}-{whole_length - 1}/{whole_length}"
        self.head(206 if self.offset else 200, headers)
        return rest


def whole(handler: Handler) -> None:
    if handler.offset >= len(handler.server.content) > 0:
        handler.head(416, {"Content-Range": f"bytes */{len(handler.server.content)}", "Content-Length": 0})
        return
    handler.wfile.write(handler.begin())


def truncates(num_bytes: int) -> Answer:
    return lambda handler: void(handler.wfile.write(handler.begin()[:num_bytes]))


def stalls(num_bytes: int) -> Answer:
    def answer(handler: Handler) -> None:
        handler.wfile.write(handler.begin()[:num_bytes])
        handler.wfile.flush()
        handler.server.is_over.wait(20)

    return answer


def resets(num_bytes: int) -> Answer:
    def answer(handler: Handler) -> None:
        handler.wfile.write(handler.begin()[:num_bytes])
        handler.wfile.flush()
        handler.server.is_over.wait(0.05)  # a reset discards what the client has not yet read
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.connection.close()

    return answer


def claims(extra: int) -> Answer:
    """Send the whole file with a Content-Length that is wrong by ``extra``."""
    return lambda handler: void(
        handler.wfile.write(handler.begin(len(handler.server.content) - handler.offset + extra))
    )


def fails(status: int, **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler: handler.head(status, {"Content-Length": 0, **named})


def redirects(path: str) -> Answer:
    return fails(302, Location=path)


def sends(content: bytes, content_type: str = "application/octet-stream", **headers: str) -> Answer:
    """Send ``content`` for any request."""

    def answer(handler: Handler) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        handler.head(200, {"Content-Type": content_type, "Content-Length": len(content), **named})
        handler.wfile.write(content)

    return answer


def void(_: object) -> None:
    return None
