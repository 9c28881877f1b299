"""Every network can be lean, then holds fewer bytes, and is exported unchanged."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch

import zoo
from tests.held import held_bytes
from zoo.config.architectures import ARCHITECTURES, LEAN
from zoo.convert.trace import Trace
from zoo.layers import ABN
from zoo.remat.lean import StepsAside, is_lean


@functools.cache
def bytes_of(name, norm, memory) -> int:
    with torch.device("meta"):
        network = zoo.get(name, norm=norm, memory=memory)
        x = torch.empty(8, 3, 64, 64)
    return held_bytes(lambda: network(x).sum(), warmup=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most", "of_auto"),
    [("resnet18", 0.6, 0.75), ("revnet38_cifar", 0.2, 0.9)],
)
def test_lean_networks_with_standard_norms_hold_about_half_or_less(name, most, of_auto):
    plain, auto, lean = (bytes_of(name, "standard", memory) for memory in ("plain", "auto", LEAN))
    assert lean < most * plain
    assert lean < of_auto * auto


def test_every_network_and_backbone_can_be_lean():
    one_of_each_family = {record.family: name for name, record in ARCHITECTURES.items()}
    assert all(LEAN in record.memory for record in ARCHITECTURES.values())
    with torch.device("meta"):
        assert all(is_lean(zoo.get(arch, memory=LEAN)) for arch in one_of_each_family.values())
        assert is_lean(zoo.get("resnet18", memory=LEAN, features_only=True))


def test_lean_networks_can_be_traced_and_exported():
    with torch.device("meta"):
        auto, lean = (zoo.get("resnet18", norm="inplace", memory=memory) for memory in ("auto", LEAN))
        x = torch.empty(2, 3, 64, 64)
    names = [name for name, module in auto.named_modules() if isinstance(module, ABN)]
    expected, trace = Trace(auto), Trace(lean)
    assert [trace.producer_of(name) for name in names] == [expected.producer_of(name) for name in names]
    with warnings.catch_warnings(action="ignore", category=StepsAside):
        graphs = [torch.export.export(network.eval(), (x,)).graph for network in (auto, lean)]
    assert [node.target for node in graphs[0].nodes] == [node.target for node in graphs[1].nodes]
