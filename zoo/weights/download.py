"""Downloads one file over HTTP: resumes a partial file, retries, and answers Google Drive's confirmation form.

Tested by tests/weights/test_fetch.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlencode, urljoin, urlsplit

import requests
import urllib3
from tqdm import tqdm

from zoo.errors import WeightsError, hide_password, truncate

logger = logging.getLogger("zoo")

TIMEOUT_S = 10.0, 30.0  # to connect, and between two packets
TRIES = 5  # in a row that each receive less than PROGRESS_BYTES; the pauses between them are 1, 2, 4 and 8 s
PROGRESS_BYTES = 2**20
CHUNK_BYTES = 2**16
PAGE_BYTES = 2**16  # a web page is read up to here
MAX_FILE_BYTES = 2**32  # the largest published file, of 109 million parameters, has 0.44 GB
Sleep = Callable[[float], None]


class DownloadError(WeightsError):
    """The server does not provide the file, and repeating the request at once would not help."""


class UnresolvedError(DownloadError):
    """The host name cannot be resolved: there is no network, or no such host."""


class _RetryableError(Exception):
    """The request failed in a way that may pass."""


def download(url: str, part: Path, title: str, *, sleep: Sleep = time.sleep) -> bool:
    """Download ``url`` to the file ``part`` and return True if it was assembled from several responses.

    If ``part`` exists, the download continues at its end. An assembled file is a mixture of two versions if the file
    on the server changed in between, so compare a digest. On failure the received bytes remain in ``part``.

    Args:
    - `title`: name of the file in the log and on the progress bar.
    - `sleep`: waits for a number of seconds between two tries.

    Raises DownloadError if the server refuses, sends a web page or more than `MAX_FILE_BYTES`, and after `TRIES`
    failures in a row; OSError if ``part`` cannot be written.
    """
    was_resumed, largest, failures = False, _size(part), 0
    with requests.Session() as session:
        while True:
            was_resumed |= _size(part) > 0
            try:
                _receive(session, url, part, title)
                return was_resumed
            except _RetryableError as error:
                failures = 1 if _size(part) >= largest + PROGRESS_BYTES else failures + 1
                largest = max(largest, _size(part))
                if failures == TRIES:
                    raise _error(f"{error}, {TRIES} times in a row", url) from None
                pause_s = 2.0 ** (failures - 1)
                logger.warning("%s: %s; retrying in %.0f s", title, error, pause_s)
                sleep(pause_s)


def _receive(session: requests.Session, url: str, part: Path, title: str) -> None:
    """Request the missing end of ``part`` and append it; a server that ignores Range sends the whole file anew."""
    try:
        with _open(session, url, _size(part)) as response:
            if response.status_code == 416:  # the part is complete, or longer than the file: the digest decides
                return
            is_rest = response.status_code == 206
            have = _size(part) if is_rest else 0
            missing = response.raw.length_remaining
            total = None if missing is None else have + missing
            with (
                part.open("ab" if is_rest else "wb") as file,
                tqdm(
                    desc=title, initial=have, total=total, unit="B", unit_scale=True, disable=None, leave=False
                ) as bar,
            ):
                for chunk in response.iter_content(CHUNK_BYTES):
                    if file.tell() + len(chunk) > MAX_FILE_BYTES:
                        raise _error(f"the server sends more than {MAX_FILE_BYTES:,} bytes", url)
                    file.write(chunk)
                    bar.update(len(chunk))
    except requests.exceptions.SSLError as error:
        raise _error(f"the connection is not secure ({_root_cause(error)})", url) from None
    except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
        if isinstance(getattr(error.args[0], "reason", None), urllib3.exceptions.NameResolutionError):
            reason = f"the host name cannot be resolved ({_root_cause(error)}): check the network connection"
            raise UnresolvedError(f"{reason}; {_shown(url)}") from None
        raise _RetryableError(f"the connection failed ({_root_cause(error)})") from None
    except (requests.RequestException, urllib3.exceptions.HTTPError, ValueError) as error:  # a malformed answer
        raise _error(f"the URL cannot be fetched ({_root_cause(error)})", url) from None


def _open(session: requests.Session, url: str, offset: int) -> requests.Response:
    """Return the response with the bytes from ``offset`` on; Google Drive's confirmation form is submitted once."""
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={offset}-"} if offset else {})
    address = url
    for may_confirm in (True, False):
        response = session.get(address, headers=headers, stream=True, timeout=TIMEOUT_S)
        status = response.status_code
        if status not in (200, 206) and not (status == 416 and offset):
            response.close()
            answer = f"the server answered {status} {truncate(response.reason or '')}".strip()
            if status in (408, 429) or status >= 500:
                raise _RetryableError(answer)
            raise _error(answer, url)
        if not response.headers.get("Content-Type", "").lower().startswith("text/html"):
            return response
        with response:
            page = ConfirmationPage(next(response.iter_content(PAGE_BYTES), b"").decode("utf-8", errors="replace"))
        address = page.target(response.url)
        if not address or not may_confirm:
            break
    title = f" ('{truncate(page.title)}')" if page.title else ""
    raise _error(f"the server sent a web page instead of the file{title}", url)


class ConfirmationPage(HTMLParser):
    """The title of a web page, and the form by which Google Drive asks to confirm the download of a large file."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.title = ""
        self._action: str | None = None
        self._fields: dict[str, str] = {}
        self._is_title = self._is_form = False
        self.feed(html)

    def target(self, base: str) -> str:
        """Return the URL that the form leads to, resolved against the page's URL ``base``; empty without a form."""
        if self._action is None:
            return ""
        parts = urlsplit(urljoin(base, self._action))
        return parts._replace(query="&".join(filter(None, [parts.query, urlencode(self._fields)]))).geturl()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the form's action and its hidden fields."""
        attributes = {name: value or "" for name, value in attrs}
        self._is_title = tag == "title"
        if tag == "form":
            self._is_form = "download" in attributes.get("id", "")
            self._action = attributes.get("action", "") if self._is_form else self._action
        elif self._is_form and tag == "input" and attributes.get("type") == "hidden":
            self._fields[attributes.get("name", "")] = attributes.get("value", "")

    def handle_endtag(self, tag: str) -> None:
        """Note the end of the form and of the title."""
        self._is_title = False
        self._is_form = self._is_form and tag != "form"

    def handle_data(self, data: str) -> None:
        """Collect the text of the title."""
        self.title += " ".join(data.split()) if self._is_title else ""


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _error(reason: str, url: str) -> DownloadError:
    return DownloadError(f"{reason}; {_shown(url)}")


def _shown(url: str) -> str:
    """Return a URL for messages: without user name and password, shortened, and with escaped control characters."""
    return truncate(hide_password(url))


def _root_cause(error: BaseException) -> str:
    """Return the text of the exception that started the chain: requests wraps errors of urllib3 and of the system."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return truncate(str(error) or type(error).__name__)
