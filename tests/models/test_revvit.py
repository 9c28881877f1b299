"""Reversible vision transformers follow the authors' formulas and state dict, bit-identical to stored activations."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
from tests.formula import relative_error
from tests.nets import STRUCTURES, build, differing, images, small_architectures
from tests.refusals import refused
from zoo.benchmark.depth import PROVIDERS
from zoo.cli import main
from zoo.config.network import Spec
from zoo.config.optimizer import Optimizer
from zoo.engine.optim import build_optimizer
from zoo.memory.allocations import measure_memory


def reference(weights: dict[str, Tensor], x: Tensor, heads: int) -> Tensor:
    """Return the logits, from tensors with the authors' names, by the formulas of section 3 of the paper."""
    embedding = weights["patch_embed.proj.weight"]
    number, _, patch, _ = embedding.shape
    patches = x.unfold(2, patch, patch).unfold(3, patch, patch)  # (N, 3, rows, columns, patch, patch)
    tokens = torch.einsum("nchwij,dcij->nhwd", patches, embedding) + weights["patch_embed.proj.bias"]
    first = second = tokens.reshape(len(x), -1, number) + weights["pos_embed"]

    def linear(name: str, t: Tensor) -> Tensor:
        return t @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def normalized(name: str, t: Tensor) -> Tensor:
        centered = t - t.mean(-1, keepdim=True)
        scale = (centered.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return centered * scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def attention(name: str, t: Tensor) -> Tensor:
        parts = []
        q, k, v = (linear(f"{name}.{each}", t).chunk(heads, -1) for each in "qkv")
        for head in range(heads):
            similarity = torch.einsum("nic,njc->nij", q[head], k[head]) / math.sqrt(number / heads)
            shares = similarity.exp() / similarity.exp().sum(-1, keepdim=True)
            parts.append(torch.einsum("nij,njc->nic", shares, v[head]))
        return linear(f"{name}.proj", torch.cat(parts, -1))

    depth = 1 + max(int(key.split(".")[2]) for key in weights if key.startswith("rev_backbone.layers."))
    for index in range(depth):
        block = f"rev_backbone.layers.{index}"
        first = first + attention(f"{block}.F.attn", normalized(f"{block}.F.norm", second))
        hidden = linear(f"{block}.G.mlp.fc1", normalized(f"{block}.G.norm", first))
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        second = second + linear(f"{block}.G.mlp.fc2", hidden)
    fused = normalized("norm", torch.cat((first, second), -1)).mean(1)
    return linear("head.projection", fused)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("memory", ["auto", "plain", "lean"])
def test_outputs_and_gradients_follow_authors_formulas(memory, layout):
    model = build("revvit_s", noise=0.3, memory="plain" if memory == "plain" else "auto").double()
    zoo.lean(model, enabled=memory == "lean")
    x = images(dtype=torch.float64).requires_grad_()
    expected = reference(dict(model.named_parameters()), x, STRUCTURES["revvit_s"]["heads"])
    actual = model(x.contiguous(memory_format=layout))
    assert relative_error(actual, expected) < 1e-12
    inputs = [x, *model.parameters()]
    found, truth = (torch.autograd.grad(y.cos().sum(), inputs) for y in (actual, expected))
    for ours, theirs in zip(found, truth, strict=True):  # absolute for the biases of keys, whose gradients are 0
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "width", "parameters"), [("revvit_s", 384, 22_434_664), ("revvit_b", 768, 87_335_656)]
)
def test_state_dict_has_keys_of_authors_files(name, width, parameters):
    """Their page gives 22 and 87 million parameters; names and shapes follow from their modules and settings."""
    with torch.device("meta"):
        model = zoo.get(name)
    shapes = {"pos_embed": (1, 196, width), "patch_embed.proj.weight": (width, 3, 16, 16)}
    shapes |= {"patch_embed.proj.bias": (width,)}
    vectors, matrices = ("F.norm.weight", "F.norm.bias", "G.norm.weight", "G.norm.bias"), ("q", "k", "v", "proj")
    for index in range(12):
        block = dict.fromkeys(vectors, (width,))
        for matrix in matrices:
            block |= {f"F.attn.{matrix}.weight": (width, width), f"F.attn.{matrix}.bias": (width,)}
        block |= {"G.mlp.fc1.weight": (4 * width, width), "G.mlp.fc1.bias": (4 * width,)}
        block |= {"G.mlp.fc2.weight": (width, 4 * width), "G.mlp.fc2.bias": (width,)}
        shapes |= {f"rev_backbone.layers.{index}.{key}": shape for key, shape in block.items()}
    shapes |= {"norm.weight": (2 * width,), "norm.bias": (2 * width,)}
    shapes |= {"head.projection.weight": (1000, 2 * width), "head.projection.bias": (1000,)}
    assert {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()} == shapes
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.slow
def test_checkpoint_of_authors_is_loaded_strictly(tmp_path, caplog):
    source = zoo.get("revvit_s").eval()
    path = tmp_path / "REV_VIT_S.pyth"
    torch.save({"epoch": 299, "model_state": source.state_dict(), "optimizer_state": {}, "cfg": "TRAIN: {}"}, path)
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(zoo.get("revvit_s", weights=path).eval()(x), source(x))
        headless = zoo.get("revvit_s", weights=path, num_classes=0).eval()
        assert torch.equal(headless(x), source.forward_head(source.forward_features(x), pre_logits=True))
    assert "assuming" not in caplog.text
    assert zoo.load_weights(zoo.get("revvit_s", num_classes=7), path).classifier == "kept"
    state = source.state_dict()
    state["rev_backbone.layers.0.F.attn.qkv.weight"] = state.pop("rev_backbone.layers.0.F.attn.q.weight")
    torch.save({"model_state": state}, path)
    refused(zoo.WeightsError, lambda: zoo.get("revvit_s", weights=path), "missing in the file (1)", "attn.q.weight")


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


def test_features_are_fused_streams_before_last_norm():
    model, whole = build("revvit_s", noise=0.3, features_only=True).eval(), build("revvit_s", noise=0.3).eval()
    whole.load_state_dict(model.state_dict(), strict=False)
    assert model.feature_info.get_dicts() == [{"num_chs": 32, "reduction": 4, "module": "rev_backbone"}]
    x = images()
    (features,) = model(x)
    assert features.is_contiguous(memory_format=torch.channels_last)
    normed = F.layer_norm(features.permute(0, 2, 3, 1), (32,), whole.norm.weight, whole.norm.bias, 1e-6)
    assert torch.allclose(whole.forward_features(x), normed.permute(0, 3, 1, 2), atol=1e-5)
    whole.set_drop_rate(0.5)
    assert not torch.equal(whole.train()(x), whole(x))


def test_registry_offers_features_and_other_channels():
    model = zoo.get("revvit_s", features_only=True, in_chans=1, out_indices=(-1,))
    assert not hasattr(model, "head")
    assert not any(parameter.requires_grad for parameter in model.norm.parameters())
    (features,) = model.eval()(torch.randn(1, 1, 224, 224))
    assert features.shape == (1, 768, 14, 14)


def test_drop_rates_rise_to_the_last_block():
    model = build("revvit_s", noise=0.3, drop_path_rate=0.4)
    blocks = model.rev_backbone.layers
    assert [(b.F.drop_path, b.G.drop_path) for b in blocks] == [(0.0, 0.0), (0.2, 0.2), (0.4, 0.4)]
    x = images()
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), build("revvit_s", noise=0.3).eval()(x))
    branch, maps = blocks[2].train().F, torch.randn(64, 16, 4, 4)
    kept = branch(maps).flatten(1).any(1)
    torch.testing.assert_close(branch(maps) * 0, maps * 0)
    assert 20 < int(kept.sum()) < 58
    branch.drop_path = 0.0
    whole = branch(maps)
    branch.drop_path, _ = 0.4, torch.manual_seed(5)
    dropped = branch(maps)
    assert all(not ours.any() or torch.allclose(ours, true / 0.6) for ours, true in zip(dropped, whole, strict=True))


def test_held_bytes_do_not_grow_with_depth():
    def held(depth: int, **options: Any) -> int:
        model, x = build("revvit_s", structure={"structure": (depth,)}, **options), images()
        return measure_memory(lambda: model(x).mean(), model.parameters()).held

    assert held(2) == held(24) < 0.03 * held(24, memory="plain")
    assert held(24, grid_bits=14) < 1.2 * held(24) + 24 * 100  # digests


def test_classifier_has_its_own_learning_rate():
    model = build("revvit_s")
    optimizer = build_optimizer(model, Optimizer(learning_rate=1.0, classifier_lr=0.1))
    slow = {id(p) for group in optimizer.param_groups if group["lr"] == 0.1 for p in group["params"]}
    assert slow == {id(parameter) for parameter in model.head.parameters()}


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


def test_images_of_another_size_raise():
    refused(zoo.ConfigError, lambda: build("revvit_s")(torch.randn(1, 3, 20, 32)), "20 x 32 pixels", "32 x 32")


@pytest.mark.slow
def test_benchmark_measures_memory_against_depth(tmp_path):
    pytest.importorskip("timm")
    command = "benchmark depth --depths 1 3 --batch 1 --threads 1 --out"
    assert main([*command.split(), str(tmp_path / "depth")]) == 0
    records = json.loads((tmp_path / "depth.json").read_text())["records"]
    held = {(r["subject"], r["provider"]): r["median"] for r in records if r["metric"] == "held"}
    assert len(held) == 2 * len(PROVIDERS)
    assert held["1 blocks", "Rev-ViT-S"] == held["3 blocks", "Rev-ViT-S"] < 0.2 * held["1 blocks", "ViT-S"]
