"""Lean networks in several processes have gradients and statistics bit-identical to plain networks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.dist.spawn import run_distributed
from tests.remat.programs import Recorded, network
from zoo.layers import InPlaceABNSync
from zoo.remat._lean import lean
from zoo.remat._recipes import RecipeError

pytestmark = pytest.mark.dist

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static_graph": {"static_graph": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
}


class WithUnused(nn.Module):
    """A network with an unused part."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.unused = network(), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)


class SyncNetwork(nn.Module):
    """A synchronized norm between recomputed operations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.norm = InPlaceABNSync(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convs[1](self.norm(self.convs[0](x)).sigmoid() * x).square().mean((2, 3))


def _step(model: nn.Module, options: dict[str, Any]) -> list[torch.Tensor]:
    """Return all gradients and buffers of three steps, the first two of them accumulated without communication."""
    trained = DistributedDataParallel(model, **options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for micro_step in range(3 if "static_graph" not in options else 1):
            images = torch.randn(2, 3, 12, 12, generator=generator)
            if micro_step < 2 and "static_graph" not in options:
                with trained.no_sync():
                    trained(images).square().mean().backward()
            else:
                trained(images).square().mean().backward()
        optimizer.step()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return [*gradients, *(each.detach() for each in model.parameters()), *model.buffers()]


def _compare_all() -> list[tuple[bool, int]]:
    return [_compare(option) for option in OPTIONS]


def _compare(option: str) -> tuple[bool, int]:
    model = WithUnused() if option == "find_unused_parameters" else network()
    expected = _step(copy.deepcopy(model), OPTIONS[option])
    found = _step(Recorded(copy.deepcopy(model)), OPTIONS[option])
    return all(map(torch.equal, expected, found)), len(found) - len(expected)


def test_lean_replicas_are_bit_identical_to_plain_replicas() -> None:
    assert run_distributed(_compare_all, 2) == [[(True, 0)] * len(OPTIONS)] * 2


def _compare_sync_norms() -> bool:
    model = SyncNetwork()
    return all(map(torch.equal, _step(copy.deepcopy(model), {}), _step(Recorded(model), {})))


def test_shared_norm_is_bit_identical_to_plain_training() -> None:
    assert run_distributed(_compare_sync_norms, 2) == [True] * 2


def _shard(is_lean: bool) -> list[torch.Tensor] | str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            fully_shard(layer)
    fully_shard(model)
    images = torch.randn(2, 3, 40, 40, generator=torch.Generator().manual_seed(dist.get_rank()))
    try:
        (lean(model) if is_lean else model)(images).square().mean().backward()
    except RecipeError as error:
        return str(error)
    return [each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad for each in model.parameters()]


def _compare_shards() -> bool | str:
    expected, found = _shard(is_lean=False), _shard(is_lean=True)
    return found if isinstance(found, str) else all(map(torch.equal, expected, found))


def test_sharded_parameters_have_the_same_gradients() -> None:
    assert run_distributed(_compare_shards, 2) == [True] * 2
