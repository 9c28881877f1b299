"""Rendezvous: the processes of a run find each other at the address in the launcher's environment."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from zoo.errors import ConfigError, escape, join_names, truncate
from zoo.torch_internals.data import launcher_serves_store

logger = logging.getLogger(__name__)

LIMIT_S = 300.0
RESOLVE_S = 30.0  # names of containers may only resolve some seconds after the containers start
CONNECT_S = 5.0
FIRST_LINE_S = 5.0  # time until the first log line; doubles for each further line
LONGEST_PAUSE_S = 0.5
MAX_PORT = 2**16 - 1

_openings = itertools.count()  # calls of `open_store` in this process; all ranks have the same number


def open_store(rank: int, world_size: int) -> dist.Store:
    """Wait for all processes of the run, and return the store that they share.

    While waiting, logs the missing ranks at growing intervals. Raises ConfigError if MASTER_ADDR or MASTER_PORT is
    missing or wrong, if the address does not resolve within `RESOLVE_S`, if the port is in use, and after `LIMIT_S`,
    naming the missing ranks.
    """
    host, port = _address()
    where = f"rendezvous at {escape(host)}:{port}"
    is_server = rank == 0 and not launcher_serves_store()
    try:
        if not is_server:
            _await_server(host, port, where)
        if launcher_serves_store():  # its store outlives this attempt; torch distinguishes attempts
            server, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=RESOLVE_S))))
        else:
            timeout = timedelta(seconds=LIMIT_S if is_server else RESOLVE_S)
            server = dist.TCPStore(
                host, port, is_master=is_server, timeout=timeout, wait_for_workers=False, multi_tenant=is_server
            )
        store = dist.PrefixStore(f"zoo/{next(_openings)}", server)
        _await_others(store, rank, world_size, where)
    except dist.DistError as error:
        reason = truncate(str(error).strip().split("\n")[0])
        if is_server:
            what, remedy = f"rank 0 cannot serve it ({reason})", "MASTER_PORT: give a free port of this machine"
        else:
            what = f"rank 0 has ended, or another program uses the port ({reason})"
            remedy = "see the output of rank 0; MASTER_ADDR, MASTER_PORT: give rank 0's machine and a free port of it"
        raise ConfigError(what, where, remedy) from error
    return store


def _address() -> tuple[str, int]:
    """Return the host and the port of rank 0. Raises ConfigError if the environment has none."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        what = f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}"
        raise ConfigError(what, "environment", "start with torchrun, or give the address and a free port of rank 0")
    text = os.environ["MASTER_PORT"]
    port = int(text) if text.isdecimal() and len(text) <= len(str(MAX_PORT)) else 0
    if not 0 < port <= MAX_PORT:
        what = f"MASTER_PORT={truncate(repr(text))} is not a port"
        raise ConfigError(what, "environment", f"give a number from 1 to {MAX_PORT}")
    return os.environ["MASTER_ADDR"], port


def _await_server(host: str, port: int, where: str) -> None:
    """Wait until rank 0 accepts connections. torch would print a C++ stack trace for each attempt."""
    reason = ""
    for elapsed_s, is_due in _waiting():
        try:
            socket.create_connection((host, port), CONNECT_S).close()
            return
        except socket.gaierror as error:
            reason = error.strerror or str(error)
            if elapsed_s > RESOLVE_S:
                what = f"MASTER_ADDR={truncate(repr(host))} does not resolve ({reason})"
                raise ConfigError(what, "environment", "give the name or address of rank 0's machine") from error
        except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
            reason = str(error)
        if is_due:
            logger.warning("%s: waiting for rank 0 (%s)", where, reason)
    raise ConfigError(
        f"rank 0 did not come within {LIMIT_S:.0f} s ({reason})",
        where,
        "start rank 0 on this machine; MASTER_ADDR, MASTER_PORT: give its address",
    )


def _await_others(store: dist.Store, rank: int, world_size: int, where: str) -> None:
    """Wait until all ranks have called this function."""
    store.set(f"rank{rank}", "")
    store.add("joined", 1)
    for _, is_due in _waiting():
        if store.add("joined", 0) >= world_size:
            return
        if is_due and rank == 0:
            missing = _missing(store, world_size)
            logger.info("%s: waiting for %d of %d processes, %s", where, len(missing), world_size, _ranks(missing))
    missing = _missing(store, world_size)
    raise ConfigError(
        f"{len(missing)} of {world_size} processes did not come within {LIMIT_S:.0f} s, {_ranks(missing)}",
        where,
        "see the output of these processes; WORLD_SIZE: give the number of processes that are started",
    )


def _waiting() -> Iterator[tuple[float, bool]]:
    """Yield the seconds since the start and whether to log a line, until `LIMIT_S` have passed."""
    start_s, next_line_s, pause_s = time.monotonic(), FIRST_LINE_S, 0.01
    while (elapsed_s := time.monotonic() - start_s) < LIMIT_S:
        is_due = elapsed_s >= next_line_s
        if is_due:
            next_line_s *= 2
        yield elapsed_s, is_due
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _missing(store: dist.Store, world_size: int) -> list[int]:
    return [rank for rank in range(world_size) if not store.check([f"rank{rank}"])]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {join_names(ranks)}"
