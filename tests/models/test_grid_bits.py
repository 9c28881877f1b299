"""Chains on a grid: reconstruction is exact, and gradients ignore the rounding."""

from __future__ import annotations

import pytest
import torch
import torch.fx
from torch import Tensor, nn

from tests.layers.test_reversible import branch
from tests.nets import build, differing, train
from zoo.engine._reconstruction import reconstruction_errors
from zoo.layers import ABN, InPlaceABN, ReversibleBlock, ReversibleSequential, init_weights
from zoo.layers.reversible import PairPool


def test_first_block_of_irevnet_gets_noise_without_grid():
    """Its branch reads channels of zeros, whose reconstruction error the norms of the branch divide by sqrt(eps)."""
    of_first_block = {}
    for memory, bits in (("plain", None), ("auto", None), ("auto", 14)):
        model = build("irevnet_cifar", memory=memory, grid_bits=bits, blocks=[6], dropout=0.0)
        gradients = train(model, steps=1)
        of_first_block[memory, bits] = gradients["gradient of level0.0.branch.conv1.weight"].norm()
    assert of_first_block["plain", None] == of_first_block["auto", 14] == 0
    assert of_first_block["auto", None] > 0.01


@pytest.mark.parametrize("norm", [ABN, InPlaceABN])
def test_dropout_in_branches_of_chain_is_bit_identical(norm):
    results = []
    for store in (False, True):
        torch.manual_seed(0)
        blocks = [ReversibleBlock(branch(4, norm, dropout=0.3), branch(4, norm, dropout=0.3)) for _ in range(3)]
        chain = ReversibleSequential([*blocks, PairPool(), ReversibleBlock(branch(16, norm), branch(16, norm))])
        chain = ReversibleSequential(chain, store=store, grid_bits=12)
        init_weights(chain)
        head = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), chain, nn.Conv2d(32, 5, 8), nn.Flatten())
        results.append(train(head))
    assert not differing(*results)


def test_maps_of_one_pixel_in_channels_last_are_bit_identical():
    """Dimensions of size 1 may have any stride, by which kernels choose the order of their sums."""
    models = [build("revbifpn_s0", memory=memory, grid_bits=14) for memory in ("auto", "plain")]
    assert not differing(*(train(model, side=32, layout=torch.channels_last) for model in models))


@pytest.mark.parametrize("name", ["revnet38_cifar", "irevnet_cifar"])
def test_meter_of_reconstruction_finds_no_error(name):
    for bits, has_error in ((14, False), (None, True)):
        model = build(name, grid_bits=bits)
        with reconstruction_errors(model) as errors:
            train(model, steps=1)
        assert len(errors) == {"revnet38_cifar": 4, "irevnet_cifar": 4}[name]
        assert any(errors.values()) == has_error


def test_inverse_returns_bits_of_input_on_grid():
    chain = build("revnet38_cifar", grid_bits=14).mod2.chain
    x = torch.randint(-9999, 9999, (4, 8, 6, 6)) / 2**14
    assert torch.equal(chain.inverse(chain(x)), x)


def test_gradients_treat_derivative_of_rounding_as_one():
    """The reference is float64 autograd of a straight-through estimator."""
    torch.manual_seed(0)
    chain = ReversibleSequential(
        (ReversibleBlock(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in "fg")) for _ in range(3)), grid_bits=5
    ).double()
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)

    def on_grid(t: Tensor) -> Tensor:
        return t + ((t * 32).round() / 32 - t).detach()

    x1, x2 = map(on_grid, x.chunk(2, 1))
    for block in chain:
        x1 = x1 + on_grid(block.f(x2))
        x2 = x2 + on_grid(block.g(x1))
    expected = torch.autograd.grad(torch.cat((x1, x2), 1).cos().sum(), [x, *chain.parameters()])
    for store in (False, True):
        chain.store = store
        found = torch.autograd.grad(chain(x).cos().sum(), [x, *chain.parameters()])
        for ours, truth in zip(found, expected, strict=True):
            assert torch.allclose(ours, truth, rtol=1e-12, atol=1e-14)
