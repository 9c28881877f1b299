"""Random numbers that depend only on a few integers, not on the process or the time.

Augmentation uses Python's generator: for the dozen numbers of an image, torch's generator takes ten times as long.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import numpy as np
import torch
from torch import Tensor


def mixed_seed(*words: int) -> int:
    """Return a 64-bit seed for ``words``, such as (seed, epoch, index); neighbors get unrelated seeds."""
    text = " ".join(str(word) for word in words)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def random_of(*words: int) -> Random:
    """Return a generator of random numbers that is seeded with `mixed_seed`."""
    return Random(mixed_seed(*words))


def random_of_torch() -> Random:
    """Return a generator of random numbers whose seed is drawn from torch's global generator."""
    return Random(int(torch.randint(2**62, ())))


@contextmanager
def seed_global_generators(generator: Random) -> Iterator[None]:
    """Seeds the global generators of Python, NumPy and torch's CPU from ``generator``; restores them on exit."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(generator.getrandbits(64))
        np.random.seed(generator.getrandbits(32))
        torch.default_generator.manual_seed(generator.getrandbits(63))
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def windowed_permutation(groups: Tensor, num_groups: int, window: int, generator: torch.Generator) -> Tensor:
    """Return a random order of images, (n,) int64, that needs only ``window`` groups at a time.

    ``groups`` are the images' group numbers, below ``num_groups``, (n,) int64. Shuffles the groups, and then the images
    within each ``window`` consecutive groups.
    """
    windows = torch.randperm(num_groups, generator=generator)[groups] // window
    shuffled = torch.randperm(len(groups), generator=generator)
    return shuffled[windows[shuffled].argsort(stable=True)]
