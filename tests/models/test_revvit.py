"""Reversible vision transformers: weights files, initialization, benchmark; test_authors.py has the formulas."""

from __future__ import annotations

import json

import pytest
import torch

import zoo
from tests.nets import differing, small_architectures
from tests.refusals import refused
from zoo.benchmark.depth import PROVIDERS
from zoo.cli import main
from zoo.config.network import Spec


@small_architectures()
def test_weights_file_omits_norm_and_activation(tmp_path):
    spec = Spec(arch="revvit_s", num_classes=5, options={"grid_bits": 12, "drop_path_rate": 0.1})
    stored = spec.model_dump(mode="json")
    assert stored.keys() == {"arch", "num_classes", "memory", "options"}
    model = zoo.get("revvit_s", num_classes=5, drop_path_rate=0.1, grid_bits=12)
    assert model.built_as.model_dump(include=stored.keys()) == stored
    path = tmp_path / "w.pth"
    torch.save({"state_dict": model.state_dict(), "network": stored}, path)
    again = zoo.get(path)
    assert not differing(again.state_dict(), model.state_dict())
    assert again.rev_backbone.layers.grid_bits == 12


def test_initial_weights_equal_authors():
    torch.manual_seed(0)
    model = zoo.get("revvit_s")
    for tensor in (model.pos_embed, model.patch_embed.proj.weight, model.rev_backbone.layers[3].F.attn.v.weight):
        assert tensor.std().item() == pytest.approx(0.02, rel=0.02)
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.bias", "fc1.bias", "proj.bias")) and not name.startswith("patch_embed"):
            assert torch.equal(parameter, torch.full_like(parameter, 0.02)), name
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "name"),
    [({"norm": torch.nn.BatchNorm2d}, "norm"), ({"output_stride": 8}, "output_stride")],
)
def test_unsupported_settings_raise(arguments, name):
    with torch.device("meta"):
        refused(zoo.ConfigError, lambda: zoo.get("revvit_s", **arguments), name)


@pytest.mark.slow
def test_benchmark_measures_memory_against_depth(tmp_path):
    pytest.importorskip("timm")
    command = "benchmark depth --depths 1 3 --batch 1 --threads 1 --out"
    assert main([*command.split(), str(tmp_path / "depth")]) == 0
    records = json.loads((tmp_path / "depth.json").read_text())["records"]
    held = {(r["subject"], r["provider"]): r["median"] for r in records if r["metric"] == "held"}
    assert len(held) == 2 * len(PROVIDERS)
    assert held["1 blocks", "Rev-ViT-S"] == held["3 blocks", "Rev-ViT-S"] < 0.2 * held["1 blocks", "ViT-S"]
