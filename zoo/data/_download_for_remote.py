"""Downloads one file over HTTP from a server that may be slow, broken or hostile.

An interrupted download is resumed, a request that may succeed later is repeated, and a web page in place of the file is
an error. Google Drive's page that asks for confirmation before a large file is the one exception: its form is sent.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from html import unescape
from pathlib import Path
from typing import IO, Any
from urllib.parse import parse_qsl, urlencode, urljoin, urlsplit, urlunsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter
from tqdm import tqdm

from zoo.errors import WeightsError, brief, hide_password
from zoo.files import _lock_files, fcntl

logger = logging.getLogger("zoo")

CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10.0, 30.0  # the latter between two bytes
TRIES = 5  # failures in a row, each of which brought less than PROGRESS_BYTES; pauses of 1, 2, 4 and 8 s between them
TOTAL_TRIES = 100  # for one file, whatever they bring
PROGRESS_BYTES = 2**14
MAX_WAIT_S = 120.0  # a server that asks for a longer pause is not waited for
MAX_REDIRECTS = 10
HEADERS_S = 60.0  # from a request to the end of the headers of its answer; the same for a whole web page
BODY_S, BODY_BYTES = 180.0, 2**20  # each MiB of the file has to arrive within 3 minutes, which is 6 kB/s
CHUNK_BYTES = 2**16
PAGE_BYTES = 2**16  # no more of a web page is read
MAX_FILE_BYTES = 2**32  # the largest published network has 109 million parameters: 0.44 GB
CONNECTION_ERRORS = (
    requests.ConnectionError,
    requests.Timeout,
    urllib3.exceptions.ProtocolError,
    urllib3.exceptions.TimeoutError,
    urllib3.exceptions.IncompleteRead,
)
# Web pages come from anyone. These expressions take time in proportion to the page, whatever it holds, and never fail.
TITLE = re.compile(r"<title\b[^<>]*>([^<]*)", re.IGNORECASE)
TAG = re.compile(r"<(/?form|input)\b([^<>]*)>", re.IGNORECASE)
ATTRIBUTE = re.compile(r"""(?<![\w-])([\w-]+)=(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""")
Sleep = Callable[[float], None]


class DownloadError(WeightsError):
    """The server does not give the file, and trying again at once will not help."""


class UnresolvedError(DownloadError):
    """The name of the server cannot be resolved: there is no network, or no such server."""


class Transient(Exception):
    """The server does not give the file now; ``wait_s`` is the pause that it asks for, None if it asks for none."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class Download:
    """The download of one file, which continues where an earlier one broke off.

    Args:
    - `url`: address of the file.
    - `part`: where the file is written; if it exists, it holds the beginning of the file.
    - `title`: name of the file in messages.
    - `sleep`: waits for a number of seconds between two tries.
    - `max_bytes`: a larger file is refused; None for more than any weights have.
    - `head_bytes`: no more of the beginning is received; None for the whole file.
    - `is_quiet`: whether neither the size nor a bar is shown.

    ``was_resumed`` tells whether the file was put together from several answers; it is then a mixture if the file
    changed on the server in between.
    """

    def __init__(
        self,
        url: str,
        part: Path,
        title: str,
        sleep: Sleep,
        *,
        max_bytes: int | None = None,
        head_bytes: int | None = None,
        is_quiet: bool = False,
    ) -> None:
        self.url, self.part, self.title, self.sleep = url, part, title, sleep
        self.max_bytes = MAX_FILE_BYTES if max_bytes is None else max_bytes
        self.head_bytes, self.is_quiet = head_bytes, is_quiet
        self.was_resumed = False

    def run(self, is_whole: Callable[[Path], bool]) -> None:
        """Receive until the server says that the file is complete, or until ``is_whole`` says so against the server.

        Raises DownloadError when the server refuses, when TRIES in a row bring hardly anything, and after TOTAL_TRIES;
        OSError when the file cannot be written. What was received stays in the file, unless it cannot be right.
        """
        largest, failures, tries = self._size(), 0, 0
        watchdog = Watchdog()
        with Session() as session:
            for scheme in ("http://", "https://"):
                session.mount(scheme, WatchedAdapter(watchdog))
            while True:
                try:
                    return self._receive(session, watchdog)
                except Transient as problem:
                    if self._size() and is_whole(self.part):  # the server promised more than there is
                        return None
                    tries += 1
                    failures = 1 if self._size() >= largest + PROGRESS_BYTES else failures + 1
                    largest = max(largest, self._size())
                    self._pause(problem, failures, tries)

    def _pause(self, problem: Transient, failures: int, tries: int) -> None:
        """Wait before the next try; raise DownloadError if there should be none."""
        wait_s = 2.0 ** (failures - 1) if problem.wait_s is None else problem.wait_s
        if failures >= TRIES:
            raise DownloadError(f"{problem}, {failures} times in a row; {without_password(self.url)}")
        if tries >= TOTAL_TRIES:
            raise DownloadError(
                f"{problem}, and {tries} tries did not bring all of the file; {without_password(self.url)}"
            )
        if wait_s > MAX_WAIT_S:
            raise DownloadError(f"{problem} and asks for a pause of {wait_s:.0f} s; {without_password(self.url)}")
        logger.warning("%s: %s; next try in %.0f s", self.title, problem, wait_s)
        self.sleep(wait_s)

    def _receive(self, session: requests.Session, watchdog: Watchdog) -> None:
        """Request what is missing and write the answer; raise Transient for a problem that may pass.

        This is the one place where every wrong answer of a server becomes a Transient or a DownloadError.
        """
        try:
            with self._open(session, watchdog, self._size()) as response:
                if response.status_code != 416:  # 416: no bytes follow those received; the md5 decides
                    self._write(response, watchdog)
        except (requests.exceptions.SSLError, urllib3.exceptions.SSLError) as error:
            raise DownloadError(
                f"the connection is not secure ({innermost(error)}); {without_password(self.url)}"
            ) from None
        except CONNECTION_ERRORS as error:
            if any(isinstance(cause, socket.gaierror) for cause in causes(error)):
                reason = f"the name of the server is not known here ({innermost(error)}), perhaps for lack of a network"
                raise UnresolvedError(f"{reason}; {without_password(self.url)}") from None
            if watchdog.has_cut:
                raise too_slow() from None
            raise Transient(f"the connection failed ({innermost(error)})") from None
        except (requests.RequestException, urllib3.exceptions.HTTPError, ValueError) as error:
            raise DownloadError(
                f"the address cannot be fetched ({innermost(error)}); {without_password(self.url)}"
            ) from None
        finally:
            watchdog.rest()

    def _open(self, session: requests.Session, watchdog: Watchdog, offset: int) -> requests.Response:
        """Return the answer with the file from ``offset`` on; a page that asks for confirmation gets it once."""
        url, may_confirm = self.url, True
        while True:
            response = request(session, watchdog, url, offset, self.head_bytes)
            if not response.headers.get("Content-Type", "").lower().startswith(("text/html", "application/xhtml")):
                return response
            with response:
                content = response.raw.read(PAGE_BYTES, decode_content=False)
                page = read_form(content.decode("utf-8", errors="replace"), response.url)
            if page.link is None or not may_confirm:
                raise self._web_page(page.title)
            url, may_confirm = page.link, False

    def _write(self, response: requests.Response, watchdog: Watchdog) -> None:
        """Append the answer to the file, or begin the file anew where the server sends all of it."""
        start = self._start(response)
        declared = number(response.headers.get("Content-Length", ""))
        total = None if declared is None else start + declared
        self._check_room(start, total)
        response.raw.enforce_content_length = False  # it would throw away the last bytes of a truncated answer
        watchdog.expect(BODY_S)
        chunk = read_chunk(response)
        if not start and chunk.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"<"):
            raise self._web_page()
        self.was_resumed = start > 0
        try:
            with open_own(self.part, "ab" if start else "wb") as file, self._bar(start, total) as bar:
                size, checked = start, start
                while chunk:
                    size += len(chunk)
                    if self.head_bytes is not None and size >= self.head_bytes:
                        file.write(chunk[: len(chunk) - (size - self.head_bytes)])
                        return
                    if size > self.max_bytes:
                        raise self._too_large("sends")
                    file.write(chunk)
                    bar.update(len(chunk))
                    if size >= checked + BODY_BYTES:
                        watchdog.expect(BODY_S)
                        checked = size
                    chunk = read_chunk(response)
        except DownloadError:
            self.part.unlink(missing_ok=True)
            raise
        except OSError as error:
            if total is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                self.part.unlink(missing_ok=True)  # a body without end may have filled the disk
            raise
        if watchdog.has_cut:
            raise too_slow()
        if total is not None and self._size() < total:
            raise Transient(f"the connection ended after {self._size():,} of {total:,} bytes")

    def _check_room(self, start: int, total: int | None) -> None:
        """Log how large the file is; raise DownloadError for an impossible size, OSError where the disk is too full."""
        if total is None or self.head_bytes is not None:
            return
        if total > self.max_bytes:
            raise self._too_large(f"announces {total:,} bytes, which is")
        free = shutil.disk_usage(self.part.parent).free + (0 if start else self._size())
        if total - start > free:
            raise OSError(errno.ENOSPC, f"{total - start:,} bytes are to come and {free:,} bytes of disk are free")
        have = f", {start / 1e6:.1f} MB of them are there" if start else ""
        if not self.is_quiet:
            logger.info("%s: %.1f MB%s", self.title, total / 1e6, have)

    def _start(self, response: requests.Response) -> int:
        """Return the position in the file at which the answer starts."""
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise DownloadError(
                f"the server sends the file as {brief(encoding)} and not as it is; {without_password(self.url)}"
            )
        if response.status_code == 200:
            return 0
        content_range = response.headers.get("Content-Range", "")
        match = re.match(r"bytes (\d{1,18})-", content_range, re.ASCII)
        if match is None or int(match[1]) != self._size():
            problem = f"the server sent another part than asked for (Content-Range '{brief(content_range)}')"
            self.part.unlink(missing_ok=True)  # so that the next request is for all of it
            raise Transient(problem)
        return int(match[1])

    def _bar(self, start: int, total: int | None) -> tqdm:
        hidden = True if self.is_quiet else None  # None: where there is no terminal
        return tqdm(desc=self.title, initial=start, total=total, unit="B", unit_scale=True, disable=hidden, leave=False)

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _too_large(self, what: str) -> DownloadError:
        return DownloadError(
            f"the server {what} more than {self.max_bytes:,} bytes, not the file; {without_password(self.url)}"
        )

    def _web_page(self, title: str = "") -> DownloadError:
        called = f" ('{brief(title)}')" if title else ""
        return DownloadError(f"a web page came in place of the file{called}; {without_password(self.url)}")


def request(
    session: requests.Session, watchdog: Watchdog, url: str, offset: int, end: int | None = None
) -> requests.Response:
    """Return the answer to a request for ``url`` from byte ``offset`` on; its status is 200, 206 or 416.

    The bytes from ``end`` on are not asked for, but a server may send them. Raises Transient and DownloadError for
    other answers.
    """
    last = "" if end is None else end - 1
    wanted = {"Range": f"bytes={offset}-{last}"} if offset or end is not None else {}
    headers = {"Accept-Encoding": "identity", **wanted}
    address = url
    for _ in range(MAX_REDIRECTS + 1):
        watchdog.expect(HEADERS_S)
        response = session.get(address, headers=headers, stream=True, timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S))
        if not response.is_redirect:
            break
        response.close()
        # Headers are read as Latin-1, and written as UTF-8 where they are more than ASCII.
        address = urljoin(address, response.headers["Location"].encode("latin-1").decode("utf-8"))
    else:
        raise DownloadError(f"the server redirected more than {MAX_REDIRECTS} times; {without_password(url)}")
    status = response.status_code
    if status in (200, 206) or (status == 416 and offset):
        return response
    response.close()
    answer = f"the server answered {status} {brief(response.reason or '')}".strip()
    if status in (408, 429) or status >= 500:
        raise Transient(answer, retry_after_s(response.headers.get("Retry-After")))
    raise DownloadError(f"{answer}; {without_password(url)}")


def too_slow() -> Transient:
    """Return the error for an answer that the watchdog has cut."""
    return Transient(f"the server is too slow: no headers in {HEADERS_S:.0f} s, or under 1 MiB in {BODY_S:.0f} s")


def read_chunk(response: requests.Response) -> bytes:
    """Return the next bytes of an answer as they were sent, none at its end."""
    chunk: bytes = response.raw.read(CHUNK_BYTES, decode_content=False)
    return chunk


def number(text: str) -> int | None:
    """Return the number in a header; None if there is none, or one that no file and no pause can have."""
    return int(text) if re.fullmatch(r"\d{1,18}", text.strip(" \t"), re.ASCII) else None


def retry_after_s(header: str | None) -> float | None:
    """Return the pause that a Retry-After header asks for, in s from now; None if it cannot be understood."""
    if header is None:
        return None
    if (seconds := number(header)) is not None:
        return float(seconds)
    try:
        when = parsedate_to_datetime(header)
        pause = when.replace(tzinfo=when.tzinfo or timezone.utc) - datetime.now(timezone.utc)
    except (ValueError, TypeError, OverflowError):
        return None
    return max(0.0, pause.total_seconds())


def without_password(url: str) -> str:
    """Return ``url`` for a message: without the name and password that it may contain, cut and escaped by `brief`."""
    return brief(hide_password(url))


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that led to it: requests wraps the errors of urllib3, which wrap the system's."""
    pending, seen = [error], set[int]()
    while pending:
        current = pending.pop(0)
        if id(current) not in seen:
            seen.add(id(current))
            yield current
            inside = (getattr(current, "reason", None), *current.args, current.__cause__, current.__context__)
            pending += [cause for cause in inside if isinstance(cause, BaseException)]


def innermost(error: BaseException) -> str:
    """Return the text of the innermost wrapped error, which tells the reason most plainly."""
    while True:
        inside = [cause for cause in (getattr(error, "reason", None), *error.args) if isinstance(cause, BaseException)]
        if not inside:
            return brief(re.sub(r"^<?[\w.]*\(.*?\)>?: |^<.*?>: ", "", str(error)) or type(error).__name__)
        error = inside[0]


@dataclass(frozen=True)
class Page:
    """The title of a web page, and the address that its download form leads to.

    ``link`` is None where the page has no such form: one with "download" in its id or a field named "confirm".
    """

    title: str
    link: str | None


def read_form(html: str, base: str) -> Page:
    """Return title and link of a page; ``base`` is the page's address, to which the form's may be relative.

    Raises ValueError where the form's address is not a valid one.
    """
    title = TITLE.search(html)
    return Page(" ".join(unescape(title[1]).split()) if title else "", _link(html, base))


def _link(html: str, base: str) -> str | None:
    form: dict[str, str] | None = None
    fields: dict[str, str] = {}
    for tag, text in TAG.findall(html):
        attributes = {key.lower(): unescape(a or b or c) for key, a, b, c in ATTRIBUTE.findall(text)}
        if tag.lower() == "form":
            form, fields = attributes, {}
        elif tag.lower() == "/form":
            if form is not None and ("download" in form.get("id", "").lower() or "confirm" in fields):
                return _submitted(form.get("action", ""), base, fields)
            form = None
        elif attributes.get("type", "").lower() == "hidden" and "name" in attributes:
            fields[attributes["name"]] = attributes.get("value", "")
    return None


def _submitted(action: str, base: str, fields: dict[str, str]) -> str | None:
    """Return the address that a browser would ask for when the form is sent; None if that is not one of the web."""
    parts = urlsplit(urljoin(base, action))
    if parts.scheme not in ("http", "https"):
        return None
    query = dict(parse_qsl(parts.query, keep_blank_values=True)) | fields
    return urlunsplit(parts._replace(query=urlencode(query), fragment=""))


class Session(requests.Session):
    """A session that leaves redirects to its user, because requests would read their bodies, which may never end."""

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        """Return None, so that no redirect is followed."""
        return None


class Watchdog:
    """A clock that shuts down connections when it runs out, started by `expect` and stopped by `rest`.

    The timeouts of requests are between two bytes, however few of them arrive; this bounds the time in all. Whoever
    reads from a connection that was shut down sees the end of the answer or an error, and ``has_cut`` tells why.
    """

    def __init__(self) -> None:
        self.has_cut = False
        self._sockets: list[socket.socket] = []
        self._timer: threading.Timer | None = None

    def expect(self, limit_s: float) -> None:
        """Start the clock anew: `expect` or `rest` has to be called within ``limit_s`` seconds."""
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
        cut, self._sockets = self._sockets, []  # the sockets of the next try, which may begin at once, are not cut
        for connected in cut:
            with suppress(OSError):  # closed by now
                socket.socket.shutdown(connected, socket.SHUT_RDWR)  # of TLS sockets too without the farewell of TLS


class WatchedAdapter(HTTPAdapter):
    """The part of requests that makes connections, changed to tell a watchdog of the socket of each connection."""

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
    """Return a subclass of a connection pool whose connections tell the watchdog of their sockets."""
    if hasattr(pool, "watchdog"):  # made by an earlier call
        return pool

    class Connection(pool.ConnectionCls):
        def connect(self) -> None:
            super().connect()
            watchdog.add(self.sock)

    return type(pool.__name__, (pool,), {"ConnectionCls": Connection, "watchdog": watchdog})


class LockedElsewhereError(Exception):
    """Another process holds the lock; the text says which, as far as it is known."""


def open_own(path: Path, mode: str, buffering: int = -1) -> IO[bytes]:
    """Open a file for writing, in a binary mode, unless it is a symbolic link or a pipe; raises OSError for those.

    In a folder that others can write to, a link could lead to any file of this user, and a pipe would block.
    """
    return open(path, mode, buffering, opener=_open_no_link)


def _open_no_link(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link, which is not written through: remove it", path) from None
        raise


@contextmanager
def locked(path: Path, waiting_for: str | None = None) -> Iterator[bool]:
    """Hold the lock file ``path``, made where it is missing, and yield True; the system frees it if the process dies.

    While another process holds it: wait and say so in the log if ``waiting_for`` names what is waited for, wait without
    a word if it is empty, and raise LockedElsewhereError if it is None. Yields False where neither the system nor the
    file system has locks. The lock file is left behind: if it were removed, a third process could lock a new file while
    a second waits for the old one.
    Raises OSError if it cannot be made, or is a symbolic link.
    """
    with open_own(path, "a+b") as file:
        _lock_files.add(file)
        is_alone = fcntl is not None and _acquire(file, waiting_for)
        if is_alone:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            file.flush()
        yield is_alone


def _acquire(file: IO[bytes], waiting_for: str | None) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if waiting_for is None:
            file.seek(0)
            holder = file.read().decode(errors="backslashreplace").strip()
            raise LockedElsewhereError(holder or "another process") from None
        if waiting_for:
            logger.info("%s: another process is fetching it; waiting", waiting_for)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:  # some network file systems
        return False
    return True
