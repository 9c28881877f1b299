"""A local web server that serves one file, correctly or with a scripted fault per request."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.local_server import LocalServer

Answer = Callable[["Handler"], None]


class Server(LocalServer):
    """Serves ``content`` under any path and records the requests; the first requests get the answers of ``script``."""

    def __init__(self, content: bytes) -> None:
        super().__init__(Handler)
        self.content = content
        self.script: list[Answer] = []
        self.usual: Answer = whole
        self.requests: list[str] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        answer = self.server.script.pop(0) if self.server.script else self.server.usual
        answer(self)

    def log_message(self, *args: Any) -> None:
        pass

    def head(self, status: int, headers: dict[str, Any]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()

    def begin(self) -> bytes:
        """Send the headers of the file and return its bytes."""
        self.head(200, {"Content-Type": "application/octet-stream", "Content-Length": len(self.server.content)})
        return self.server.content


def whole(handler: Handler) -> None:
    handler.wfile.write(handler.begin())


def truncates(num_bytes: int) -> Answer:
    def answer(handler: Handler) -> None:
        handler.wfile.write(handler.begin()[:num_bytes])

    return answer


def stalls(num_bytes: int) -> Answer:
    def answer(handler: Handler) -> None:
        truncates(num_bytes)(handler)
        handler.wfile.flush()
        handler.server.is_over.wait(20)

    return answer


def fails(status: int, **headers: str) -> Answer:
    return lambda handler: handler.head(status, {"Content-Length": 0, **headers})


def redirects(path: str) -> Answer:
    return fails(302, Location=path)


def sends(content: bytes) -> Answer:
    """Send ``content`` for any request."""

    def answer(handler: Handler) -> None:
        handler.head(200, {"Content-Length": len(content)})
        handler.wfile.write(content)

    return answer
