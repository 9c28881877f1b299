"""Seeds are a function of the given numbers."""

from __future__ import annotations

import pytest
import torch

from zoo.data.seeding import mixed_seed, random_of, random_of_torch


def test_neighboring_words_give_different_draws() -> None:
    words = [(seed, epoch, index) for seed in range(4) for epoch in range(4) for index in range(40)]
    assert len({mixed_seed(*word) for word in words}) == len(words)
    draws = [random_of(*word).random() for word in words]
    assert len(set(draws)) == len(words)
    assert sum(draws) / len(draws) == pytest.approx(0.5, abs=0.05)


def test_torch_seed_decides_unseeded_random_numbers() -> None:
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append((random_of_torch().random(), random_of_torch().random()))
    assert draws[0] == draws[1]
    assert len({*draws[0], *draws[2]}) == 4
