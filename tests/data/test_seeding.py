"""Random draws are a function of the given numbers, and the global generators do not notice."""

from __future__ import annotations

import random

import pytest
import torch

from zoo.data.seeding import mixed_seed, seeded


def _draw(*words: int) -> tuple[float, float]:
    with seeded(*words):
        return torch.rand(()).item(), random.random()


def _draw_and_fail() -> None:
    with seeded(0):
        torch.rand(3)
        random.random()
        raise ZeroDivisionError


def test_the_same_words_give_the_same_draws_whatever_was_drawn_before() -> None:
    first = _draw(1, 2, 3)
    torch.rand(7)
    random.random()
    assert _draw(1, 2, 3) == first


def test_neighbouring_words_give_different_draws() -> None:
    words = [(seed, epoch, index) for seed in range(4) for epoch in range(4) for index in range(40)]
    assert len({mixed_seed(*word) for word in words}) == len(words)
    draws = [_draw(*word) for word in words]
    assert len({draw[0] for draw in draws}) == len({draw[1] for draw in draws}) == len(words)
    assert sum(draw[0] for draw in draws) / len(draws) == pytest.approx(0.5, abs=0.05)


def test_words_are_kept_apart() -> None:
    assert len({mixed_seed(1, 11), mixed_seed(11, 1), mixed_seed(111), mixed_seed(1, 1, 1)}) == 4


def test_the_global_generators_are_put_back_even_after_an_error() -> None:
    torch.manual_seed(5)
    random.seed(5)
    expected = (torch.rand(()).item(), random.random())
    torch.manual_seed(5)
    random.seed(5)
    with pytest.raises(ZeroDivisionError):
        _draw_and_fail()
    assert (torch.rand(()).item(), random.random()) == expected
