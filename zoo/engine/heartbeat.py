"""Signs of life between the processes of a run: one that is lost is named, and the others do not wait for it for ever.

When a process ends, its connections are closed and a collective operation of the others fails at once. When a machine
loses its power or its network, or stands still, nobody closes anything, and torch waits for ten minutes (NCCL) or half
an hour (Gloo). Each process therefore writes a new word into the store of the run every `BEAT_S`, from a thread. Rank 0
reads the words of all, the others read that of rank 0, so that the traffic grows only linearly with the number of
processes. Whoever is silent for `LIMIT_S` is lost. Only silence counts, measured by the clock of the listener: a
process that is slow, or waits in a collective operation, still beats.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zoo.errors import EXIT_LOST_PROCESS, brief, listed, printable

logger = logging.getLogger(__name__)

BEAT_S = 2.0
LIMIT_S = 60.0
# After a connection was closed, who closed it is found out by who says nothing new for three beats.
SEARCH_BEATS = 3
ADVICE = "start the run again; training goes on from its last checkpoint with --resume auto"
VERDICT = "lost"  # the key under which rank 0 says who is lost
ALIVE, ENDED, LEFT = "alive", "ended", "left"


class Silences:
    """Who has said nothing new for ``limit_s``, by the clock of the listener.

    Time in which the listener did not listen is not counted: if it stood still itself, it knows nothing of the others.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._words: dict[Hashable, object] = {}
        self._since_s: dict[Hashable, float] = {}
        self._looked_s = clock()

    def hear(self, who: Hashable, word: object) -> None:
        """Note what ``who`` says; only another word than before is a sign of life."""
        if who not in self._words or self._words[who] != word:
            self._words[who], self._since_s[who] = word, self._clock()

    def silent(self) -> list[Any]:
        """Return those who have been silent for too long; to be called several times within ``limit_s``."""
        now_s = self._clock()
        if now_s - self._looked_s > self._limit_s / 2:
            self._since_s = dict.fromkeys(self._since_s, now_s)
        self._looked_s = now_s
        return [who for who, since_s in self._since_s.items() if now_s - since_s >= self._limit_s]


class Heartbeat:
    """Tells the other processes of a run that this one lives, and ends this one when another is lost.

    While the main thread hangs in a collective operation no exception can reach it. The process is therefore ended from
    a thread, with one line in the log and the exit code `EXIT_LOST_PROCESS`.

    Args:
    - `store`: a store of the processes of this attempt alone (`zoo.engine.meeting`), usually on rank 0's machine.
    - `rank`: number of this process.
    - `world_size`: number of processes.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        shared: Any = store  # clone() is not in the type stubs of torch 2.11 and 2.13
        # The connections of the store are not shared, as each is blocked while it waits for an answer.
        self._store, self._asked = (dist.PrefixStore("zoo/heartbeat", shared.clone()) for _ in range(2))
        for own in (self._store, self._asked):
            own.set_timeout(timedelta(seconds=LIMIT_S))
        self._rank, self._world_size = rank, world_size
        self._host = platform.node()
        self._state, self._reason = ALIVE, ""
        self._beats = 0
        self._main_host = self._host
        self._is_explained = False
        self._closed = threading.Event()
        self._store.set(str(rank), self._word())
        if rank == 0:
            self._store.set(VERDICT, "")
        threads = {"zoo-heartbeat": self._beat, "zoo-store-watch": self._watch_store}
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for name, run in threads.items()]

    def start(self) -> None:
        """Begin to beat; others may have to wait for the first word of a process for as long as `LIMIT_S`."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop beating; the other processes have to know it by then, or stop too."""
        self._closed.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(BEAT_S)  # one that waits for a lost store is left behind

    def say_end(self, reason: str) -> None:
        """Tell the other processes that this one ends, and why."""
        self._say(ENDED, printable(reason))

    def find_lost(self) -> str:
        """Return who is lost, in words for the user, after a connection was closed; empty if that cannot be seen.

        It takes three beats if that process did not tell its end. This process itself is then known to leave as well.
        """
        self._is_explained = True  # what the thread sees from now on would be said twice
        silences = Silences(SEARCH_BEATS * BEAT_S)
        end_s = time.monotonic() + 2 * SEARCH_BEATS * BEAT_S
        found = ""
        while not found and time.monotonic() < end_s:
            try:
                words = self._words(self._asked, range(self._world_size))
                found = self._asked.get(VERDICT).decode() or _ended(words)
                if not found and (lost := self._silent(silences, words)):
                    found = f"no sign of life from {lost}, killed or out of reach"
            except RuntimeError:
                found = self._no_store()
            time.sleep(0.0 if found else BEAT_S / 4)
        self._say(LEFT)
        self._publish(found)
        return found

    def _beat(self) -> None:
        silences = Silences(LIMIT_S)
        try:
            while not self._closed.is_set():
                self._beats += 1
                self._store.set(str(self._rank), self._word())
                words = self._words(self._store, range(self._world_size) if self._rank == 0 else (0,))
                self._main_host = _host(words[0])
                found = self._store.get(VERDICT).decode()
                if not found and (lost := self._silent(silences, words)):
                    found = f"no sign of life from {lost} for {LIMIT_S:.0f} s"
                if found and not self._is_explained:
                    self._publish(found)
                    return self._end(found)
                self._closed.wait(BEAT_S)
        except RuntimeError:
            # The store is gone. If the other processes are too, the main thread will notice; else `_watch_store` does.
            pass

    def _watch_store(self) -> None:
        """End the process if the thread above has stopped beating, which then waits for the store."""
        silences = Silences(LIMIT_S)
        while not self._closed.wait(BEAT_S):
            silences.hear("store", self._beats)
            if silences.silent():
                return self._end(self._no_store())

    def _end(self, found: str) -> None:
        if not self._closed.is_set() and not self._is_explained:
            logger.error("%s", lost_message(found))
            os._exit(EXIT_LOST_PROCESS)

    def _publish(self, found: str) -> None:
        """Let rank 0 tell the others what it found, and wait until they have read it: its end may end the store."""
        if self._rank == 0 and found:
            try:
                self._asked.set(VERDICT, found)
            except RuntimeError:
                return
            time.sleep(2 * BEAT_S)

    def _say(self, state: str, reason: str = "") -> None:
        self._state, self._reason = state, reason  # what the thread says from now on, too
        with suppress(RuntimeError):  # without the store nobody can be told any more
            self._asked.set(str(self._rank), self._word())

    def _word(self) -> str:
        return "\n".join((self._state, self._host, self._reason or str(self._beats)))

    @staticmethod
    def _words(store: dist.Store, ranks: Any) -> dict[int, str]:
        ranks = list(ranks)
        return {rank: word.decode() for rank, word in zip(ranks, store.multi_get(list(map(str, ranks))), strict=True)}

    def _silent(self, silences: Silences, words: Mapping[int, str]) -> str:
        for rank, word in words.items():
            if rank != self._rank and word.startswith(ALIVE):
                silences.hear(rank, word)
        hosts: dict[str, list[int]] = {}
        for rank in silences.silent():
            if words[rank].startswith(ALIVE):
                hosts.setdefault(_host(words[rank]), []).append(rank)
        return " and ".join(
            f"rank{'s' * (len(ranks) > 1)} {listed(ranks)} on {brief(host)}" for host, ranks in hosts.items()
        )

    def _no_store(self) -> str:
        return f"rank 0 on {brief(self._main_host)} or its launcher cannot be reached"


def lost_message(found: str) -> str:
    """Return the line for the user about what a `Heartbeat` found."""
    return f"{found}; the other processes cannot go on alone: {ADVICE}"


def _host(word: str) -> str:
    return word.split("\n")[1]


def _ended(words: Mapping[int, str]) -> str:
    """Return which process said that it ends, and why: the first one, if there are several; empty if none did."""
    for rank, word in words.items():
        state, host, reason = word.split("\n", 2)
        if state == ENDED:
            return f"rank {rank} on {brief(host)} has ended ({brief(reason)})"
    return ""
