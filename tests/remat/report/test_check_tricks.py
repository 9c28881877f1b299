"""Which faulty ways to save memory `zoo.check` finds."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.remat.report.faulty_tricks import TRICKS, Trick

#: None of the 27 faults is found.
NOT_FOUND = set(TRICKS)


def network_of(trick: Trick) -> nn.Module:
    torch.manual_seed(0)
    return trick.build()


def witnessed(trick: Trick, model: nn.Module) -> Sequence[Tensor]:
    torch.manual_seed(1)
    return trick.witness(model)


def are_same(values: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(values) == len(others) and all(map(torch.equal, values, others))


@pytest.mark.parametrize("name", TRICKS)
def test_trick_changes_ordinary_training(name: str) -> None:
    trick = TRICKS[name]
    model = network_of(trick)
    plain = witnessed(trick, copy.deepcopy(model))
    assert are_same(plain, witnessed(trick, copy.deepcopy(model)))
    assert not are_same(plain, witnessed(trick, trick.variant(copy.deepcopy(model))))


@pytest.mark.parametrize("name", TRICKS)
def test_fault_of_trick_is_found(name: str) -> None:
    trick = TRICKS[name]
    found = zoo.check(network_of(trick), *trick.inputs(), variant=trick.variant)
    assert found.same is (name in NOT_FOUND)
