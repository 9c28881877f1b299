"""A local web server that serves one file or a folder, correctly or with a scripted fault per request."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from tests.local_server import LocalServer

Answer = Callable[["Handler"], object]


class Server(LocalServer):
    """Serves ``content`` for any path, or the files of a folder, and records the requests.

    The first requests for a path get the answers of ``script[path]``, the others ``usual``.
    """

    def __init__(self, content: bytes | Path) -> None:
        super().__init__(Handler)
        self.content = content
        self.script: dict[str, list[Answer]] = {}
        self.usual: Answer = whole
        self.requests: list[str] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        script = self.server.script.get(self.path)
        answer = script.pop(0) if script else self.server.usual
        answer(self)

    def log_message(self, *args: Any) -> None:
        pass

    def head(self, status: int, headers: dict[str, Any]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()

    def begin(self, content: bytes) -> bytes:
        """Send the headers of a file and return its bytes."""
        self.head(200, {"Content-Type": "application/octet-stream", "Content-Length": len(content)})
        return content

    def content(self) -> bytes:
        content = self.server.content
        return content if isinstance(content, bytes) else (content / self.path.partition("?")[0][1:]).read_bytes()


def whole(handler: Handler) -> None:
    handler.wfile.write(handler.begin(handler.content()))


def truncates(num_bytes: int) -> Answer:
    return lambda handler: handler.wfile.write(handler.begin(handler.content())[:num_bytes])


def stalls(num_bytes: int) -> Answer:
    def answer(handler: Handler) -> None:
        truncates(num_bytes)(handler)
        handler.wfile.flush()
        handler.server.is_over.wait(20)

    return answer


def fails(status: int, **headers: str) -> Answer:
    return lambda handler: handler.head(status, {"Content-Length": 0, **headers})


def redirects(address: str) -> Answer:
    return fails(302, Location=address)


def sends(content: bytes) -> Answer:
    """Send ``content`` for any request."""
    return lambda handler: handler.wfile.write(handler.begin(content))
