"""Processes that wait log the missing ranks, and end with an error that names them."""

from __future__ import annotations

import os
import re
import signal
import socket
import socketserver
import threading
import time

import pytest

from tests.dist.spawn import LogLines, free_port, run_distributed
from tests.refusals import refused
from zoo.engine import _rendezvous as rendezvous
from zoo.engine._process import open_process
from zoo.engine._rendezvous import open_store
from zoo.errors import ConfigError


@pytest.fixture(autouse=True)
def _launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    for name, value in {**variables, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value_s in (("LIMIT_S", 1.5), ("FIRST_LINE_S", 0.2), ("RESOLVE_S", 0.3)):
        monkeypatch.setattr(rendezvous, name, value_s)


def _open(comes: str, limits_s: list[float]) -> tuple[list[str], object]:
    """Return the log of this rank, and the gathered ranks or the error.

    Rank 1 comes when the others have waited for it, or ``comes`` "never".
    """
    rank, lines = int(os.environ["RANK"]), LogLines()
    rendezvous.FIRST_LINE_S, rendezvous.LIMIT_S = 0.3, limits_s[rank]
    if rank == 1:
        time.sleep(1.5)
        if comes == "never":
            return [], None
    try:
        with open_process() as process:
            return lines.texts, process.gather(process.rank)
    except ConfigError as error:
        return lines.texts, str(error)


def _open_alone() -> None:
    with open_process():
        pass


@pytest.mark.dist
@pytest.mark.slow
def test_rank_0_names_missing_rank_until_it_comes() -> None:
    first, second, third = run_distributed(_open, 3, "late", [60.0] * 3, group=False)
    assert re.match(r"rendezvous at localhost:\d+: waiting for 1 of 3 processes, rank 1$", first[0][-1])
    assert first[1] == [0, 1, 2]
    assert second[1] == third[1] == []


@pytest.mark.dist
@pytest.mark.slow
def test_missing_rank_ends_all_others_with_its_number() -> None:
    (_, error), _, (_, other) = run_distributed(_open, 3, "never", [3.0, 60.0, 60.0], group=False)
    where = r"rendezvous at localhost:\d+"
    assert re.match(rf"{where}: 1 of 3 processes did not come within 3 s, rank 1; .*WORLD_SIZE", error)
    assert re.match(rf"{where}: rank 0 has ended.*see the output of rank 0", other)


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("answer", ["refused", "silent"])
def test_missing_rank_0_raises_with_address(
    answer: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    if answer == "silent":  # like a server behind a firewall
        monkeypatch.setattr(rendezvous, "CONNECT_S", 0.1)
        monkeypatch.setattr(socket, "create_connection", _time_out)
    where = f"rendezvous at localhost:{os.environ['MASTER_PORT']}"
    refused(ConfigError, _open_alone, where, "rank 0", "2 s", "MASTER_PORT")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3  # at 0.2, 0.4 and 0.8 s
    assert all(re.match(rf"{where}: waiting for rank 0 \(.+\)$", line) for line in lines)
    shown = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("rendezvous at")]
    assert shown == []  # nothing of torch


def _time_out(address: tuple[str, int], timeout_s: float) -> socket.socket:
    time.sleep(timeout_s)
    raise TimeoutError("timed out")


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("host", ["no-such-host.invalid", "two words", "a" * 70])
def test_unresolvable_address_raises(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", host)
    refused(ConfigError, _open_alone, host if host == "no-such-host.invalid" else "MASTER_ADDR")


def test_used_port_raises_on_rank_0() -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", int(os.environ["MASTER_PORT"])))
        taken.listen()
        refused(ConfigError, _open_alone, "rank 0", "EADDRINUSE", "MASTER_PORT")


class _Banner(socketserver.BaseRequestHandler):
    """Answers as a server of another protocol."""

    def handle(self) -> None:
        self.request.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")


@pytest.mark.usefixtures("_short")
def test_other_program_at_port_raises_on_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with socketserver.ThreadingTCPServer(("localhost", int(os.environ["MASTER_PORT"])), _Banner) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        refused(ConfigError, lambda: open_store(1, 2), "another program", "MASTER_ADDR, MASTER_PORT")
        server.shutdown()


@pytest.mark.parametrize("rank", [0, 1])
def test_waiting_process_ends_on_interrupt(rank: int) -> None:
    timer = threading.Timer(0.3, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        open_store(rank, 2)
    timer.join()


def _open_twice() -> list[list[int]]:
    gathered = []
    for _ in range(2):
        with open_process() as process:
            gathered.append(process.gather(process.rank))
    return gathered


@pytest.mark.dist
def test_process_opens_second_group_at_same_address() -> None:
    assert run_distributed(_open_twice, 2, group=False) == [[[0, 1], [0, 1]], [[], []]]
