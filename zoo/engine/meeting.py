"""A store for the processes of one attempt at a run, which holds nothing that an earlier attempt has left.

A launcher that starts its processes again keeps the store, with the addresses of those that are lost and their last
words. Counting attempts does not tell them apart: the launchers of several machines count differently, as one sees its
process fail and another one that a machine asks to join. Rank 0 therefore draws a word, which becomes the prefix of
all keys, and each other process learns it as the answer to a word of its own.
"""

from __future__ import annotations

import time
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

POLL_S = 0.02


def meet(store: dist.Store, rank: int, world_size: int, timeout: timedelta = default_pg_timeout) -> dist.Store:
    """Return a part of ``store`` that only the processes of this attempt know; all of them have to call this.

    It returns on rank 0 when all processes have come, and on the others when rank 0 has. Raises torch's
    `DistStoreError` if that takes longer than ``timeout``.
    """
    hall = dist.PrefixStore("zoo/meeting", store)
    own = uuid4().hex
    if rank > 0:
        hall.set(f"asks/{rank}", own)
        hall.wait([f"answers/{own}"], timeout)
        word = hall.get(f"answers/{own}").decode()
        room = dist.PrefixStore(word, hall)
        room.set(f"came/{rank}", "")
        return room
    room = dist.PrefixStore(own, hall)
    others = range(1, world_size)
    end_s = time.monotonic() + timeout.total_seconds()
    hall.wait([f"asks/{other}" for other in others], timeout)
    while not room.check([f"came/{other}" for other in others]):
        for asked in hall.multi_get([f"asks/{other}" for other in others]):
            hall.set(f"answers/{asked.decode()}", own)
        if time.monotonic() > end_s:
            raise dist.DistStoreError("not all processes of the run have come")
        time.sleep(POLL_S)
    return room
