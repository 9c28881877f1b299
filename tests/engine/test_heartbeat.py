"""A process that is lost is found by its silence, and named with its machine and, if it told one, its reason."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

import pytest
import torch.distributed as dist

from zoo.engine import heartbeat
from zoo.engine.heartbeat import Heartbeat, Silences
from zoo.errors import EXIT_LOST_PROCESS


class _Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _listen(silences: Silences, clock: _Clock, seconds: int, *speakers: str) -> list[str]:
    """Let time go by a second at a time, in which the speakers say something new; return who is silent then."""
    for _ in range(seconds):
        clock.now_s += 1
        for who in speakers:
            silences.hear(who, clock.now_s)
        silent = silences.silent()
    return silent


def test_who_says_nothing_new_for_the_limit_is_silent() -> None:
    clock = _Clock()
    silences = Silences(10, clock)
    for who in ("a", "b"):
        silences.hear(who, "first")
    assert _listen(silences, clock, 9, "a") == []
    silences.hear("b", "first")  # the word of before is no sign of life
    assert _listen(silences, clock, 1, "a") == ["b"]
    assert _listen(silences, clock, 1, "a", "b") == []


def test_a_slow_speaker_is_not_silent() -> None:
    clock = _Clock()
    silences = Silences(10, clock)
    for _ in range(5):
        assert _listen(silences, clock, 8) == []
        silences.hear("slow", clock.now_s)


def test_a_listener_that_stood_still_itself_blames_nobody() -> None:
    clock = _Clock()
    silences = Silences(10, clock)
    silences.hear("a", "first")
    clock.now_s = 1000
    assert silences.silent() == []
    assert _listen(silences, clock, 9) == []
    assert _listen(silences, clock, 1) == ["a"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)
    monkeypatch.setattr(heartbeat, "LIMIT_S", 0.5)
    monkeypatch.setattr(heartbeat.platform, "node", lambda: "hostname")
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("zoo-"):
            thread.join(5)


def _beats(store: dist.Store, world_size: int) -> list[Heartbeat]:
    return [Heartbeat(store, rank, world_size) for rank in range(world_size)]


def test_after_a_closed_connection_the_rank_that_beats_no_more_is_named() -> None:
    beats = _beats(dist.HashStore(), 3)
    for rank in (0, 1):
        beats[rank].start()
    try:
        assert beats[1].find_lost() == "no sign of life from rank 2 on hostname, killed or out of reach"
    finally:
        for beat in beats:
            beat.close()


def test_a_rank_that_said_why_it_ends_is_named_at_once_with_its_reason() -> None:
    beats = _beats(dist.HashStore(), 3)
    beats[1].say_end("the image a.png cannot be read")
    for beat in (beats[0], beats[2]):
        assert beat.find_lost() == "rank 1 on hostname has ended (the image a.png cannot be read)"


def test_a_rank_that_leaves_because_of_another_is_not_blamed() -> None:
    store = dist.HashStore()
    beats = _beats(store, 3)
    beats[2].say_end("its own fault")
    assert beats[1].find_lost().startswith("rank 2")
    beats[0].start()
    try:
        time.sleep(0.7)  # longer than a process may be silent, and rank 1 says nothing any more
        assert beats[0].find_lost().startswith("rank 2")
    finally:
        beats[0].close()


def _catch_end(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


def _wait_for(codes: list[int], count: int) -> None:
    end_s = time.monotonic() + 10
    while len(codes) < count and time.monotonic() < end_s:
        time.sleep(0.01)


def test_when_a_rank_falls_silent_all_others_end_and_name_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    codes = _catch_end(monkeypatch)
    beats = _beats(dist.HashStore(), 4)
    for rank in (0, 2, 3):
        beats[rank].start()
    _wait_for(codes, 3)
    for beat in beats:
        beat.close()
    assert codes == [EXIT_LOST_PROCESS] * 3
    assert {record.getMessage().split(";")[0] for record in caplog.records} == {
        "no sign of life from rank 1 on hostname for 0 s"
    }
    assert all("--resume auto" in record.getMessage() for record in caplog.records)


def test_a_store_that_answers_no_more_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    codes = _catch_end(monkeypatch)
    (beat,) = _beats(dist.HashStore(), 1)

    def hang(*_: object) -> NoReturn:
        raise dist.DistStoreError("connection lost")

    monkeypatch.setattr(beat, "_words", hang)
    beat.start()
    _wait_for(codes, 1)
    beat.close()
    assert codes == [EXIT_LOST_PROCESS]
    assert "rank 0 on hostname or its launcher cannot be reached" in caplog.text
