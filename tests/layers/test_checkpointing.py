"""Checkpointed blocks equal plain blocks, count batches once, and recompute nothing without gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.dist.spawn import run_distributed
from tests.formula import relative_error
from tests.step import step
from zoo.layers import InPlaceABN, InPlaceABNSync, init_weights
from zoo.layers.checkpointing import CheckpointedSequential
from zoo.layers.residual import IdentityResidualBlock
from zoo.models.resnet import ResidualBlock


def blocks(kind="pre-activation", norm=InPlaceABN) -> nn.Sequential:
    torch.manual_seed(0)
    if kind == "pre-activation":
        stage = nn.Sequential(
            IdentityResidualBlock(8, (4, 4, 16), norm, stride=2, dropout=0.5),
            IdentityResidualBlock(16, (4, 4, 16), norm, dropout=0.5),
        )
    else:
        stage = nn.Sequential(ResidualBlock(8, (4, 4, 16), norm, stride=2), ResidualBlock(16, (4, 4, 16), norm))
    init_weights(stage)
    return stage


def checkpointed(stage) -> CheckpointedSequential:
    return CheckpointedSequential(*copy.deepcopy(stage))


@pytest.mark.parametrize("kind", ["pre-activation", "post-activation"])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointed_blocks_equal_plain_with_dropout_and_autocast(kind, autocast):
    stage = blocks(kind)
    twin = checkpointed(stage)
    x = torch.randn(4, 8, 8, 8)
    for ours, truth in zip(step(twin, x, autocast), step(stage, x, autocast), strict=True):
        assert torch.equal(ours, truth)  # batches are counted in the buffers


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # raised by torch while it compiles
def test_compiled_blocks_are_recomputed():
    torch._dynamo.reset()
    repeated = []

    def backend(graph, inputs):
        repeated.extend(node for node in graph.graph.nodes if "checkpoint" in str(node.target))
        return graph

    torch.compile(checkpointed(blocks("post-activation")), backend=backend)(torch.randn(4, 8, 8, 8))
    assert len(repeated) == 2


def _distributed_step(recompute: bool) -> list[torch.Tensor]:
    stage = blocks("post-activation", InPlaceABNSync).double()
    network = nn.parallel.DistributedDataParallel(checkpointed(stage) if recompute else stage)
    torch.manual_seed(torch.distributed.get_rank())
    return step(network, torch.randn(2 + torch.distributed.get_rank(), 8, 8, 8, dtype=torch.float64))


@pytest.mark.dist
def test_synchronized_norms_in_distributed_networks_are_right():
    plain, recomputed = run_distributed(_distributed_step, 2, False), run_distributed(_distributed_step, 2, True)
    for rank in (0, 1):
        assert max(map(relative_error, recomputed[rank], plain[rank])) < 1e-12


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norms_of_torch_count_batch_once_too(momentum):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU())
    ours = CheckpointedSequential(copy.deepcopy(plain))
    for _ in range(3):
        x = torch.randn(4, 3, 8, 8)
        for module in (plain, ours):
            module(x.clone().requires_grad_()).square().sum().backward()
    for mine, truth in zip(ours.buffers(), plain.buffers(), strict=True):
        assert relative_error(mine, truth) < 1e-6
    assert ours[0][1].momentum == momentum
