"""Random numbers that are a function of a few whole numbers, whichever process draws them and when."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def mixed_seed(*words: int) -> int:
    """Return a 64-bit seed for ``words``, such as (seed, epoch, index); neighbours get unrelated seeds."""
    text = " ".join(str(word) for word in words)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@contextmanager
def seeded(*words: int) -> Iterator[None]:
    """Run the block with the global CPU generators of torch and ``random`` seeded by ``words``.

    The former states are restored, so that a loader without workers does not change the caller's generators.
    """
    seed = mixed_seed(*words)
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    try:
        # torch.manual_seed is not used, as it also queues a call, with a stack trace, for each device not yet in use.
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
