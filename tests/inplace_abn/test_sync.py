"""Synchronized norms of the original's names on processes with batches of different sizes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zoo.inplace_abn as inplace_abn
from tests.dist.spawn import run_distributed

pytestmark = pytest.mark.dist
SIZES = (4, 2)


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    norm = getattr(inplace_abn, kind)
    layers = nn.Conv2d(3, 4, 3), norm(4, activation="none"), nn.Conv2d(4, 4, 1), norm(4, slope=0.01), nn.Conv2d(4, 2, 1)
    return nn.Sequential(*layers).double()


def batch() -> Tensor:
    return torch.randn(sum(SIZES), 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()


def gradients(model: nn.Module, x: Tensor, scale: float) -> dict[str, Tensor]:
    (model(x).square().sum() * scale).backward()
    return {name.removeprefix("module."): parameter.grad for name, parameter in model.named_parameters()}


def step_of_rank() -> dict[str, Tensor]:
    rank = dist.get_rank()
    model = network("InPlaceABNSync")
    inplace_abn.set_active_group(model, inplace_abn.active_group(True))
    share = batch().split(SIZES)[rank]
    return gradients(DistributedDataParallel(model), share, dist.get_world_size())


def test_uneven_batches_have_gradients_of_whole_batch() -> None:
    expected = gradients(network("InPlaceABN"), batch(), 1.0)
    for found in run_distributed(step_of_rank, len(SIZES)):
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-8, atol=1e-8)
