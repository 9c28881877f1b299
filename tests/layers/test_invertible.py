"""Chains of layer-wise invertible layers, and reversible blocks of them, against the same layers stored."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.dist.spawn import run_distributed
from tests.formula import relative_error
from zoo.layers import ABN, InPlaceABNSync, ReversibleSequential, init_weights
from zoo.layers.invertible import (
    BatchPool,
    ChannelPool,
    GlobalMax,
    InvertibleConv,
    InvertibleLeakyReLU,
    InvertibleNorm,
    LayerwiseBlock,
    Stem,
)
from zoo.layers.reversible import PairPool, ShiftBlock
from zoo.layers.revnet_blocks import build_preact_branch
from zoo.ops.chain import run_chain


def unit(channels):
    return [InvertibleConv(channels), InvertibleNorm(ABN(channels), 1e-4), InvertibleLeakyReLU(0.3)]


def chain_of(kind):
    """Return layers that read four channels (the stem: three) and pool twice."""
    if kind == "flat":
        layers = [*unit(4), ChannelPool(), *unit(16), BatchPool(), *unit(16)]
    elif kind == "hybrid":
        layers = [LayerwiseBlock(unit(2), unit(2)), ChannelPool()]
        layers += [LayerwiseBlock([*unit(8), *unit(8)], [*unit(8), *unit(8)]), BatchPool()]
        layers += [LayerwiseBlock(unit(8), unit(8))]
    else:
        layers = [Stem(4), *unit(4), BatchPool(), LayerwiseBlock(unit(2), unit(2)), GlobalMax(4)]
    module = nn.Sequential(*layers).double()
    init_weights(module, activation_param=0.3)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, -1.5, 1.5)
    return module


def images(kind, batch=5):
    return torch.randn(batch, 3 if kind == "whole" else 4, 8, 12, dtype=torch.float64, requires_grad=True)


KINDS = ["flat", "hybrid", "whole"]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch", [1, 5, 17])
@pytest.mark.parametrize("kind", KINDS)
def test_reconstruction_equals_stored_activations(kind, batch, training):
    torch.manual_seed(0)
    ours = chain_of(kind).train(training)
    truth = copy.deepcopy(ours)
    x = images(kind, batch)
    (y,) = run_chain(ours, x)
    expected = truth(x)
    assert relative_error(y, expected) < 1e-12
    dy = torch.randn_like(expected)
    found = torch.autograd.grad(y, (x, *ours.parameters()), dy)
    truths = torch.autograd.grad(expected, (x, *truth.parameters()), dy)
    assert max(map(relative_error, found, truths)) < 1e-10
    for buffer, theirs in zip(ours.buffers(), truth.buffers(), strict=True):
        assert torch.equal(buffer, theirs)


def test_rounding_errors_inside_branch_stay_in_block():
    torch.manual_seed(0)
    block = LayerwiseBlock(*([*unit(8), InvertibleConv(8), InvertibleLeakyReLU(1e-3)] for _ in "fg"))
    init_weights(block)
    errors = {}
    links = [block, InvertibleLeakyReLU(1.0)]
    run_chain(links, torch.randn(4, 16, 8, 8), meter=errors.__setitem__)[0].square().sum().backward()
    assert errors[0] < 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("kind", ["flat", "hybrid"])
def test_visible_tensors_are_not_overwritten(kind):
    torch.manual_seed(0)
    layers, x = chain_of(kind), images(kind)
    (y,) = run_chain(layers, x)
    dy, before = torch.randn_like(y), y.detach().clone()
    dy_before, x_before = dy.clone(), x.detach().clone()
    first = torch.autograd.grad(y, (x, *layers.parameters()), dy, retain_graph=True)
    second = torch.autograd.grad(y, (x, *layers.parameters()), dy)
    for tensor, truth in ((y, before), (dy, dy_before), (x, x_before)):
        assert torch.equal(tensor, truth)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("where", ["in a branch", "in both branches"])
def test_layer_used_twice_in_block_gets_both_gradients(where):
    torch.manual_seed(0)
    layers = unit(2)
    block = LayerwiseBlock([*layers, *layers], unit(2)) if where == "in a branch" else LayerwiseBlock(layers, layers)
    block = block.double()
    init_weights(block)
    x = images("hybrid")
    found, truths = (
        torch.autograd.grad(run_chain([block], x, store=store)[0].sin().sum(), (x, *block.parameters()))
        for store in (False, True)
    )
    assert max(map(relative_error, found, truths)) < 1e-10


def test_two_forward_passes_keep_their_own_statistics():
    torch.manual_seed(0)
    layers = chain_of("flat")
    truth = copy.deepcopy(layers)
    xs = [images("flat"), (3 * images("flat") + 1).detach().requires_grad_()]
    sum(run_chain(layers, x)[0].square().sum() for x in xs).backward()
    found = [x.grad.clone() for x in xs]
    for x in xs:
        x.grad = None
    sum(truth(x).square().sum() for x in xs).backward()
    assert max(relative_error(ours, x.grad) for ours, x in zip(found, xs, strict=True)) < 1e-10


def test_only_layers_that_are_not_frozen_get_gradients():
    torch.manual_seed(0)
    layers = chain_of("hybrid")
    layers[2].requires_grad_(False)
    truth = copy.deepcopy(layers)
    x = images("hybrid").detach()
    run_chain(layers, x)[0].square().sum().backward()
    truth(x).square().sum().backward()
    for parameter, theirs in zip(layers.parameters(), truth.parameters(), strict=True):
        assert (parameter.grad is None) == (theirs.grad is None)
        assert parameter.grad is None or relative_error(parameter.grad, theirs.grad) < 1e-10


def test_half_precision_keeps_stream_in_float32():
    torch.manual_seed(0)
    layers = chain_of("whole").float()
    truth = copy.deepcopy(layers)
    x = images("whole").detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = run_chain(layers, x)[0], truth(x)
    assert y.dtype == expected.dtype == torch.float32
    assert relative_error(y, expected) < 1e-2
    y.sum().backward()
    expected.sum().backward()
    for parameter, theirs in zip(layers.parameters(), truth.parameters(), strict=True):
        assert parameter.grad.dtype == torch.float32
        cosine = torch.cosine_similarity(parameter.grad.flatten(), theirs.grad.flatten(), 0)
        assert cosine > 0.99


def shift_chain():
    def norm(channels):
        return ABN(channels, activation="leaky_relu", activation_param=0.3)

    def block(in_channels, channels, stride=1, leading_norm=True):
        shape = (in_channels, channels, norm, True, stride, leading_norm)
        return ShiftBlock(build_preact_branch(*shape, outer_size=3, dropout=0.3), stride)

    links = [block(4, 4, leading_norm=False), block(4, 16, stride=2), PairPool(), block(64, 64)]
    chain = ReversibleSequential(links).double()
    init_weights(chain)
    return chain


def test_shift_blocks_and_pools_equal_storing_with_dropout():
    torch.manual_seed(0)
    chain = shift_chain()
    truth = copy.deepcopy(chain)
    truth.store = True
    x = torch.randn(3, 8, 8, 8, dtype=torch.float64, requires_grad=True)
    results = []
    for module in (chain, truth):
        torch.manual_seed(1)
        y = module(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), (x, *module.parameters()))])
    assert max(map(relative_error, *results)) < 1e-10
    for buffer, theirs in zip(chain.buffers(), truth.buffers(), strict=True):
        assert torch.equal(buffer, theirs)


def _distributed_step() -> list[list[torch.Tensor]]:
    """Return gradients and buffers of a step with synchronized norms under DDP: reconstructed, then stored."""
    results = []
    rank = torch.distributed.get_rank()
    for store in (False, True):
        torch.manual_seed(0)
        norm = InPlaceABNSync
        layers = [InvertibleConv(4), InvertibleNorm(norm(4), 0.1), InvertibleLeakyReLU(0.3), ChannelPool()]
        branches = [[InvertibleConv(8), InvertibleNorm(norm(8), 0.1)] for _ in range(2)]
        net = _Chain([*layers, LayerwiseBlock(*branches)], store).double()
        init_weights(net)
        module = DistributedDataParallel(net)
        x = torch.randn(2 + rank, 4, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        (module(x).square().sum() + module(2 * x).sin().sum()).backward()
        results.append([*[p.grad for p in net.parameters()], *net.buffers()])
    return results


class _Chain(nn.Module):
    """A chain between two operations of autograd's."""

    def __init__(self, layers, store):
        super().__init__()
        self.layers, self.store = nn.Sequential(*layers), store

    def forward(self, x):
        return run_chain(self.layers, x.tanh(), store=self.store)[0].tanh()


@pytest.mark.dist
def test_synchronized_norms_are_undone_with_statistics_of_all_processes():
    for ours, truth in run_distributed(_distributed_step, 2):
        assert len(ours) == len(truth) == 12 + 9
        assert max(map(relative_error, ours, truth)) < 1e-10
