"""Names of timm and torchvision work: create_model, is_model, grad checkpointing, torch.hub, features."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.refusals import refused
from zoo.config.architectures import ARCHITECTURES
from zoo.convert import to_torchvision
from zoo.memory.allocations import measure_memory
from zoo.remat._lean import is_lean

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forward", "forward_features", "forward_intermediates"])
def test_grad_checkpointing_holds_less_and_gives_the_same_gradients(method: str) -> None:
    torch.manual_seed(0)
    model, images = zoo.get("resnet18", num_classes=3).train(), torch.randn(2, 3, 64, 64)

    def step() -> torch.Tensor:
        model.zero_grad()
        output = model(images) if method == "forward" else getattr(model, method)(images)
        return (output[0] if isinstance(output, tuple) else output).square().mean()

    def gradients() -> list[torch.Tensor]:
        step().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    def held() -> int:
        return measure_memory(step, model.parameters()).held

    plain, plain_bytes = gradients(), held()
    model.set_grad_checkpointing()
    assert is_lean(model)
    assert held() < 0.7 * plain_bytes
    assert all(map(torch.equal, gradients(), plain))
    model.set_grad_checkpointing(False)
    assert not is_lean(model)
    assert held() == plain_bytes


def test_intermediates_of_resnet_equal_timm() -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model, images = zoo.get("resnet18", activation="relu", num_classes=3).eval(), torch.randn(2, 3, 64, 64)
    tensors, _, _ = to_torchvision(model.state_dict(), model.built_as)
    theirs = timm.create_model("resnet18", num_classes=3).eval()
    theirs.load_state_dict(tensors)
    with torch.no_grad():
        first = model.forward_intermediates(images, ["stem"], intermediates_only=True)
        assert torch.equal(first[0], theirs.forward_intermediates(images, [0], intermediates_only=True)[0])
        for arguments in ({"indices": 4}, {"norm": True, "indices": 2}, {"indices": [3, -4], "stop_early": True}):
            ours = model.forward_intermediates(images, **arguments)
            torch.testing.assert_close(ours, theirs.forward_intermediates(images, **arguments))


def test_nonexistent_intermediates_are_named() -> None:
    model, images = zoo.get("resnet18", num_classes=0), torch.randn(1, 3, 32, 32)
    for indices, names in [
        ([5], ["indices", "feature 5", "0 to 4, -5 to -1 and 'stem'"]),
        ([], ["indices", "none"]),
        (6, ["indices = 6", "5 stages"]),
        (0, ["indices = 0", "5 stages"]),
    ]:
        refused(zoo.ConfigError, partial(model.forward_intermediates, images, indices), *names)
    refused(
        zoo.ConfigError, lambda: model.forward_intermediates(images, output_fmt="NLC"), "output_fmt", "'NCHW'", "'NLC'"
    )


def _layers_of(model: Any, coarse: bool = False) -> dict[str, int]:
    """Return the number of the layer of each parameter, as timm counts for a layer decay."""
    group = pytest.importorskip("timm.models").group_parameters
    layers: dict[str, int] = group(model, model.group_matcher(coarse=coarse), reverse=True)
    return layers


def _on_meta(arch: str) -> Any:
    with torch.device("meta"):
        return zoo.get(arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_layers_go_from_stem_to_head(arch: str) -> None:
    model = _on_meta(arch)
    layers = _layers_of(model)
    layers = {name: layers[name] for name, _ in model.named_parameters()}
    assert set(layers.values()) == set(range(max(layers.values()) + 1))
    # The published state dict of a dense module has first all first, then all second convolutions of its layers.
    in_order = [number for name, number in layers.items() if ".convs3." not in name]
    assert in_order == sorted(in_order)
    assert all(layers[name] == layers[name.replace("convs3", "convs1")] for name in layers if ".convs3." in name)
    head = {name for name, number in layers.items() if number == in_order[-1]}
    assert head == {name for name in layers if name.startswith(("classifier.", "head.", "cls."))}


@pytest.mark.parametrize(
    ("arch", "stages", "blocks"),
    [
        ("resnet50", 5, 1 + 16),
        ("wider_resnet16", 7, 1 + 6),
        ("densenet121", 5, 1 + 58 + 3),
        ("revnet38_cifar", 4, 1 + 9),
        ("irevnet_cifar", 3, 54),
        ("irevnet_revnext", 1, 1 + 7),
        ("revnext", 3, 1 + 1 + 1 + 2),
        ("revnext_flat", 3, 3),
        ("revnext_revnet", 5, 1 + 16),
        ("deeplab_resnet18", 5, 1 + 8),
    ],
)
def test_layer_is_block_and_coarsely_stage(arch: str, stages: int, blocks: int) -> None:
    model = _on_meta(arch)
    fine, coarse = _layers_of(model), _layers_of(model, coarse=True)
    assert max(fine.values()) == blocks  # plus the head
    assert max(coarse.values()) == stages
    pairs = sorted({(fine[name], coarse[name]) for name in fine})
    assert len(pairs) == blocks + 1  # each layer belongs to one stage
    in_order = [stage for _, stage in pairs]
    assert in_order == sorted(in_order)


@pytest.mark.slow
def test_torch_hub_loads_network_of_every_family() -> None:
    with torch.device("meta"):
        for name in {record.family: name for name, record in ARCHITECTURES.items()}.values():
            model = torch.hub.load(str(ROOT), name, source="local", num_classes=3)
            assert model.num_classes == 3
    named = torch.hub.load(str(ROOT), "resnext101_ipabn_lr_512", source="local", features_only=True)
    assert named.feature_info.channels() == zoo.get("resnext101", features_only=True).feature_info.channels()
