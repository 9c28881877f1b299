"""FSDP2 trains networks with every norm like replicas, or raises an error."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zoo
from tests.dist.spawn import run_distributed
from zoo.layers import ABN
from zoo.layers.reversible import ReversibleBlock
from zoo.models.resnet import ResidualBlock

pytestmark = pytest.mark.dist

UNITS: dict[str, tuple[type[nn.Module], ...]] = {
    "network": (),
    "blocks": (ResidualBlock, ReversibleBlock),
    "norms": (ABN, nn.BatchNorm2d),
}
NUM_STEPS = 2


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 3, 32, 32, generator=generator, dtype=torch.float64), torch.arange(8) % 4


def _train(network: nn.Module, shares: list[slice]) -> dict[str, Tensor]:
    """Take steps down the mean loss of the shares of the batch; return all weights and buffers."""
    images, targets = _batch()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        for share in shares:
            loss = nn.functional.cross_entropy(network(images[share]), targets[share])
            (loss / len(shares)).backward()
        optimizer.step()
    tensors = network.state_dict().items()
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in tensors}


def _build(arch: str, norm: str) -> nn.Module:
    torch.manual_seed(0)
    return zoo.get(arch, norm=norm, activation="leaky_relu", num_classes=4).double()


def _sharded(arch: str, norm: str, units: str) -> dict[str, Tensor] | str:
    network = _build(arch, norm)
    for module in list(network.modules()):
        if isinstance(module, UNITS[units]):
            fully_shard(module)
    fully_shard(network)
    begin = 4 * dist.get_rank()
    try:
        return _train(network, [slice(begin, begin + 4)])
    except RuntimeError as error:
        return str(error)


def _sharded_in_ways(arch: str, norm: str, ways: list[str]) -> list[dict[str, Tensor] | str]:
    return [_sharded(arch, norm, units) for units in ways]


def _check(arch: str, norm: str, ways: list[str]) -> None:
    # Norms that are not synchronized see each half of the batch by itself, the others all of it.
    halves = [slice(0, 4), slice(4, 8)]
    expected = _train(_build(arch, norm), [slice(0, 8)] if norm == "sync" else halves)
    for found in chain(*run_distributed(_sharded_in_ways, 2, arch, norm, ways)):
        assert isinstance(found, dict), found
        for key, value in expected.items():
            if norm == "sync" or ("running" not in key and "num_batches" not in key):
                torch.testing.assert_close(found[key], value, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("norm", "ways"), [("standard", ["blocks"]), ("sync", list(UNITS))])
def test_sharded_networks_train_as_one_process_with_the_whole_batch(norm: str, ways: list[str]) -> None:
    _check("resnet18", norm, ways)


def test_reversible_network_is_sharded_as_whole() -> None:
    _check("revnet38_cifar", "sync", ["network"])


def test_block_of_reversible_chain_raises() -> None:
    for message in run_distributed(_sharded, 2, "revnet38_cifar", "inplace", "blocks"):
        assert isinstance(message, str)
        assert "chain of reversible" in message
        assert "apply fully_shard to the whole network" in message
