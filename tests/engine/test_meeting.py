"""The processes of an attempt find each other in a store that holds the words of an earlier one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from zoo.engine.meeting import meet


def _meet(store: dist.Store, world_size: int) -> list[dist.Store]:
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda rank: meet(store.clone(), rank, world_size), range(world_size)))


@pytest.mark.parametrize("second_size", [2, 3, 5])
def test_nothing_of_an_earlier_attempt_is_seen_by_the_next(second_size: int) -> None:
    store = dist.HashStore()
    first = _meet(store, 3)
    first[2].set("address", "lost")
    second = _meet(store, second_size)
    assert not any(room.check(["address"]) for room in second)
    second[0].set("address", "new")
    assert {room.get("address") for room in second} == {b"new"}
    assert first[0].get("address") == b"lost"


def test_whoever_comes_first_waits_for_the_process_that_comes_and_not_for_its_old_words() -> None:
    store = dist.HashStore()
    _meet(store, 3)
    with ThreadPoolExecutor(3) as pool:
        early = [pool.submit(meet, store, rank, 3) for rank in (0, 1)]
        room = early[1].result(5)  # rank 0 answers each that has come
        assert not early[0].done()
        pool.submit(meet, store, 2, 3).result(5)
        early[0].result(5).set("address", "new")
    assert room.get("address") == b"new"


def test_a_process_that_never_comes_ends_the_waiting_of_the_others() -> None:
    store, timeout = dist.HashStore(), timedelta(seconds=0.3)
    with pytest.raises(dist.DistStoreError):
        meet(store, 0, 3, timeout)
    _meet(store, 3)
    with pytest.raises(dist.DistStoreError, match="not all processes of the run have come"):
        meet(store, 0, 3, timeout)
    with pytest.raises(dist.DistStoreError):
        meet(store, 1, 3, timeout)
