"""The block of a ResNet with its last norm fused: same results, less saved; and when it is not fused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.formula import relative_error, worst_error
from tests.held import held_bytes
from tests.step import step
from zoo.layers.init import init_weights
from zoo.layers.norm import ABN, InPlaceABN, InPlaceABNSync
from zoo.models.resnet import ResidualBlock


def build(
    memory="auto", norm=InPlaceABN, stride=1, channels=(4, 4, 16), dtype=torch.float64, **settings
) -> ResidualBlock:
    torch.manual_seed(0)
    block = ResidualBlock(16, channels, lambda c: norm(c, **settings), stride=stride, memory=memory)
    init_weights(block)
    return block.to(dtype)


@pytest.mark.parametrize("norm", [InPlaceABN, InPlaceABNSync])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("channels", [(4, 4, 16), (16, 16)])
@pytest.mark.parametrize("activation", ["leaky_relu", "elu"])
def test_fused_and_unfused_blocks_compute_the_same(norm, stride, channels, activation):
    settings = {"norm": norm, "stride": stride, "channels": channels, "activation": activation}
    x = torch.randn(2, 16, 6, 6, dtype=torch.float64)
    steps = (step(Branched(build(memory, **settings)), x) for memory in ("auto", "plain"))
    assert worst_error(*steps) < 1e-10


def test_fused_block_saves_last_norm_only_in_half_precision():
    def held(memory, dtype):
        block, x = build(memory, dtype=torch.float32), torch.randn(8, 16, 16, 16, dtype=dtype).requires_grad_()
        return held_bytes(lambda: block(x * 1).sum())

    assert held("plain", torch.float32) - held("auto", torch.float32) == 8 * 16 * 16 * 16 * 4
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert held("plain", torch.bfloat16) == held("auto", torch.bfloat16)


class Branched(nn.Module):
    """A block whose input is no leaf, so that the block may overwrite it."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return self.block(x * 1)


class Halving(nn.Module):
    """A foreign norm that only shares an activation attribute."""

    def __init__(self, channels):
        super().__init__()
        self.activation, self.activation_param = "leaky_relu", 0.01
        self.halved = nn.Parameter(torch.full((channels, 1, 1), 0.5))

    def forward(self, x):
        return x * self.halved


class OwnForward(InPlaceABN):
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("norm", [ABN, Halving, OwnForward])
def test_norm_that_cannot_fuse_takes_unfused_path(norm):
    torch.manual_seed(0)
    block = ResidualBlock(16, (4, 4, 16), norm)
    init_weights(block)
    x = torch.randn(2, 16, 6, 6)
    branch = nn.Sequential(*block.convs)
    expected = nn.functional.leaky_relu(branch(x.clone()) + x, 0.01)
    assert relative_error(block(x), expected) < 1e-5


def test_hooks_of_the_last_norm_see_norms_own_output():
    block, seen = build(), []
    x = torch.randn(2, 16, 6, 6).double()
    block.convs.bn3.register_forward_hook(lambda module, args, output: seen.append(output))
    out = block(x)
    (output,) = seen
    assert torch.equal(nn.functional.leaky_relu(output + x, 0.01), out)


def test_last_norm_swapped_for_activated_one_is_not_fused():
    block = build()
    block.convs.bn3.activation = "elu"
    x = torch.randn(2, 16, 6, 6).double()
    out = block(x.clone())
    expected = nn.functional.leaky_relu(nn.Sequential(*block.convs)(x.clone()) + x, 0.01)
    assert relative_error(out, expected) < 1e-12
