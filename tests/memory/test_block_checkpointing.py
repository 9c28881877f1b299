"""Checkpointed blocks of any network hold less, with the same gradients and statistics as plain training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from zoo.memory.allocations import count_memory
from zoo.memory.block_checkpointing import checkpoint_blocks, checkpoint_blocks_selectively


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.gate = nn.Conv2d(8, 8, 1)
        self.silu = nn.SiLU(inplace=True)  # overwrites what a convolution returned

    def forward(self, x: Tensor) -> Tensor:
        z = self.relu(self.norm(self.conv(x)))
        return x + z * self.silu(self.gate(z))


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(Stage(), Stage()))


def step(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    model(torch.randn(2, 3, 16, 16)).square().sum().backward()
    return [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


@pytest.mark.parametrize("change", [checkpoint_blocks, checkpoint_blocks_selectively])
def test_results_equal_plain_training_with_fewer_bytes_held(change) -> None:
    plain = network()
    changed = change(copy.deepcopy(plain))
    for mine, theirs in zip(step(changed), step(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    images = torch.randn(2, 3, 16, 16)
    held = [count_memory(lambda m=m: m(images).sum(), m.parameters()).held for m in (changed, plain)]
    assert held[0] < 0.7 * held[1]
