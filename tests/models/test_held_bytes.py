"""Bytes that networks hold between forward and backward are those of golden/held_bytes.json, the README's table.

``python -m tests.models.test_held_bytes`` counts them anew and writes the file.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import zoo
from zoo.config.network import MEMORY
from zoo.report.measure_storages import count_memory

FILE = Path(__file__).parents[1] / "golden" / "held_bytes.json"
NETWORKS = {
    "resnet50": {},
    "resnet101": {},
    "resnext101": {"input_3x3": True},
    "wider_resnet38": {},
    "wider_resnet38_a2": {},
    "densenet264": {"input_3x3": True},
}
STRATEGIES = ("plain", "auto", "checkpoint", "unwind", "unwind_3x3")
GOALS = {
    "resnet50": 0.540,
    "resnet101": 0.530,
    "resnext101": 0.490,
    "wider_resnet38": 0.420,
    "wider_resnet38_a2": 0.440,
    "densenet264": 0.150,
}


def held(name: str, norm: str, memory: str) -> int:
    """Return the bytes held by a training step with 4 pictures of 224 x 224 in float32, counted without computing."""
    with torch.device("meta"):
        model = zoo.get(name, norm=norm, memory=memory, **NETWORKS[name])
        images = torch.empty(4, 3, 224, 224)
    return count_memory(lambda: model(images).sum(), model.parameters()).held


def strategies_of(name: str) -> list[str]:
    family = max((family for family in MEMORY if name.startswith(family)), key=len)
    return [memory for memory in STRATEGIES if memory in MEMORY[family]]


def count(name: str) -> dict[str, float]:
    """Return MB (1e6 bytes) with std-BN, and the ratio to it of each strategy with in-place norms."""
    standard = held(name, "standard", "plain")
    ratios = {memory: round(held(name, "inplace", memory) / standard, 3) for memory in strategies_of(name)}
    return {"standard_mb": round(standard / 1e6, 1), **ratios}


GOLDEN = json.loads(FILE.read_text()) if FILE.exists() else {}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_networks_hold_the_bytes_of_the_golden_file(name):
    assert count(name) == GOLDEN[name]


@pytest.mark.parametrize("name", NETWORKS)
def test_in_place_norms_hold_about_half_or_less(name):
    assert GOLDEN[name]["auto"] <= GOALS[name]


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: count(name) for name in NETWORKS}, indent=2) + "\n")
