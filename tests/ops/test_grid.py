"""Rounding to the grid, the digest of a stream, and the errors of inexact chains."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import nn

from tests.ops.grid_cases import terms
from tests.refusals import refused
from zoo.errors import ConfigError, VerificationError
from zoo.layers import ReversibleBlock, ReversibleSequential
from zoo.layers.invertible import InvertibleLeakyReLU
from zoo.layers.reversible import PairPool
from zoo.ops.chain import run_chain
from zoo.ops.grid import digest, round_to_grid, sum_on_grid


@pytest.mark.parametrize("bits", [0, 3, 14, 22])
def test_values_are_rounded_with_straight_through_gradient(bits):
    x = torch.randn(1000, dtype=torch.float64).float().requires_grad_()
    y = round_to_grid(x, bits)
    assert torch.equal(y.double(), (x.detach().double() * 2**bits).round() / 2**bits)
    (dx,) = torch.autograd.grad((y * torch.arange(1000)).sum(), x)
    assert torch.equal(dx, torch.arange(1000.0))


def test_half_precision_is_rounded_in_single_precision():
    x = torch.tensor([1.375, -0.40625], dtype=torch.bfloat16, requires_grad=True)
    y = round_to_grid(x, 2)
    assert y.dtype == torch.float32
    assert y.tolist() == [1.5, -0.5]
    (2 * y).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert x.grad.tolist() == [2, 2]


def test_rounding_to_grid_works_under_vmap_and_grad():
    x = torch.randn(3, 5)
    assert torch.equal(torch.func.vmap(lambda row: round_to_grid(row, 4))(x), round_to_grid(x, 4))
    assert torch.equal(torch.func.grad(lambda x: round_to_grid(x, 4).sum())(x), torch.ones(3, 5))


@pytest.mark.slow
def test_rounding_to_grid_can_be_exported():
    class Rounding(nn.Module):
        def forward(self, x):
            return round_to_grid(x, 4)

    x = torch.randn(3, 5)
    assert torch.equal(torch.export.export(Rounding(), (x,)).module()(x), round_to_grid(x, 4))


@pytest.mark.parametrize("bits", [-1, 23, 14.5, True, "14"])
def test_invalid_grid_raises(bits):
    refused(ConfigError, lambda: round_to_grid(torch.zeros(1), bits), "grid_bits", "0 to 22")


def test_sum_of_other_layouts_and_half_precision_is_right():
    x, r = terms()
    others = (r.mT.contiguous().mT, r.contiguous(memory_format=torch.channels_last), r.bfloat16(), r[:, :, ::2, :])
    for other in others:
        of_x = x[:, :, ::2, :] if other.shape != x.shape else x
        found, _ = sum_on_grid(of_x, other, 14)
        assert torch.equal(found, of_x + round_to_grid(other, 14))


def test_largest_value_with_nan_is_none():
    x, r = terms()
    r.view(-1)[100] = torch.nan
    _, summary = sum_on_grid(x, r, 14)
    assert summary is None or summary[1].view(torch.float32).isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_digest_depends_on_every_bit_of_every_value(dtype):
    x = torch.randn(4, 6, dtype=dtype)
    integers = {torch.float32: torch.int32, torch.float64: torch.int64}[dtype]
    for bit in range(8 * x.element_size()):
        changed = x.clone()
        changed.view(integers)[2, 3] ^= torch.tensor(1, dtype=integers) << bit
        assert not torch.equal(digest(changed), digest(x))


def test_digest_does_not_cancel_or_depend_on_layout():
    x = torch.randn(2, 6, 4, 4)
    wrong = x.clone()
    wrong.view(torch.int32)[0, 0, 0, 0] += 1
    wrong.view(torch.int32)[1, 5, 3, 2] -= 1
    assert wrong.view(torch.int32).sum() == x.view(torch.int32).sum()
    assert not torch.equal(digest(wrong), digest(x))
    assert torch.equal(digest(x.to(memory_format=torch.channels_last)), digest(x))


class Scaled(nn.Module):
    """A branch x -> sin(x) * scale, with a frozen scale, which autograd does not watch."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale), requires_grad=False)

    def forward(self, x):
        return x.sin() * self.scale


class Nondeterministic(nn.Module):
    """A branch that adds another small number in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count(1)

    def forward(self, x):
        return x.sin() + 0.001 * next(self.calls)


def chain_of(*branches, grid_bits=14) -> ReversibleSequential:
    """Blocks of two channels per half; f is one of ``branches``, g adds little."""
    return ReversibleSequential((ReversibleBlock(f, Scaled(0.1)) for f in branches), grid_bits=grid_bits)


def images(scale=1.0):
    torch.manual_seed(0)
    return (scale * torch.randn(2, 4, 3, 3)).requires_grad_()


def test_value_out_of_range_names_sufficient_bits():
    chain = chain_of(Scaled(), Scaled(1500.0), Scaled(0.001))
    with pytest.raises(VerificationError) as caught:
        chain(images()).sum().backward()
    text = str(caught.value)
    found = re.search(r"exact below 1,024, and the largest absolute value of this block's output is ([\d,.]+); ", text)
    assert found
    assert 1400 < float(found[1].replace(",", "")) < 1600
    assert text.startswith("block 2 of the blocks 0 to 2, streams of shape (2, 2, 3, 3): backward could not")
    assert text.endswith("; set grid_bits to 13 or less")
    coarser = chain_of(Scaled(), Scaled(1500.0), Scaled(0.001), grid_bits=13)
    coarser(images()).sum().backward()


def test_invalid_grid_ranges_and_non_finite_values_are_named():
    for scale, remedy in ((1e9, "store activations"), (1e39, "diverged")):
        refused(VerificationError, chain_of(Scaled(scale))(images()).sum().backward, remedy)


def test_nondeterministic_branch_is_named_with_block():
    chain = chain_of(Scaled(), Nondeterministic(), Scaled())
    refused(
        VerificationError,
        chain(images()).sum().backward,
        "block 1 of the blocks 0 to 2",
        "torch.use_deterministic_algorithms(True)",
    )
    chain.store = True
    chain(images()).sum().backward()


def test_changed_parameter_is_named_with_block():
    chain = chain_of(Scaled(), Scaled(), Scaled())
    y = chain(images())
    chain[2].f.scale.data.mul_(1.01)
    refused(VerificationError, lambda: y.sum().backward(), "block 2", "parameters or buffers")


def test_changed_branch_is_named_in_single_link():
    chain = chain_of(Scaled(), Scaled())
    y1, y2 = run_chain(list(chain), *images().chunk(2, 1), grid_bits=chain.grid_bits)
    chain[1].g.scale.data.mul_(1.5)
    refused(VerificationError, lambda: (y1 + y2).sum().backward(), "block 1")


def test_single_wrong_value_is_found():
    chain, hit = chain_of(Scaled(), Scaled(), Scaled()), []

    def disturb(module, args, output):
        hit.append(True)
        if len(hit) == 2:  # the recomputation
            output.data.view(-1)[7] += 2.0**-14

    chain[0].f.register_forward_hook(disturb)
    refused(VerificationError, lambda: chain(images()).sum().backward(), "block 0")


def test_negative_zeros_are_reconstructed():
    """x - r is +0 for x = r, so that -0 must not be in a stream."""
    x = torch.full((1, 2, 1, 1), -0.0).requires_grad_()
    chain_of(nn.Identity(), nn.Identity())(x).sum().backward()
    assert x.grad is not None


def test_nothing_is_compared_without_grid():
    chain = chain_of(Scaled(), Nondeterministic(), Scaled(1500.0), grid_bits=None)
    chain(images()).sum().backward()


def test_layers_with_another_grid_raise():
    refused(
        ConfigError,
        lambda: run_chain([InvertibleLeakyReLU(0.5)], images(), grid_bits=14),
        "grid_bits",
        "14",
        "None",
        "block 0",
        "InvertibleLeakyReLU",
    )
    block = ReversibleBlock(Scaled(), Scaled(), grid_bits=12)
    refused(
        ConfigError, lambda: ReversibleSequential([PairPool(), block])(images()), "grid_bits", "None", "12", "block 1"
    )
    chain = chain_of(Scaled(), grid_bits=None)
    chain.grid_bits = 14
    refused(ConfigError, lambda: chain(images()), "None", "block 0", "ReversibleSequential")
    refused(ConfigError, lambda: chain_of(Scaled())(images().bfloat16()), "torch.bfloat16", "torch.autocast")
