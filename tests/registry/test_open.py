"""A name stands for a network, its weights and its experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zoo
from tests.refusals import refused
from tests.weights.files import save_described
from zoo.config.network import ExternalSpec, NetworkSpec, Spec
from zoo.registry.open import find_network, open_network

pytestmark = pytest.mark.usefixtures("small_networks")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Weights of a ResNet-18 with three classes, which describe it."""
    model = zoo.get("resnet18", norm="inplace", num_classes=3)
    return save_described(model, tmp_path / "w.pth", class_names=["a", "b", "c"])


@pytest.mark.parametrize(
    ("name", "section", "arch", "is_experiment"),
    [
        ("resnet18", NetworkSpec, "resnet18", False),
        ("revvit_s", Spec, "revvit_s", False),
        ("timm:resnet18", ExternalSpec, "timm:resnet18", False),
        ("resnet50_ipabn-sync_lr_512", NetworkSpec, "resnet50", True),
        ("imagenet_revcol_tiny", Spec, "revcol_tiny", True),
        ("imagenet_convnext_tiny.json", ExternalSpec, "timm:convnext_tiny", True),
    ],
)
def test_name_stands_for_network_of_its_kind(name: str, section: type[Spec], arch: str, is_experiment: bool) -> None:
    for opened in (find_network(name), open_network(name, {})):
        assert (type(opened.spec), opened.spec.arch) == (section, arch)
        assert opened.is_experiment is (opened.experiment is not None) is is_experiment
        assert opened.weights is None  # published weights are not read


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"norm": "inplace", "num_classes": 3}),
        ({"norm": "sync", "activation": None}, {"norm": "sync", "num_classes": 3}),
        ({"num_classes": 2, "output_stride": 8}, {"num_classes": 2, "options": {"dilation": [1, 1, 2, 4]}}),
    ],
)
def test_arguments_change_settings_of_file(file: Path, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    for opened in (open_network(file, changes), open_network("resnet18", changes, weights=file)):
        assert opened.spec.model_dump(include=expected.keys()) == expected
        assert opened.weights is not None
        assert opened.network.class_names == (["a", "b", "c"] if opened.spec.num_classes == 3 else None)


def test_unknown_argument_raises_before_weights_are_read() -> None:
    refused(TypeError, lambda: open_network("resnet18", {"nrom": 1}, weights="missing.pth"), "'nrom'", "resnet18")
