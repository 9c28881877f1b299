"""A server that wants to do harm, or is badly broken, costs bounded time, disk and memory, and ends in one error."""

from __future__ import annotations

import errno
import logging
import os
import random
import re
import shutil
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from tests.weights.conftest import CONTENT, MD5, NAME
from tests.weights.server import Answer, Handler, Server, fails, names_are_unknown, redirects, sends, truncates
from zoo.cli import main
from zoo.errors import WeightsError
from zoo.weights import download, fetch_weights
from zoo.weights.download import UnresolvedError, read_form, retry_after_s

HTML = "text/html; charset=utf-8"
Usage = namedtuple("Usage", "total used free")


def raw(content: bytes) -> Answer:
    """Send ``content``, which begins with the status line, and close the connection."""

    def answer(handler: Handler) -> None:
        handler.wfile.write(content)
        handler.close_connection = True

    return answer


def headers(*lines: bytes, status: bytes = b"200 OK", body: bytes = b"") -> Answer:
    return raw(b"\r\n".join([b"HTTP/1.1 " + status, *lines, b"", body]))


def repeats(head: bytes, piece: bytes, pause_s: float = 0.0) -> Answer:
    """Send ``head`` and then ``piece`` for ever."""

    def answer(handler: Handler) -> None:
        handler.wfile.write(head)
        while not handler.server.is_over.wait(pause_s):
            handler.wfile.write(piece)

    return answer


def refusal(**kwargs: Any) -> str:
    with pytest.raises(WeightsError) as caught:
        fetch_weights(NAME, sleep=lambda pause_s: None, **kwargs)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 1500
    return message


def parts(cache: Path) -> list[str]:
    return [file.name for file in cache.glob("*.part")]


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(repeats(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), id="100 Continue for ever"),
        pytest.param(repeats(b"HTTP/1.1 200 OK\r\n", b"A: b\r\n", 0.05), id="a header now and then"),
        pytest.param(repeats(b"HTTP/1.1 200 OK\r\n\r\n", b"x", 0.05), id="a byte now and then, no length"),
        pytest.param(
            repeats(b"HTTP/1.1 200 OK\r\nContent-Length: 300004\r\n\r\n", b"x", 0.05), id="a byte now and then"
        ),
        pytest.param(
            repeats(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n", 0.05), id="short chunks"
        ),
        pytest.param(
            repeats(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n", b"<", 0.05), id="a page, byte by byte"
        ),
    ],
)
def test_what_comes_too_slowly_or_never_ends_is_cut(
    answer: Answer, server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pauses between the bytes stay below the timeout of a read."""
    monkeypatch.setattr(download, "HEADERS_S", 0.3)
    monkeypatch.setattr(download, "BODY_S", 0.3)
    server.usual = answer
    start = time.monotonic()
    message = refusal()
    assert time.monotonic() - start < 15
    assert "too slow" in message or "a web page" in message
    assert len(server.requests) <= 5
    assert not any((cache / part).stat().st_size > 100 for part in parts(cache))


def test_a_server_that_gives_some_bytes_more_each_time_is_left_after_five_tries(server: Server) -> None:
    server.usual = truncates(1000)
    assert "5 times in a row" in refusal()
    assert len(server.requests) == 5


def test_the_tries_for_one_file_are_bounded_whatever_they_bring(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "TOTAL_TRIES", 7)
    server.usual = truncates(20_000)
    assert "and 7 tries did not bring all of the file" in refusal()
    assert len(server.requests) == 7


@pytest.mark.parametrize("head", [b"", b"Transfer-Encoding: chunked\r\n"])
def test_a_body_without_end_is_cut_and_removed(
    head: bytes, server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "MAX_FILE_BYTES", 2**20)
    piece = b"10000\r\n" + bytes(2**16) + b"\r\n" if head else bytes(2**16)
    server.usual = repeats(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n", piece)
    assert "sends more than 1,048,576 bytes" in refusal()
    assert parts(cache) == []


def test_a_body_of_unknown_length_that_fills_the_disk_is_removed(
    server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        """The part, on a disk that is full after 100 kB."""

        def __init__(self, path: Path, mode: str) -> None:
            self.file = open(path, mode)  # noqa: SIM115

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def write(self, chunk: bytes) -> None:
            self.file.write(chunk)
            if self.file.tell() > 100_000:
                raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download, "open_own", Full)
    server.usual = repeats(b"HTTP/1.1 200 OK\r\n\r\n", bytes(2**16))
    assert "No space left on device" in refusal()
    assert parts(cache) == []


@pytest.mark.parametrize("size", [2**33, 10**17])
def test_a_size_that_no_weights_have_is_refused_before_a_byte_is_written(
    size: int, server: Server, cache: Path
) -> None:
    server.usual = headers(b"Content-Length: %d" % size, body=CONTENT)
    assert f"announces {size:,} bytes" in refusal()
    assert parts(cache) == []


def test_a_file_for_which_there_is_no_room_is_refused_before_a_byte_is_written(
    server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 0, 200_000))
        message = refusal()
        assert "300,004 bytes are to come and 200,000 bytes of disk are free" in message
        assert "set ZOO_CACHE" in message
        assert parts(cache) == []
        (cache / f"{NAME}.pth.tar.part").write_bytes(CONTENT[:150_000])
        assert fetch_weights(NAME).read_bytes() == CONTENT  # what is there already needs no room


def test_the_size_is_said_before_the_file_comes(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.script = [truncates(100_000)]
    with caplog.at_level(logging.INFO, logger="zoo"):
        fetch_weights(NAME, sleep=lambda pause_s: None)
    sizes = [record.getMessage() for record in caplog.records if " MB" in record.getMessage()]
    assert sizes == [f"{NAME}: 0.3 MB", f"{NAME}: 0.3 MB, 0.1 MB of them are there"]


def test_the_body_of_a_redirect_is_not_read(server: Server) -> None:
    """It may have no end."""
    server.script = [repeats(b"HTTP/1.1 302 Found\r\nLocation: /there\r\n\r\n", bytes(2**16))]
    start = time.monotonic()
    assert fetch_weights(NAME).read_bytes() == CONTENT
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    "page", [b"<form" * 20_000, b"<form " * 20_000, b"<a" * 50_000, b'<form x="' * 20_000, b"<input " + b"a" * 10**5]
)
def test_a_page_takes_time_in_proportion_to_its_length(page: bytes, server: Server) -> None:
    start = time.monotonic()
    read_form((page * 20).decode(), "http://a.org")  # far more than is ever read of a page
    assert time.monotonic() - start < 5
    server.usual = sends(page, HTML)
    assert "a web page" in refusal()


def test_no_page_is_read_beyond_64_kib(server: Server) -> None:
    server.usual = repeats(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n", b"<p>" + bytes(2**16))
    assert "a web page" in refusal()


FORM = b'<form id="download" action="%s"><input type="hidden" name="confirm" value="t"></form>'


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(redirects("http://[::1"), id="Location with half a bracket"),
        pytest.param(redirects("http://a..b/"), id="Location with an empty label"),
        pytest.param(redirects(f"http://{'a' * 300}.org/"), id="Location with a long label"),
        pytest.param(redirects("http://example.org:99999/"), id="Location with a large port"),
        pytest.param(redirects("gopher://example.org/"), id="Location with another scheme"),
        pytest.param(redirects("http://\x80/"), id="Location that is no UTF-8"),
        pytest.param(sends(FORM % b"http://[::1", HTML), id="form with half a bracket"),
        pytest.param(sends(FORM % b"http://a..b/", HTML), id="form with an empty label"),
        pytest.param(sends(b"<![foo[", HTML), id="odd declaration"),
        pytest.param(sends(b"<!DOCTYPE [<!" + b"<a>" * 10_000, HTML), id="nested page"),
        pytest.param(sends(b"\xff\xfe&#99999999999;<title>&#x1b;[31m", HTML), id="page that is no UTF-8"),
        pytest.param(headers(b"Content-Length: " + b"9" * 5000, body=b"x"), id="Content-Length of 5,000 digits"),
        pytest.param(headers(b"Content-Length: -1", body=b"x"), id="negative Content-Length"),
        pytest.param(headers(b"Content-Length: 1", b"Content-Length: 2", body=b"x"), id="two Content-Lengths"),
        pytest.param(
            headers(b"Content-Range: bytes " + b"9" * 5000 + b"-", status=b"206 Partial"), id="Content-Range of digits"
        ),
        pytest.param(headers(b"Content-Range: bytes \xb2-", status=b"206 Partial"), id="Content-Range with a power"),
        pytest.param(headers(b"Content-Encoding: \x1b[31m" + b"x" * 9999, body=b"x"), id="odd encoding"),
        pytest.param(headers(b"Retry-After: 0\x1f", status=b"503 Later"), id="Retry-After with a control character"),
        pytest.param(headers(b"Retry-After: " + b"9" * 5000, status=b"503 Later"), id="Retry-After of 5,000 digits"),
        pytest.param(headers(status=b"503 \x1b[31mred\x0bline"), id="colour in the reason"),
        pytest.param(headers(status=b"404 " + b"x" * 50_000), id="long reason"),
        pytest.param(raw(b"\x1b[31mHTTP?\r\n\r\n"), id="no status line"),
        pytest.param(raw(b"HTTP/1.1 abc\r\n\r\n"), id="status that is no number"),
        pytest.param(raw(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n"), id="200 headers"),
        pytest.param(raw(b"HTTP/1.1 200 OK\r\nA: " + b"b" * 70_000 + b"\r\n\r\n"), id="long header"),
        pytest.param(headers(b"Transfer-Encoding: chunked", body=b"zz\r\nx"), id="chunk of no length"),
        pytest.param(headers(b"Transfer-Encoding: chunked", body=b"9" * 70_000), id="chunk with a long length"),
        pytest.param(headers(b"Transfer-Encoding: chunked", body=b"-5\r\nx"), id="chunk of negative length"),
        pytest.param(
            headers(b"Set-Cookie: \x00=\xff; domain=[", body=b"<title>\x1b[31m</title>"), id="odd cookie and title"
        ),
    ],
)
def test_every_odd_answer_ends_in_one_printable_error(answer: Answer, server: Server, cache: Path) -> None:
    server.usual = answer
    message = refusal()
    assert MD5 in message
    assert not (cache / f"{NAME}.pth.tar").exists()


def test_random_answers_end_in_one_printable_error(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers put together from what goes wrong elsewhere, three hundred of them."""
    monkeypatch.setattr(download, "TRIES", 2)
    rng = random.Random(1)
    values = [b"", b"0", b"-1", b"9" * 30, b"\xb2", b"bytes 0-", b"bytes 5-9/10", b"text/html", b"gzip", b"chunked"]
    values += [b"http://[", b"/x", b"\x1b[31m", b"Wed, 99 Foo 99999 99:99:99 GMT", b"Mon, 1 Jan 1 0:0:0 +9999", b"%"]
    names = [b"Content-Length", b"Content-Range", b"Content-Type", b"Content-Encoding", b"Transfer-Encoding"]
    names += [b"Location", b"Retry-After", b"Set-Cookie", b"Connection"]
    bodies = [b"", b"x" * 50, b"5\r\nhello\r\n0\r\n\r\n", b"<title>", FORM % b"/y", FORM % b"//[", b"\xff" * 9]
    statuses = [b"200 OK", b"206 P", b"302 F", b"307 T", b"416 R", b"429 M", b"503 \x07", b"204 N", b"404 ", b"999 "]

    def random_answer(handler: Handler) -> None:
        lines = [rng.choice(names) + b": " + rng.choice(values) for _ in range(rng.randrange(4))]
        headers(*lines, status=rng.choice(statuses), body=rng.choice(bodies))(handler)

    server.usual = random_answer
    for _ in range(300):
        refusal()


@pytest.mark.parametrize("header", ["", " ", "0\x1f", "-1", "9" * 19, "Mon, 01 Jan 0001 00:00:00 +2359", "x" * 1000])
def test_a_retry_after_that_says_nothing_is_none(header: str) -> None:
    assert retry_after_s(header) in (None, 0.0)


def test_a_name_that_is_not_known_is_not_tried_again(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = names_are_unknown(monkeypatch)
    monkeypatch.setenv("ZOO_WEIGHTS_URL", "https://mirror.example/weights")
    with pytest.raises(UnresolvedError, match=r"is not known here .*for lack of a network;") as caught:
        fetch_weights(NAME, sleep=lambda pause_s: pytest.fail("there was a pause"))
    assert "Temporary failure in name resolution" in str(caught.value)
    assert asked == ["mirror.example"]
    assert main(["fetch", "all"]) == 2
    assert len(asked) == 2
    assert len(re.findall("is not known here", capsys.readouterr().err)) == 1


def test_a_server_error_still_passes(server: Server) -> None:
    server.script = [fails(503), truncates(100_000)]
    assert fetch_weights(NAME, sleep=lambda pause_s: None).read_bytes() == CONTENT
    assert os.path.exists(fetch_weights(NAME))
