"""Stochastic depth drops branches of residual blocks as torchvision and timm do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.ops import stochastic_depth

from zoo.layers.conv import drop_path
from zoo.layers.norm import norm_act
from zoo.layers.residual import IdentityResidualBlock
from zoo.layers.revnet_blocks import PreactBlock
from zoo.models.resnet import ResidualBlock

RATE = 0.4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.1, RATE, 0.9])
def test_branches_are_dropped_like_torchvision(rate: float, dtype: torch.dtype) -> None:
    x = torch.randn(64, 3, 2, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    torch.manual_seed(1)
    expected = stochastic_depth(x, rate, "row")
    torch.manual_seed(1)
    assert torch.equal(drop_path(x, rate), expected)


def test_branches_are_dropped_like_timm() -> None:
    reference = pytest.importorskip("timm.layers").DropPath(RATE)
    x = torch.randn(64, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    expected = reference(x)
    torch.manual_seed(1)
    assert torch.equal(drop_path(x, RATE), expected)


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("kind", ["post", "post-in-place", "identity", "preact"])
def test_dropped_block_is_its_shortcut(kind: str, dropped: bool) -> None:
    torch.manual_seed(0)
    norm = norm_act("inplace" if kind == "post-in-place" else "standard", "leaky_relu", 0.01)
    block: Any = {
        "post": lambda: ResidualBlock(4, (4, 4), norm),
        "post-in-place": lambda: ResidualBlock(4, (4, 4), norm),
        "identity": lambda: IdentityResidualBlock(4, (4, 4), norm),
        "preact": lambda: PreactBlock(4, 4, norm, bottleneck=False),
    }[kind]()
    for parameter in block.parameters():
        nn.init.normal_(parameter.data)
    x = torch.randn(3, 4, 5, 5)
    plain = copy.deepcopy(block)
    block.drop_path = 1 - 1e-9 if dropped else 1e-9  # float32 rounds the factor to 0 or 1
    expected = (nn.functional.leaky_relu(x, 0.01) if kind.startswith("post") else x) if dropped else plain(x)
    torch.testing.assert_close(block(x), expected)
    assert torch.equal(block.eval()(x), plain.eval().load_state_dict(block.state_dict()) and plain(x))
