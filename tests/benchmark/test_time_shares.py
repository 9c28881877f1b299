"""The time of a step is attributed to the operations that take it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.benchmark.model import OPERATION_KINDS, OTHER_KIND, measure_shares
from zoo.layers import InPlaceABN, ReversibleBlock, ReversibleSequential

CPU = torch.device("cpu")


def join(x: Tensor) -> Tensor:
    others = [x.detach()] * 7  # without gradients, whose sum would take longer than the concatenation
    return torch.cat([x, *others], 1)


def chain() -> nn.Module:
    return ReversibleSequential([ReversibleBlock(*(nn.Conv2d(16, 16, 5, padding=2) for _ in "fg"))])


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("convolution", nn.Conv2d(32, 32, 5)),
        ("convolution", chain()),
        ("norm and activation", nn.Sequential(InPlaceABN(32), nn.ELU())),
        ("pooling", nn.MaxPool2d(5, 1)),
        ("concatenation", join),
        ("sums", lambda x: x + x + x),
        (OTHER_KIND, lambda x: F.linear(x, x[0, 0])),
    ],
)
def test_most_of_the_time_belongs_to_the_operation_that_takes_it(
    kind: str, function: Callable[[Tensor], Tensor]
) -> None:
    x = torch.randn(4, 32, 128, 128)
    weight = torch.ones(1, requires_grad=True)

    def forward() -> Tensor:
        return function(x * weight).view(-1)[0]

    forward().backward()
    shares = measure_shares(forward, [weight], CPU)
    assert [*shares] == [*OPERATION_KINDS, OTHER_KIND]
    assert sum(shares.values()) == pytest.approx(1)
    others = {other: share for other, share in shares.items() if other not in (kind, OTHER_KIND)}
    assert shares[kind] > max(others.values())
    assert weight.grad is None
