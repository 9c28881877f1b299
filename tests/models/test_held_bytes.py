"""Bytes that networks hold between forward and backward equal two golden files, the README's tables.

``python -m tests.golden`` counts them anew and writes the files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.held import held_bytes
from zoo.config.architectures import ARCHITECTURES
from zoo.models.revnet import REVERSIBLE_TWINS

pytestmark = pytest.mark.slow  # measures 40 networks

FOLDER = Path(__file__).parents[1] / "golden"
FILE, REVERSIBLE_FILE = FOLDER / "held_bytes.json", FOLDER / "reversible_bytes.json"
FAMILIES_FILE = FOLDER / "family_bytes.json"
NETWORKS = {
    "resnet50": {},
    "resnet101": {},
    "resnext101": {"input_3x3": True},
    "wider_resnet38": {},
    "wider_resnet38_a2": {},
    "densenet264": {"input_3x3": True},
}
DEPTHS: dict[str, tuple[str, tuple[list[int], ...]]] = {  # depths of networks without published sizes, by option
    "irevnet_cifar": ("blocks", ([6, 6, 6], [18, 18, 18], [36, 36, 36])),
    "revnext": ("blocks", ([1, 2], [2, 4], [4, 8])),
    "revnext_flat": ("layers", ([1, 1, 1], [3, 3, 3], [9, 9, 9])),
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # name and options of each row
    **{name: (name, {}) for name in ("revnet38_cifar", "revnet110_cifar", "revnet164_cifar", "revnet56", "revnet104")},
    **{f"{name} {key}={depth}": (name, {key: depth}) for name, (key, depths) in DEPTHS.items() for depth in depths},
    **{name: (name, {}) for name in ("revnext_revnet", "revvit_s", "revvit_b", "revbifpn_s0", "revbifpn_s3")},
    **{name: (name, {}) for name in ("revbifpn_s6", "revcol_tiny", "revcol_small", "revcol_base")},
}
STRATEGIES = ("plain", "auto", "checkpoint")
GOALS = {
    "resnet50": 0.540,
    "resnet101": 0.530,
    "resnext101": 0.490,
    "wider_resnet38": 0.420,
    "wider_resnet38_a2": 0.440,
    "densenet264": 0.150,
}


def held(name: str, norm: str | None, memory: str, side: int | None = None, batch: int = 4, **options: Any) -> int:
    """Return the bytes held by a step with images of 224 x 224 (32 x 32 for CIFAR), counted without computing."""
    size = side or (32 if ARCHITECTURES[name].input == "cifar" else 224)
    with torch.device("meta"):
        model = zoo.get(name, norm=norm, memory=memory, **NETWORKS.get(name, {}), **options)
        images = torch.empty(batch, 3, size, size)
    return held_bytes(lambda: model(images).sum(), warmup=int(memory == "lean"))


def count_family(row: str) -> dict[str, float]:
    """Return the MB held by a reversible network with stored activations, with lean, and by default."""
    name, options = FAMILIES[row]
    strategies = [memory for memory in ("plain", "lean", "checkpoint", "auto") if memory in ARCHITECTURES[name].memory]
    return {memory: round(held(name, None, memory, **options) / 1e6, 1) for memory in strategies}


def strategies_of(name: str) -> list[str]:
    return [memory for memory in STRATEGIES if memory in ARCHITECTURES[name].memory]


def count(name: str) -> dict[str, float]:
    """Return MB (1e6 bytes) with std-BN, and the ratio to it of each strategy with in-place norms."""
    standard = held(name, "standard", "plain")
    ratios = {memory: round(held(name, "inplace", memory) / standard, 3) for memory in strategies_of(name)}
    return {"standard_mb": round(standard / 1e6, 1), **ratios}


def count_reversible(name: str) -> dict[str, float]:
    """Return the same ratios for a ResNet with in-place norms, and for its RevNet: stored, reversible, and in-place."""
    standard, twin = held(name, "standard", "plain"), REVERSIBLE_TWINS[name]
    ratios = {
        "iABN": held(name, "inplace", "auto"),
        "iABN, checkpoint": held(name, "inplace", "checkpoint"),
        "RevNet, stored": held(twin, "standard", "plain"),
        "RevNet": held(twin, "standard", "auto"),
        "RevNet, iABN": held(twin, "inplace", "auto"),
    }
    return {
        "standard_mb": round(standard / 1e6, 1),
        **{key: round(value / standard, 3) for key, value in ratios.items()},
    }


def generated() -> dict[Path, str]:
    found = {
        FILE: {name: count(name) for name in NETWORKS},
        REVERSIBLE_FILE: {name: count_reversible(name) for name in REVERSIBLE_TWINS},
        FAMILIES_FILE: {row: count_family(row) for row in FAMILIES},
    }
    return {path: json.dumps(content, indent=2) + "\n" for path, content in found.items()}


GOLDEN = json.loads(FILE.read_text()) if FILE.exists() else {}
REVERSIBLE = json.loads(REVERSIBLE_FILE.read_text()) if REVERSIBLE_FILE.exists() else {}


# Counted only on demand: other networks have the same blocks, and tests/layers/test_dense.py counts a DenseNet.
OF_KNOWN_BLOCKS = ("resnet101", "resnext101", "wider_resnet38_a2", "densenet264")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in OF_KNOWN_BLOCKS)) for name in NETWORKS],
)
def test_networks_hold_bytes_of_golden_file(name):
    assert count(name) == GOLDEN[name]


@pytest.mark.parametrize("name", NETWORKS)
def test_in_place_norms_hold_about_half_or_less(name):
    assert GOLDEN[name]["auto"] <= GOALS[name]


# Counting every operation takes long; the networks for small images have the same blocks.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * name.endswith("cifar")) for name in REVERSIBLE_TWINS]
)
def test_reversible_networks_hold_bytes_of_golden_file(name):
    assert count_reversible(name) == REVERSIBLE[name]


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.exhaustive] * (row != "revcol_tiny")) for row in FAMILIES]
)
def test_families_hold_bytes_of_golden_file(row):
    assert count_family(row) == json.loads(FAMILIES_FILE.read_text())[row]


def test_revnet_for_imagenet_holds_eighth_and_less():
    assert REVERSIBLE["resnet101_preact"]["RevNet"] <= 1 / 7.9
    assert REVERSIBLE["resnet101_preact"]["RevNet, iABN"] <= 1 / 7.9


@pytest.mark.parametrize(("name", "most", "of_auto"), [("resnet18", 0.6, 0.75), ("revnet38_cifar", 0.2, 0.9)])
def test_lean_networks_with_standard_norms_hold_about_half_or_less(name, most, of_auto):
    plain, auto, lean = (held(name, "standard", memory, side=64, batch=8) for memory in ("plain", "auto", "lean"))
    assert lean < most * plain
    assert lean < of_auto * auto
