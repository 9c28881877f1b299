"""Stochastic depth drops branches of residual blocks as timm does, with the same bits under every memory strategy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.ops import stochastic_depth

import zoo
from tests.step import step
from zoo.config.architectures import ARCHITECTURES
from zoo.layers.conv import drop_path
from zoo.layers.norm import norm_act
from zoo.layers.residual import IdentityResidualBlock
from zoo.layers.revnet_blocks import PreactBlock
from zoo.models.resnet import ResidualBlock
from zoo.remat import Rematerializer
from zoo.remat import lean as lean_module
from zoo.remat.lean import lean

RATE = 0.4
NETWORKS: list[tuple[str, dict[str, Any]]] = [
    ("resnet18", {"norm": "inplace"}),
    ("resnext50", {}),
    ("wider_resnet16_a2", {"norm": "inplace"}),
    ("resnet32_cifar", {}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.1, RATE, 0.9])
def test_branches_are_dropped_like_torchvisions(rate: float, dtype: torch.dtype) -> None:
    x = torch.randn(64, 3, 2, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    torch.manual_seed(1)
    expected = stochastic_depth(x, rate, "row")
    torch.manual_seed(1)
    assert torch.equal(drop_path(x, rate), expected)


def test_branches_are_dropped_like_timms() -> None:
    reference = pytest.importorskip("timm.layers").DropPath(RATE)
    x = torch.randn(64, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    expected = reference(x)
    torch.manual_seed(1)
    assert torch.equal(drop_path(x, RATE), expected)


@pytest.mark.parametrize(("arch", "options"), NETWORKS)
def test_rates_rise_linearly_from_the_first_block_to_the_last(arch: str, options: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = zoo.get(arch, drop_path_rate=RATE, **options)
    blocks = [m for m in model.modules() if isinstance(m, (ResidualBlock, IdentityResidualBlock, PreactBlock))]
    assert len(blocks) > 3
    assert [block.drop_path for block in blocks] == pytest.approx(torch.linspace(0, RATE, len(blocks)).tolist())


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


@pytest.mark.parametrize(
    ("arch", "options"),
    [pytest.param(*each, marks=[] if each[0] == "resnet32_cifar" else pytest.mark.exhaustive) for each in NETWORKS],
)
def test_lean_networks_drop_the_same_branches_with_the_same_bits(
    arch: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        lean_module, "Rematerializer", lambda *args, **kw: Rematerializer(*args, **kw, smallest_bytes=0)
    )
    torch.manual_seed(0)
    plain = zoo.get(arch, num_classes=5, drop_path_rate=RATE, **options)
    x = torch.randn(4, 3, 16, 16)
    models = [plain, lean(copy.deepcopy(plain))]
    if "checkpoint" in ARCHITECTURES[arch].memory:
        models.append(zoo.get(arch, num_classes=5, drop_path_rate=RATE, memory="checkpoint", **options))
        models[-1].load_state_dict(plain.state_dict())
    results = [step(model, x) for model in models]
    for result in results[1:]:
        assert all(torch.equal(ours, expected) for ours, expected in zip(result, results[0], strict=True))
    plain.set_drop_path_rate(0.0)
    assert not torch.equal(step(plain, x)[0], results[0][0])
