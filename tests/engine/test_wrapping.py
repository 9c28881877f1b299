"""Compiled networks with a budget for what they keep for backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import nn

from zoo.engine import wrapping
from zoo.remat import inductor_options
from zoo.remat.lean import lean
from zoo.remat.partitioning import random_saving_partitioner

pytestmark = [
    pytest.mark.slow,  # compiles
    pytest.mark.filterwarnings("ignore"),  # torch's own, while it compiles
]


def _network() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        layer for _ in range(2) for layer in (nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.GELU())
    ]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("budget", [None, 0.5])
@pytest.mark.parametrize(("mode", "options"), [("default", {}), ("reduce-overhead", {"triton.cudagraphs": True})])
def test_the_compiler_gets_the_options_of_the_mode_with_and_without_a_budget(
    budget: float | None, mode: str, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.compile_fx  # here, as it warns in torch 2.11

    seen: list[tuple[dict[str, bool], float]] = []

    def compile_fx(graph: Any, inputs: Any, config_patches: dict[str, bool], **_: Any) -> Any:
        seen.append((dict(config_patches), torch._functorch.config.activation_memory_budget))
        return graph.forward

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    torch._dynamo.reset()
    wrapping.compile_network(_network(), budget, mode)(torch.randn(2, 8, 4, 4))
    assert [(options, 1.0 if budget is None else budget)] == [
        ({key: value for key, value in patches.items() if key in options}, kept) for patches, kept in seen
    ]


@pytest.mark.parametrize("budget", [None, 0.5])
def test_a_lean_network_is_compiled_with_the_lean_rule_unless_there_is_a_budget(
    budget: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.compile_fx  # here, as it warns in torch 2.11

    rules = []

    def compile_fx(graph: Any, inputs: Any, config_patches: dict[str, Any], **_: Any) -> Any:
        rules.append(config_patches["custom_partitioner_fn"])
        return graph.forward

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    torch._dynamo.reset()
    wrapping.compile_network(lean(_network()), budget)(torch.randn(2, 8, 4, 4))
    (rule,) = rules
    expected = random_saving_partitioner() if budget else inductor_options()["custom_partitioner_fn"]
    assert rule.uuid() == expected.uuid()
