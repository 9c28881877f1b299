"""The shares of a step's time belong to the operations that take it, wherever these run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.benchmark.time_shares import KINDS, REST, kind_of, measure_shares
from zoo.layers import InPlaceABN, ReversibleBlock, ReversibleSequential

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::conv2d", "convolution"),
        ("aten::mkldnn_convolution", "convolution"),
        ("aten::_slow_conv2d_backward", "convolution"),
        ("ConvolutionBackward0", "convolution"),
        ("autograd::engine::evaluate_function: ConvolutionBackward0", None),
        ("_NormActConv", None),
        ("_NormActConvBackward", None),
        ("aten::native_batch_norm_backward", "norm and activation"),
        ("zoo::abn_track_statistics", "norm and activation"),
        ("ActivatedBatchNormBackward", "norm and activation"),
        ("TrainingBatchNormBackward", "norm and activation"),
        ("ReluBackward0", "norm and activation"),
        ("_MaxPoolBackward", "pooling"),
        ("aten::cat", "concatenation"),
        ("aten::add_", "sums"),
        ("aten::addmm", None),
        ("zoo: step", None),
    ],
)
def test_operations_and_nodes_have_a_kind_and_what_only_calls_them_has_none(name: str, kind: str | None) -> None:
    assert kind_of(name) == kind


def join(x: Tensor) -> Tensor:
    others = [x.detach()] * 7  # of no gradient: gradients of several uses are added up, which takes longer than joining
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
        (REST, lambda x: F.linear(x, x[0, 0])),
    ],
)
def test_most_of_the_time_belongs_to_what_takes_it(kind: str, function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, 32, 128, 128)
    weight = torch.ones(1, requires_grad=True)

    def forward() -> Tensor:
        return function(x * weight).view(-1)[0]

    forward().backward()
    shares = measure_shares(forward, [weight], CPU)
    assert [*shares] == [*KINDS, REST]
    assert sum(shares.values()) == pytest.approx(1)
    others = {other: share for other, share in shares.items() if other not in (kind, REST)}
    assert shares[kind] > max(others.values())
    assert weight.grad is None
