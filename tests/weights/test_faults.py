"""Whatever a server does, a fetch ends with the verified file or one clear error, never half a file in its place."""

from __future__ import annotations

import errno
import resource
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from pathlib import Path

import pytest

from tests.weights.conftest import CONTENT, MD5, NAME
from tests.weights.server import (
    Answer,
    Handler,
    Server,
    claims,
    fails,
    ignores_range,
    redirects,
    resets,
    sends,
    sends_another_part,
    stalls,
    truncates,
    truncates_and_ignores_range,
    whole,
)
from zoo.errors import WeightsError
from zoo.weights import fetch_weights
from zoo.weights.published import entry_of

LENGTH = len(CONTENT)
PAGE = b"<!DOCTYPE html><html><head><title>Quota &amp; more</title></head><body>Sorry</body></html>"
WRONG = bytes(reversed(CONTENT))


def rest_of(offset: int) -> str:
    return f"bytes={offset}-"


@pytest.mark.parametrize(
    ("script", "pauses", "num_requests"),
    [
        pytest.param([], [], 1, id="no fault"),
        pytest.param([truncates(100_000)], [1], 2, id="truncated, then resumed"),
        pytest.param([truncates(100_000), truncates(100_000), truncates(50_000)], [1, 1, 1], 4, id="truncated thrice"),
        pytest.param([truncates(0)], [1], 2, id="headers and no byte"),
        pytest.param([resets(100_000)], [1], 2, id="reset midway, then resumed"),
        pytest.param([resets(0)], [1], 2, id="reset at once"),
        pytest.param([stalls(100_000)], [1], 2, id="stalls midway, then resumed"),
        pytest.param([stalls(0)], [1], 2, id="stalls at once"),
        pytest.param([claims(1000)], [], 1, id="claims more than there is"),
        pytest.param([truncates(100_000), ignores_range], [1], 2, id="ignores Range: from the beginning"),
        pytest.param([truncates(100_000), sends_another_part], [1, 2], 3, id="sends another part than asked for"),
        pytest.param([fails(500), fails(502), fails(503)], [1, 2, 4], 4, id="500, 502, 503, then well"),
        pytest.param([fails(429, Retry_After="7")], [7], 2, id="429 with Retry-After"),
        pytest.param([fails(429)], [1], 2, id="429 without Retry-After"),
        pytest.param([fails(503, Retry_After="soon")], [1], 2, id="Retry-After that says nothing"),
        pytest.param([redirects("/elsewhere"), redirects("/there")], [], 3, id="redirected"),
        pytest.param([truncates(100_000), redirects("/there")], [1], 3, id="resumed through a redirect"),
    ],
)
def test_faults_that_pass_end_in_the_verified_file(
    script: list[Answer], pauses: list[float], num_requests: int, server: Server, cache: Path
) -> None:
    server.script, made = list(script), []
    path = fetch_weights(NAME, sleep=made.append)
    assert path == cache / f"{NAME}.pth.tar"
    assert path.read_bytes() == CONTENT
    assert made == pauses
    assert len(server.requests) == num_requests
    assert sorted(file.name for file in cache.iterdir()) == [path.name, f"{path.name}.lock"]


@pytest.mark.parametrize(
    ("usual", "message", "num_requests"),
    [
        pytest.param(fails(404), "the server answered 404 Not Found;", 1, id="404"),
        pytest.param(fails(403), "the server answered 403 Forbidden;", 1, id="403"),
        pytest.param(fails(416), "the server answered 416", 1, id="416 without a Range"),
        pytest.param(fails(304), "the server answered 304", 1, id="304"),
        pytest.param(fails(500), "the server answered 500 Internal Server Error, 5 times in a row", 5, id="always 500"),
        pytest.param(fails(429, Retry_After="3600"), "429 .* and asks for a pause of 3600 s", 1, id="429 for an hour"),
        pytest.param(redirects("/again"), "redirected more than 10 times", 11, id="redirected in a circle"),
        pytest.param(redirects("file:///etc/passwd"), "the address cannot be fetched", 1, id="redirected to a file"),
        pytest.param(truncates_and_ignores_range, ", 5 times in a row", 5, id="always truncated, ignores Range"),
        pytest.param(stalls(0), r"the connection failed \(Read timed out.*, 5 times in a row", 5, id="always stalls"),
        pytest.param(resets(0), "the connection failed .*, 5 times in a row", 5, id="always reset"),
        pytest.param(claims(-1000), "299,004 bytes were received, but the md5 is", 1, id="claims less than there is"),
        pytest.param(sends(WRONG), "300,004 bytes were received, but the md5 is", 1, id="wrong bytes"),
        pytest.param(sends(b""), "0 bytes were received", 1, id="nothing"),
        pytest.param(
            sends(PAGE, "text/html; charset=utf-8"), r"a web page came .* \('Quota & more'\)", 1, id="a web page"
        ),
        pytest.param(sends(b"\xef\xbb\xbf\n" + PAGE), "a web page came", 1, id="a web page that claims to be a file"),
        pytest.param(sends(CONTENT, Content_Encoding="gzip"), "sends the file as gzip", 1, id="compressed"),
    ],
)
def test_faults_that_stay_end_in_one_error_and_no_file(
    usual: Answer, message: str, num_requests: int, server: Server, cache: Path
) -> None:
    server.usual = usual
    with pytest.raises(WeightsError, match=message) as caught:
        fetch_weights(NAME, sleep=lambda pause_s: None)
    for part in (NAME, MD5, entry_of(NAME).page, "ZOO_WEIGHTS_URL", str(cache / f"{NAME}.pth.tar")):
        assert part in str(caught.value)
    assert len(server.requests) == num_requests
    assert not (cache / f"{NAME}.pth.tar").exists()


def test_a_server_that_is_not_there_is_tried_five_times(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_WEIGHTS_URL", "http://user:secret@127.0.0.1:1/weights/")
    pauses: list[float] = []
    with pytest.raises(WeightsError, match=r"Connection refused.*127.0.0.1:1/weights/resnet34") as caught:
        fetch_weights(NAME, sleep=pauses.append)
    assert pauses == [1, 2, 4, 8]
    assert "secret" not in str(caught.value)


def test_a_pause_until_a_date_is_kept(server: Server) -> None:
    date = format_datetime(datetime.now(timezone.utc) + timedelta(seconds=90), usegmt=True)
    server.script, pauses = [fails(503, Retry_After=date)], []
    fetch_weights(NAME, sleep=pauses.append)
    assert 80 < pauses[0] <= 90


@pytest.mark.parametrize("days", [-365, 365])
def test_a_date_by_another_clock_is_not_waited_for(days: int, server: Server) -> None:
    """One of the two clocks has jumped, so that the date is long past, or a year away."""
    date = format_datetime(datetime.now(timezone.utc) + timedelta(days=days), usegmt=True)
    server.script, pauses = [fails(429, Retry_After=date)], []
    if days < 0:
        assert fetch_weights(NAME, sleep=pauses.append).read_bytes() == CONTENT
        assert pauses == [0.0]
    else:
        with pytest.raises(WeightsError, match="asks for a pause of"):
            fetch_weights(NAME, sleep=pauses.append)
        assert pauses == []


def test_a_download_that_broke_off_is_resumed_by_the_next_one(server: Server, cache: Path) -> None:
    server.script = [truncates(100_000), *[fails(500)] * 4]
    with pytest.raises(WeightsError, match="500"):
        fetch_weights(NAME, sleep=lambda pause_s: None)
    assert (cache / f"{NAME}.pth.tar.part").read_bytes() == CONTENT[:100_000]
    assert fetch_weights(NAME).read_bytes() == CONTENT
    assert server.requests[-1] == (f"/{NAME}.pth.tar", rest_of(100_000))


def test_a_part_that_is_whole_already_is_only_verified(server: Server, cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / f"{NAME}.pth.tar.part").write_bytes(CONTENT)
    assert fetch_weights(NAME).read_bytes() == CONTENT
    assert [ranges for _, ranges in server.requests] == [rest_of(LENGTH)]


@pytest.mark.parametrize("old", [WRONG[:100_000], WRONG, WRONG + b"more"], ids=["shorter", "as long", "longer"])
def test_the_beginning_of_another_file_costs_one_new_start(old: bytes, server: Server, cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / f"{NAME}.pth.tar.part").write_bytes(old)
    assert fetch_weights(NAME).read_bytes() == CONTENT
    assert [ranges for _, ranges in server.requests] == [rest_of(len(old)), None]


def test_a_file_that_changes_midway_costs_one_new_start_and_no_more(server: Server, cache: Path) -> None:
    server.content = WRONG
    server.script = [truncates(100_000), whole, truncates(100_000)]
    with pytest.raises(WeightsError, match="the md5 is"):
        fetch_weights(NAME, sleep=lambda pause_s: None)
    assert [ranges for _, ranges in server.requests] == [None, rest_of(100_000), None, rest_of(100_000)]
    assert not (cache / f"{NAME}.pth.tar.part").exists()


def test_a_web_page_does_not_cost_what_was_received_before(server: Server, cache: Path) -> None:
    server.script = [truncates(100_000), sends(PAGE, "text/html")]
    with pytest.raises(WeightsError, match="a web page"):
        fetch_weights(NAME, sleep=lambda pause_s: None)
    assert (cache / f"{NAME}.pth.tar.part").stat().st_size == 100_000


def test_a_full_disk_is_one_error_and_the_download_continues_when_there_is_room(server: Server, cache: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # the nearest to a full disk without being root
    try:
        with pytest.raises(WeightsError, match=r"cannot be written .*with room, or set ZOO_CACHE.*continues") as caught:
            fetch_weights(NAME)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno in (errno.EFBIG, errno.ENOSPC)
    assert [file.name for file in cache.glob("*.tar*") if file.suffix != ".lock"] == [f"{NAME}.pth.tar.part"]
    assert fetch_weights(NAME).read_bytes() == CONTENT
    assert server.requests[-1][1] == rest_of(100_000)


def test_progress_that_was_made_before_does_not_count_again(server: Server) -> None:
    def more_and_less(handler: Handler) -> None:
        del handler.headers["Range"]
        truncates(100_000 if len(server.requests) % 2 else 50_000)(handler)

    server.script = [more_and_less] * 9
    with pytest.raises(WeightsError, match="5 times in a row"):
        fetch_weights(NAME, sleep=lambda pause_s: None)
    assert len(server.requests) == 5
