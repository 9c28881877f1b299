"""Downloads one file over HTTP: resumed where it broke off, tried again where that may help, never a web page."""

from __future__ import annotations

import errno
import logging
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urljoin

import requests
import urllib3
from tqdm import tqdm

from zoo.errors import WeightsError, brief
from zoo.files import open_own
from zoo.weights.drive import Page, read_form
from zoo.weights.watchdog import Watchdog, WatchedAdapter

logger = logging.getLogger("zoo")

CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10.0, 30.0  # the latter between two bytes
TRIES = 5  # in a row that bring less than PROGRESS_BYTES; waits of 1, 2, 4 and 8 s
TOTAL_TRIES = 100  # for one file, whatever they bring
PROGRESS_BYTES = 2**14
MAX_WAIT_S = 120.0  # a server that asks for a longer pause is not waited for
MAX_REDIRECTS = 10
HEADERS_S = 60.0  # from a request to the end of the headers of its answer; and for a web page
BODY_S, BODY_BYTES = 180.0, 2**20  # the file has to come at 1 MiB in 3 minutes at least: 6 kB/s
CHUNK_BYTES = 2**16
PAGE_BYTES = 2**16  # more of a web page is not read
MAX_FILE_BYTES = 2**32  # the largest published network has 109 million parameters: 0.44 GB
Sleep = Callable[[float], None]
CONNECTION_ERRORS = (
    requests.ConnectionError,
    requests.Timeout,
    urllib3.exceptions.ProtocolError,
    urllib3.exceptions.TimeoutError,
    urllib3.exceptions.IncompleteRead,
)


class DownloadError(WeightsError):
    """The server does not give the file, and trying again at once will not help."""


class UnresolvedError(DownloadError):
    """The name of the server is not known here: there is no network, or no such server."""


class Transient(Exception):
    """The server does not give the file now; ``wait_s`` is the pause that it asks for, if it does."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class Session(requests.Session):
    """A session that leaves redirects to its user: it would read all of their bodies, however long."""

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        """Return that there is nothing to follow."""
        return None


class Download:
    """The download of ``url`` into the file ``part``, which holds the beginning already if it exists.

    ``title`` names it in messages. ``was_resumed`` tells whether the file was put together from several answers, so
    that it may be a mixture if the file changed on the server.
    """

    def __init__(self, url: str, part: Path, title: str, sleep: Sleep) -> None:
        self.url, self.part, self.title, self.sleep = url, part, title, sleep
        self.was_resumed = False

    def run(self, is_whole: Callable[[Path], bool]) -> None:
        """Receive until the server says that the file is complete, or it ``is_whole`` although the server denies it.

        Raises DownloadError when the server refuses, TRIES in a row bring hardly anything, or TOTAL_TRIES were made;
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
        """Wait before the next try; raise DownloadError where there is none."""
        wait_s = 2.0 ** (failures - 1) if problem.wait_s is None else problem.wait_s
        if failures >= TRIES:
            raise DownloadError(f"{problem}, {failures} times in a row; {shown(self.url)}")
        if tries >= TOTAL_TRIES:
            raise DownloadError(f"{problem}, and {tries} tries did not bring all of the file; {shown(self.url)}")
        if wait_s > MAX_WAIT_S:
            raise DownloadError(f"{problem} and asks for a pause of {wait_s:.0f} s; {shown(self.url)}")
        logger.warning("%s: %s; next try in %.0f s", self.title, problem, wait_s)
        self.sleep(wait_s)

    def _receive(self, session: requests.Session, watchdog: Watchdog) -> None:
        """Make one request for what is missing and write the answer; what may pass is raised as Transient.

        Here, and nowhere else, all that a server can say wrongly becomes one of these two errors.
        """
        try:
            with self._open(session, watchdog, self._size()) as response:
                if response.status_code != 416:  # 416: there is nothing after what we have; the digest decides
                    self._write(response, watchdog)
        except (requests.exceptions.SSLError, urllib3.exceptions.SSLError) as error:
            raise DownloadError(f"the connection is not secure ({innermost(error)}); {shown(self.url)}") from None
        except CONNECTION_ERRORS as error:
            if any(isinstance(cause, socket.gaierror) for cause in causes(error)):
                reason = f"the name of the server is not known here ({innermost(error)}), perhaps for lack of a network"
                raise UnresolvedError(f"{reason}; {shown(self.url)}") from None
            if watchdog.has_cut:
                raise too_slow() from None
            raise Transient(f"the connection failed ({innermost(error)})") from None
        except (requests.RequestException, urllib3.exceptions.HTTPError, ValueError) as error:
            raise DownloadError(f"the address cannot be fetched ({innermost(error)}); {shown(self.url)}") from None
        finally:
            watchdog.rest()

    def _open(self, session: requests.Session, watchdog: Watchdog, offset: int) -> requests.Response:
        """Return the answer with the file from ``offset`` on, after confirming what Drive wants confirmed."""
        response = request(session, watchdog, self.url, offset)
        if not is_page(response):
            return response
        with response:
            page = read_page(response)
        if page.link is not None:
            response = request(session, watchdog, page.link, offset)
            if not is_page(response):
                return response
            with response:
                page = read_page(response)
        raise web_page(page.title, self.url)

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
            raise web_page("", self.url)
        self.was_resumed = start > 0
        try:
            with open_own(self.part, "ab" if start else "wb") as file, self._bar(start, total) as bar:
                size, checked = start, start
                while chunk:
                    size += len(chunk)
                    if size > MAX_FILE_BYTES:
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
        """Say how large the file is; raise DownloadError or OSError if it cannot be right or has no room."""
        if total is None:
            return
        if total > MAX_FILE_BYTES:
            raise self._too_large(f"announces {total:,} bytes, which is")
        free = shutil.disk_usage(self.part.parent).free + (0 if start else self._size())
        if total - start > free:
            raise OSError(errno.ENOSPC, f"{total - start:,} bytes are to come and {free:,} bytes of disk are free")
        have = f", {start / 1e6:.1f} MB of them are there" if start else ""
        logger.info("%s: %.1f MB%s", self.title, total / 1e6, have)

    def _too_large(self, what: str) -> DownloadError:
        return DownloadError(f"the server {what} more than {MAX_FILE_BYTES:,} bytes, no weights; {shown(self.url)}")

    def _start(self, response: requests.Response) -> int:
        """Return the position in the file at which the answer starts."""
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise DownloadError(f"the server sends the file as {brief(encoding)} and not as it is; {shown(self.url)}")
        if response.status_code == 200:
            return 0
        content_range = response.headers.get("Content-Range", "")
        found = re.match(r"bytes (\d{1,18})-", content_range, re.ASCII)
        if found is None or int(found[1]) != self._size():
            problem = f"the server sent another part than asked for (Content-Range '{brief(content_range)}')"
            self.part.unlink(missing_ok=True)  # so that the next request is for all of it
            raise Transient(problem)
        return int(found[1])

    def _bar(self, start: int, total: int | None) -> tqdm:
        return tqdm(desc=self.title, initial=start, total=total, unit="B", unit_scale=True, disable=None, leave=False)

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0


def request(session: requests.Session, watchdog: Watchdog, url: str, offset: int) -> requests.Response:
    """Return the answer to a request for ``url`` from byte ``offset`` on; its status is 200, 206 or 416.

    Raises Transient and DownloadError for other answers.
    """
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={offset}-"} if offset else {})}
    address = url
    for _ in range(MAX_REDIRECTS + 1):
        watchdog.expect(HEADERS_S)
        response = session.get(address, headers=headers, stream=True, timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S))
        if not response.is_redirect:
            return accepted(response, url, offset)
        response.close()
        # Headers are read as Latin-1, and written as UTF-8 where they are more than ASCII.
        address = urljoin(address, response.headers["Location"].encode("latin-1").decode("utf-8"))
    raise DownloadError(f"the server redirected more than {MAX_REDIRECTS} times; {shown(url)}")


def accepted(response: requests.Response, url: str, offset: int) -> requests.Response:
    """Return an answer with a file or a page; raise Transient or DownloadError for another one."""
    status = response.status_code
    if status in (200, 206) or (status == 416 and offset):
        return response
    response.close()
    answer = f"the server answered {status} {brief(response.reason or '')}".strip()
    if status in (408, 429) or status >= 500:
        raise Transient(answer, retry_after_s(response.headers.get("Retry-After")))
    raise DownloadError(f"{answer}; {shown(url)}")


def too_slow() -> Transient:
    """Return the error for an answer that the watchdog has cut."""
    return Transient(f"the server is too slow: no headers in {HEADERS_S:.0f} s, or under 1 MiB in {BODY_S:.0f} s")


def read_chunk(response: requests.Response) -> bytes:
    """Return the next bytes of an answer as they were sent, none at its end."""
    chunk: bytes = response.raw.read(CHUNK_BYTES, decode_content=False)
    return chunk


def number(text: str) -> int | None:
    """Return the number in a header; None where there is none, or one that no file and no pause can have."""
    return int(text) if re.fullmatch(r"\d{1,18}", text.strip(" \t"), re.ASCII) else None


def retry_after_s(header: str | None) -> float | None:
    """Return the pause that a Retry-After header asks for, in s from now; None where it says nothing intelligible."""
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


def is_page(response: requests.Response) -> bool:
    """Return whether an answer calls itself a web page."""
    return response.headers.get("Content-Type", "").lower().startswith(("text/html", "application/xhtml"))


def read_page(response: requests.Response) -> Page:
    """Return the web page that an answer holds."""
    content = response.raw.read(PAGE_BYTES, decode_content=False)
    return read_form(content.decode("utf-8", errors="replace"), response.url)


def web_page(title: str, url: str) -> DownloadError:
    """Return the error for a web page in place of weights."""
    called = f" ('{brief(title)}')" if title else ""
    return DownloadError(f"a web page came in place of the weights{called}; {shown(url)}")


def shown(url: str) -> str:
    """Return ``url`` as messages show it: a password in it is nobody's business."""
    return brief(re.sub(r"(?<=://)[^/?#]*@", "", url))


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
    """Return the reason in an error, which is that of the innermost of those that it holds."""
    seen = error
    while True:
        inside = [cause for cause in (getattr(seen, "reason", None), *seen.args) if isinstance(cause, BaseException)]
        if not inside:
            return brief(re.sub(r"^<?[\w.]*\(.*?\)>?: |^<.*?>: ", "", str(seen)) or type(seen).__name__)
        seen = inside[0]
