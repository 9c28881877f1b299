"""Compiled lean networks get the lean rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zoo.engine._wrapping import compile_network
from zoo.remat import inductor_options
from zoo.remat._lean import lean

pytestmark = [
    pytest.mark.slow,  # compiles
    pytest.mark.filterwarnings("ignore"),  # raised by torch while it compiles
]


def _network() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        layer for _ in range(2) for layer in (nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.GELU())
    ]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("is_lean", [False, True])
def test_compiled_lean_network_uses_lean_rule(is_lean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.compile_fx  # here, because it warns in torch 2.11

    seen: list[dict[str, Any]] = []

    def compile_fx(graph: Any, inputs: Any, config_patches: dict[str, Any] | None = None, **_: Any) -> Any:
        seen.append(dict(config_patches or {}))
        return graph.forward

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    torch._dynamo.reset()
    network = lean(_network()) if is_lean else _network()
    compile_network(network)(torch.randn(2, 8, 4, 4))
    (patches,) = seen
    rule = patches.get("custom_partitioner_fn")
    assert (rule is not None) == is_lean
    if rule is not None:
        assert rule.uuid() == inductor_options()["custom_partitioner_fn"].uuid()
