"""In-place inverses of pools, activation, norm and convolution, and the laws of their rounding errors."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.formula import relative_error
from zoo.layers import InPlaceABN
from zoo.layers.invertible import GlobalMax, InvertibleConv, InvertibleLeakyReLU, InvertibleNorm, Stem
from zoo.ops.inverse import (
    batch_pool,
    batch_unpool_,
    channel_pool,
    channel_unpool_,
    global_max,
    global_max_gradient,
)

POOLS = {
    "channel": (channel_pool, channel_unpool_),
    "batch": (batch_pool, batch_unpool_),
}


@pytest.mark.parametrize("kind", list(POOLS))
@pytest.mark.parametrize("shape", [(1, 1, 2, 2), (3, 5, 6, 4), (9, 2, 4, 10)])
def test_pools_are_inverted_in_place_bit_for_bit_in_any_layout(kind, shape):
    pool, unpool_ = POOLS[kind]
    x = torch.randn(shape)
    for layout in (x, x.to(memory_format=torch.channels_last), x.transpose(2, 3).contiguous().transpose(2, 3)):
        y = pool(layout)
        assert y.is_contiguous()
        address = y.data_ptr()
        found = unpool_(y)
        assert torch.equal(found, x)
        assert found.data_ptr() == address


def test_channel_pool_puts_offsets_first():
    x = torch.randn(2, 3, 8, 6)
    y = channel_pool(x)
    for dy in (0, 1):
        for dx in (0, 1):
            start = (2 * dy + dx) * 3
            assert torch.equal(y[:, start : start + 3], x[:, :, dy::2, dx::2])
    unshuffled = F.pixel_unshuffle(x, 2)  # torch's has the channels first
    assert torch.equal(y, unshuffled.unflatten(1, (3, 4)).transpose(1, 2).flatten(1, 2))


def test_batch_pool_keeps_parts_of_image_together():
    x = torch.randn(3, 2, 4, 6)
    y = batch_pool(batch_pool(x[..., :4]))
    for n in range(3):
        own = batch_pool(batch_pool(x[n : n + 1, :, :, :4]))
        assert torch.equal(y[16 * n : 16 * n + 16], own)
    assert torch.equal(batch_pool(x)[4 * 1 + 2 * 1 + 0], x[1, :, 1::2, 0::2])


def test_ties_of_group_maximum_share_gradient():
    x = torch.randn(6, 3, 4, 5, dtype=torch.float64)
    x[0, 0] = x[1, 0] = 7.0
    x.requires_grad_()
    best = global_max(x, 2)
    assert torch.equal(best, x.unflatten(0, (3, 2)).transpose(1, 2).flatten(2).max(-1).values)
    dbest = torch.randn_like(best)
    (truth,) = torch.autograd.grad(best, x, dbest)
    assert relative_error(global_max_gradient(x.detach(), best.detach(), dbest, 2), truth) < 1e-14


def norm_of(channels, eps_i=0.0, **kwargs):
    layer = InvertibleNorm(InPlaceABN(channels, activation="identity", **kwargs), eps_i).double()
    nn.init.uniform_(layer.norm.weight, -1.5, 1.5)
    nn.init.normal_(layer.norm.bias)
    return layer


def stem_of(channels):
    layer = Stem(channels).double()
    nn.init.normal_(layer.conv.weight)
    return layer


def conv_of(channels):
    layer = InvertibleConv(channels).double()
    for conv in (layer.f, layer.g):
        nn.init.normal_(conv.weight, std=0.2)
    return layer


LAYERS = {
    "norm": lambda: norm_of(6, eps_i=0.3),
    "norm with running statistics": lambda: norm_of(6, eps_i=0.3).eval(),
    "activation": lambda: InvertibleLeakyReLU(0.2),
    "convolution": lambda: conv_of(6),
    "stem": lambda: stem_of(6),
    "largest": lambda: GlobalMax(2),
}


@pytest.mark.parametrize("may_overwrite", [True, False])
@pytest.mark.parametrize("batch", [2, 20])
@pytest.mark.parametrize("name", list(LAYERS))
def test_inversion_gives_input_and_gradients_of_autograd(name, batch, may_overwrite):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    x = torch.randn(batch, 3 if name == "stem" else 6, 4, 6, dtype=torch.float64, requires_grad=True)
    truth = copy.deepcopy(layer)
    expected = truth(x)
    dy = torch.randn_like(expected)
    truths = torch.autograd.grad(expected, (x, *truth.parameters()), dy)
    x.requires_grad_(name == "stem")  # only the stem returns an input gradient
    with torch.no_grad():
        y, saved = layer.record(x)
        assert relative_error(y, expected) < 1e-14
        y, grad = y.detach().clone(), dy.clone()
        found, dx, gradients = layer.reverse(y, grad, may_overwrite, saved)
    assert relative_error(found, x) < 1e-12
    assert relative_error(dx, truths[0]) < 1e-12
    for parameter, gradient in zip(layer.parameters(), truths[1:], strict=True):
        assert relative_error(gradients[parameter], gradient) < 1e-12
    if name not in ("stem", "largest"):  # these return another tensor
        assert (found.data_ptr() == y.data_ptr()) == may_overwrite
        assert (dx.data_ptr() == grad.data_ptr()) == may_overwrite


@torch.no_grad()
def test_plain_convolutions_are_coupled_in_memory_of_input():
    layer, x = conv_of(6), torch.randn(2, 6, 4, 6, dtype=torch.float64)
    assert layer.record_(x)[0].data_ptr() == x.data_ptr()
    seen = []
    layer.f.register_forward_pre_hook(lambda module, args: seen.append((args[0], args[0].clone())))
    y = layer.record_(x)[0]
    assert y.data_ptr() != x.data_ptr()
    assert torch.equal(*seen[0])  # hooks may keep the inputs of f and g


def test_norm_is_formula_with_least_gain_in_scale():
    layer = norm_of(3, eps_i=0.25)
    x = 2 + 3 * torch.randn(8, 3, 5, 7, dtype=torch.float64)
    var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    gain = layer.norm.weight.abs() + 0.25
    shape = (1, 3, 1, 1)
    x_hat = (x - mean.view(shape)) / torch.sqrt(var.view(shape) + 1e-5)
    assert relative_error(layer(x), gain.view(shape) * x_hat + layer.norm.bias.view(shape)) < 1e-12


def alpha(layer, x, noise):
    """Return the ratio of the signal-to-noise ratios (uncentered) before and after undoing the layer."""

    def ratio(signal, found):
        return (signal.square().sum() / (found - signal).square().sum()).item()

    with torch.no_grad():
        y, saved = layer.record(x)
        noisy = y + noise * torch.randn_like(y)
        given = ratio(y, noisy)
        return ratio(x, layer.reverse(noisy, torch.zeros_like(y), True, saved)[0]) / given


def gains(values, eps_i=0.0):
    layer = InvertibleNorm(InPlaceABN(len(values)), eps_i).double()
    with torch.no_grad():
        layer.norm.weight.copy_(torch.tensor(values))
    return layer


def law(ratio):
    """Return the ratio of the signal-to-noise ratios for two gains, one of them ``ratio`` times the other."""
    return pytest.approx((2 * ratio / (1 + ratio**2)) ** 2, rel=0.02)


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.2, 0.1, 0.05, 0.01, 10.0])
def test_norm_with_two_gains_and_leaky_relu_lose_precision_by_law(ratio):
    torch.manual_seed(0)
    x = torch.randn(16, 2, 128, 128, dtype=torch.float64)
    for layer in (gains([1.0, ratio]), InvertibleLeakyReLU(ratio)):
        assert alpha(layer, x, 1e-4 * min(1, ratio)) == law(ratio)


def test_larger_minimum_gain_preserves_more_signal():
    torch.manual_seed(0)
    x = torch.randn(8, 2, 128, 128, dtype=torch.float64)
    found = [alpha(gains([1.0, 0.01], eps_i), x, 1e-6) for eps_i in (0, 1e-4, 1e-3, 1e-2, 0.1, 1)]
    assert found == pytest.approx([4.0e-4, 4.1e-4, 4.8e-4, 1.58e-3, 0.0391, 0.648], rel=0.03)  # by the law
    assert sorted(found) == found
