"""The process of a run is determined by the environment of launchers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.spawn import run_distributed
from tests.refusals import refused
from zoo.engine._process import open_process, shorten_worker_errors
from zoo.errors import ConfigError, ZooError

TWO_RANKS = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TWO_RANKS:
        monkeypatch.delenv(name, raising=False)


def _set(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def _open(backend: str | None = None) -> None:
    with open_process(backend):
        pass


def test_without_launcher_process_is_alone_and_has_no_group() -> None:
    with open_process() as process:
        assert (process.rank, process.world_size) == (0, 1)
        assert process.is_main
        assert not dist.is_initialized()


def test_local_rank_without_its_own_device_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, TWO_RANKS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    refused(ConfigError, _open, "local rank 1", "1 CUDA")


def _open_with_launchers_environment(backend: str | None = None) -> dict[str, Any]:
    with open_process(backend) as process:
        found = {"rank": process.rank, "backend": dist.get_backend()}
        found["gathered"] = process.gather(f"from {process.rank}")
        found["broadcast"] = process.broadcast(f"by {process.rank}")
        found["any"] = process.any_rank(process.rank == 1), process.any_rank(False)
    found["left"] = not dist.is_initialized()
    return found


@pytest.mark.dist
def test_two_processes_find_each_other_and_leave() -> None:
    found = run_distributed(_open_with_launchers_environment, 2, group=False)
    shared = {"backend": "gloo", "broadcast": "by 0", "any": (True, False), "left": True}
    assert found[0] == {"rank": 0, "gathered": ["from 0", "from 1"], **shared}
    assert found[1] == {"rank": 1, "gathered": [], **shared}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("asked", [None, "nccl", "gloo"])
def test_group_has_requested_backend(monkeypatch: pytest.MonkeyPatch, asked: str | None, device: str) -> None:
    opened = []

    def join(backend: str, **options: object) -> None:
        opened.append(backend)
        raise ConfigError("no group in this test")

    _set(monkeypatch, TWO_RANKS)
    monkeypatch.setattr("zoo.engine._process._open_device", lambda local_rank: torch.device(device))
    monkeypatch.setattr("zoo.engine._process.open_store", lambda rank, world_size: dist.HashStore())
    monkeypatch.setattr(dist, "init_process_group", join)
    is_possible = (asked, device) != ("nccl", "cpu")
    refused(ConfigError, lambda: _open(asked), "no group in this test" if is_possible else "--dist-backend nccl")
    assert opened == ([asked or {"cpu": "gloo", "cuda": "nccl"}[device]] if is_possible else [])


PORTS = ("0", "65536", "-1", "ssh", "1e3", "9" * 5000)
ENVIRONMENTS: list[tuple[str, str | None, list[str]]] = [
    *[(name, None, ["RANK and WORLD_SIZE"]) for name in ("RANK", "WORLD_SIZE")],
    *[(name, "two", [f"environment: {name}='two'"]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")],
    ("RANK", "3", ["environment: RANK=3", "WORLD_SIZE=2"]),
    *[
        (name, value, ["environment: ", f"not {name};", "torchrun"])
        for name in ("MASTER_ADDR", "MASTER_PORT")
        for value in (None, "")
    ],
    *[("MASTER_PORT", port, [f"environment: MASTER_PORT='{port[:100]}", "1 to 65535"]) for port in PORTS],
]


@pytest.mark.parametrize(("name", "value", "words"), ENVIRONMENTS, ids=lambda value: str(value)[:20])
def test_invalid_environment_raises(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str | None, words: list[str]
) -> None:
    _set(monkeypatch, {key: each for key, each in {**TWO_RANKS, name: value}.items() if each is not None})
    refused(ConfigError, _open, *words)


EXITED, KILLED = "DataLoader worker (pid(s) 7) exited unexpectedly", "DataLoader worker (pid 7) is killed by signal: "


@pytest.mark.parametrize(
    ("reason", "method", "words"),
    [
        (EXITED, "spawn", ["spawn", "__main__"]),
        (EXITED, "fork", ["fewer workers", "--resume auto"]),
        (f"{KILLED}Killed. ", "spawn", ["fewer workers"]),
        (f"{KILLED}Bus error. It is possible", "fork", ["/none", "No such file", "--resume auto"]),
    ],
)
def test_dead_worker_raises_with_remedy(
    monkeypatch: pytest.MonkeyPatch, reason: str, method: str, words: list[str]
) -> None:
    monkeypatch.setattr("multiprocessing.get_start_method", lambda: method)
    monkeypatch.setattr("zoo.data.loader.SHARED_MEMORY", "/none")

    def fail() -> None:
        with shorten_worker_errors():
            raise RuntimeError(reason)

    assert ("/none" in refused(ZooError, fail, *words)) == ("/none" in words)
