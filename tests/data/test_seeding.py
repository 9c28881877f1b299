"""Seeds are a function of the given numbers."""

from __future__ import annotations

import pytest
import torch

from zoo.data.seeding import mixed_seed


def test_neighbouring_words_give_different_draws() -> None:
    words = [(seed, epoch, index) for seed in range(4) for epoch in range(4) for index in range(40)]
    assert len({mixed_seed(*word) for word in words}) == len(words)
    draws = [torch.rand((), generator=torch.Generator().manual_seed(mixed_seed(*word))).item() for word in words]
    assert len(set(draws)) == len(words)
    assert sum(draws) / len(draws) == pytest.approx(0.5, abs=0.05)


def test_words_are_kept_apart() -> None:
    assert len({mixed_seed(1, 11), mixed_seed(11, 1), mixed_seed(111), mixed_seed(1, 1, 1)}) == 4
