"""Selective activation checkpoints around operations that work in place."""

from __future__ import annotations

import functools
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests.formula import relative_error
from zoo.layers import InPlaceABN, init_weights
from zoo.layers.checkpointing import CheckpointedSequential
from zoo.layers.conv import MaxPool2d
from zoo.layers.dense import DenseModule
from zoo.layers.residual import IdentityResidualBlock
from zoo.models.resnet import ResidualBlock
from zoo.ops.context import in_selective_checkpoint

POLICIES = {
    "convolutions": lambda name: "convolution" in name,
    "norms": lambda name: "abn_" in name or "leaky_relu" in name,
    "norms' outputs": lambda name: "abn_apply" in name,
    "pools": lambda name: "pool" in name,
    "all that overwrite nothing": lambda name: "_." not in name,
    "nothing": lambda name: False,
}


def contexts(saves):
    def policy(ctx, operation, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if saves(str(operation)) else CheckpointPolicy.MUST_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def blocks() -> OrderedDict:
    return OrderedDict(
        a=IdentityResidualBlock(8, (4, 4, 16), InPlaceABN, stride=2),
        b=IdentityResidualBlock(16, (4, 4, 16), InPlaceABN),
    )


NETWORKS = {
    "chain": lambda: nn.Sequential(
        nn.Conv2d(8, 8, 3), InPlaceABN(8), nn.Conv2d(8, 8, 3), InPlaceABN(8), nn.Conv2d(8, 8, 1)
    ),
    "post-activation": lambda: nn.Sequential(
        ResidualBlock(8, (8, 8), InPlaceABN), ResidualBlock(8, (4, 4, 16), InPlaceABN, stride=2)
    ),
    "pre-activation": lambda: nn.Sequential(blocks()),
    "recomputed norms": lambda: DenseModule(8, 4, 3, InPlaceABN),
    "checkpointed blocks": lambda: CheckpointedSequential(blocks()),
    "pool": lambda: nn.Sequential(nn.Conv2d(8, 8, 3), InPlaceABN(8), MaxPool2d(3, 2, 1)),
}


def gradients(network, x, run):
    leaf = x.clone().requires_grad_()
    run(network, leaf).square().sum().backward()
    return [leaf.grad, *[p.grad for p in network.parameters()]]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_with_any_policy_equal_gradients_without_checkpointing(name, policy):
    torch.manual_seed(0)
    network = NETWORKS[name]().double()
    init_weights(network)
    x = torch.randn(3, 8, 12, 12, dtype=torch.float64)
    expected = gradients(network, x, lambda network, x: network(x))
    network.zero_grad()
    context_fn = functools.partial(contexts, POLICIES[policy])
    actual = gradients(
        network, x, lambda network, x: torch_checkpoint(network, x, use_reentrant=False, context_fn=context_fn)
    )
    assert max(map(relative_error, actual, expected)) < 1e-10


def test_selective_checkpoint_is_recognized_in_both_passes_only():
    seen = []

    def watched(x):
        seen.append(in_selective_checkpoint())
        return x.sin().sin()

    x = torch.ones(3, requires_grad=True)
    watched(x)
    torch_checkpoint(watched, x, use_reentrant=False).sum().backward()
    context_fn = functools.partial(contexts, POLICIES["nothing"])
    torch_checkpoint(watched, x, use_reentrant=False, context_fn=context_fn).sum().backward()
    assert seen == [False, False, False, True, True]
