"""Seeds that are a function of a few whole numbers, whichever process draws random numbers from them, and when."""

from __future__ import annotations

import hashlib


def mixed_seed(*words: int) -> int:
    """Return a 64-bit seed for ``words``, such as (seed, epoch, index); neighbours get unrelated seeds."""
    text = " ".join(str(word) for word in words)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
