"""Downloads one file over HTTP: resumed where it broke off, tried again where that may help, never a web page."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from itertools import chain
from pathlib import Path

import requests
from tqdm import tqdm

from zoo.errors import WeightsError
from zoo.weights.cache import open_own
from zoo.weights.drive import Page

logger = logging.getLogger("zoo")

CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10.0, 30.0
TRIES = 5  # without a byte more in between; waits of 1, 2, 4 and 8 s
MAX_WAIT_S = 120.0  # a server that asks for a longer pause is not waited for
CHUNK_BYTES = 2**16
PAGE_BYTES = 2**20  # more of a web page is not read
Sleep = Callable[[float], None]


class DownloadError(WeightsError):
    """The server does not give the file, and trying again at once will not help."""


class Transient(Exception):
    """The server does not give the file now; ``wait_s`` is the pause that it asks for, if it does."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


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

        Raises DownloadError when the server refuses, or TRIES in a row bring nothing; OSError when the file cannot
        be written. What was received stays in the file in either case.
        """
        largest, failures = self._size(), 0
        with requests.Session() as session:
            while True:
                try:
                    return self._receive(session)
                except Transient as problem:
                    if self._size() and is_whole(self.part):  # the server promised more than there is
                        return None
                    failures = 1 if self._size() > largest else failures + 1
                    largest = max(largest, self._size())
                    self._pause(problem, failures)

    def _pause(self, problem: Transient, failures: int) -> None:
        """Wait before the next try; raise DownloadError where there is none."""
        wait_s = 2.0 ** (failures - 1) if problem.wait_s is None else problem.wait_s
        if failures >= TRIES:
            raise DownloadError(f"{problem}, {failures} times in a row; {shown(self.url)}")
        if wait_s > MAX_WAIT_S:
            raise DownloadError(f"{problem} and asks for a pause of {wait_s:.0f} s; {shown(self.url)}")
        logger.warning("%s: %s; next try in %.0f s", self.title, problem, wait_s)
        self.sleep(wait_s)

    def _receive(self, session: requests.Session) -> None:
        """Make one request for what is missing and write the answer; what may pass is raised as Transient."""
        try:
            with self._open(session, self._size()) as response:
                if response.status_code != 416:  # 416: there is nothing after what we have; the digest decides
                    self._write(response)
        except requests.exceptions.SSLError as error:
            raise DownloadError(f"the connection is not secure ({innermost(error)}); {shown(self.url)}") from None
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
            raise Transient(f"the connection failed ({innermost(error)})") from None
        except requests.RequestException as error:
            raise DownloadError(f"the address cannot be fetched ({innermost(error)}); {shown(self.url)}") from None

    def _open(self, session: requests.Session, offset: int) -> requests.Response:
        """Return the answer with the file from ``offset`` on, after confirming what Drive wants confirmed."""
        response = request(session, self.url, offset)
        if not is_page(response):
            return response
        with response:
            page = read_page(response)
        if page.link is not None:
            response = request(session, page.link, offset)
            if not is_page(response):
                return response
            with response:
                page = read_page(response)
        raise web_page(page.title, self.url)

    def _write(self, response: requests.Response) -> None:
        """Append the answer to the file, or begin the file anew where the server sends all of it."""
        start = self._start(response)
        response.raw.enforce_content_length = False  # it would throw away the last bytes of a truncated answer
        chunks: Iterator[bytes] = response.iter_content(CHUNK_BYTES)
        first = next(chunks, b"")
        if not start and first.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"<"):
            raise web_page("", self.url)
        self.was_resumed = start > 0
        declared = response.headers.get("Content-Length", "")
        total = start + int(declared) if declared.isdecimal() else None
        with open_own(self.part, "ab" if start else "wb") as file, self._bar(start, total) as bar:
            for chunk in chain([first], chunks):
                file.write(chunk)
                bar.update(len(chunk))
        if total is not None and self._size() < total:
            raise Transient(f"the connection ended after {self._size():,} of {total:,} bytes")

    def _start(self, response: requests.Response) -> int:
        """Return the position in the file at which the answer starts."""
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise DownloadError(f"the server sends the file as {encoding} and not as it is; {shown(self.url)}")
        if response.status_code == 200:
            return 0
        content_range = response.headers.get("Content-Range", "")
        found = re.match(r"bytes (\d+)-", content_range)
        if found is None or int(found[1]) != self._size():
            problem = f"the server sent another part than asked for (Content-Range {content_range!r})"
            self.part.unlink(missing_ok=True)  # so that the next request is for all of it
            raise Transient(problem)
        return int(found[1])

    def _bar(self, start: int, total: int | None) -> tqdm:
        return tqdm(desc=self.title, initial=start, total=total, unit="B", unit_scale=True, disable=None, leave=False)

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0


def request(session: requests.Session, url: str, offset: int) -> requests.Response:
    """Return the answer to a request for ``url`` from byte ``offset`` on; its status is 200, 206 or 416.

    Raises Transient and DownloadError for others.
    """
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={offset}-"} if offset else {})}
    response = session.get(url, headers=headers, stream=True, timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S))
    status = response.status_code
    if status in (200, 206) or (status == 416 and offset):
        return response
    response.close()
    answer = f"the server answered {status} {response.reason or ''}".strip()
    if status in (408, 429) or status >= 500:
        raise Transient(answer, retry_after_s(response.headers.get("Retry-After")))
    raise DownloadError(f"{answer}; {shown(url)}")


def retry_after_s(header: str | None) -> float | None:
    """Return the pause that a Retry-After header asks for, in s from now; None where it says nothing intelligible."""
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        when = parsedate_to_datetime(header)
    except ValueError:
        return None
    return max(0.0, (when.replace(tzinfo=when.tzinfo or timezone.utc) - datetime.now(timezone.utc)).total_seconds())


def is_page(response: requests.Response) -> bool:
    """Return whether an answer calls itself a web page."""
    return response.headers.get("Content-Type", "").lower().startswith(("text/html", "application/xhtml"))


def read_page(response: requests.Response) -> Page:
    """Return the web page that an answer holds."""
    content = b""
    for chunk in response.iter_content(CHUNK_BYTES):
        content += chunk
        if len(content) >= PAGE_BYTES:
            break
    return Page(content.decode("utf-8", errors="replace"), response.url)


def web_page(title: str, url: str) -> DownloadError:
    """Return the error for a web page in place of weights."""
    called = f" ({title!r})" if title else ""
    return DownloadError(f"a web page came in place of the weights{called}; {shown(url)}")


def shown(url: str) -> str:
    """Return ``url`` as messages show it: a password in it is nobody's business."""
    return re.sub(r"(?<=://)[^/?#]*@", "", url)


def innermost(error: BaseException) -> str:
    """Return the reason in an error of requests, which wraps those of urllib3, which wrap those of the system."""
    seen = error
    while True:
        inside = [cause for cause in (getattr(seen, "reason", None), *seen.args) if isinstance(cause, BaseException)]
        if not inside:
            return re.sub(r"^<?[\w.]*\(.*?\)>?: |^<.*?>: ", "", str(seen)) or type(seen).__name__
        seen = inside[0]
