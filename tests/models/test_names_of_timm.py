"""What users of timm and torchvision type works: create_model, is_model, grad checkpointing, torch.hub, features."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torchvision.models.feature_extraction import create_feature_extractor

import zoo
from zoo.architectures import ARCHITECTURES
from zoo.remat.lean import is_lean

ROOT = Path(__file__).parents[2]


def test_create_model_is_get() -> None:
    assert zoo.create_model is zoo.get


def test_names_are_told_from_others() -> None:
    published = zoo.list_pretrained("resnext*")
    assert published == zoo.list_models("resnext*", pretrained=True)
    assert "resnext101_ipabn_lr_512" in published
    assert all(map(zoo.is_model, ["resnet18", *published]))
    assert not any(map(zoo.is_model, ["resnet19", "", "timm:resnet18"]))


@pytest.mark.slow
def test_grad_checkpointing_holds_less_and_gives_the_same_gradients() -> None:
    torch.manual_seed(0)
    model, images = zoo.get("resnet18", num_classes=3).train(), torch.randn(2, 3, 64, 64)

    def step() -> torch.Tensor:
        model.zero_grad()
        return model(images).square().mean()

    def gradients() -> list[torch.Tensor]:
        step().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    def held() -> int:
        return zoo.measure_memory(step, model.parameters()).held

    plain, plain_bytes = gradients(), held()
    model.set_grad_checkpointing()
    assert is_lean(model)
    assert held() < 0.7 * plain_bytes
    assert all(map(torch.equal, gradients(), plain))
    model.set_grad_checkpointing(False)
    assert not is_lean(model)
    assert held() == plain_bytes


@pytest.mark.parametrize("norm", ["standard", "inplace"])
@pytest.mark.parametrize(
    ("arch", "node"),
    [
        ("resnet18", "mod4"),
        ("resnext50", "mod3.block2.bn1"),
        ("densenet121", "mod2"),
        ("revnet38_cifar", "bn_out"),
        ("irevnet_cifar", "bn_out"),
        ("revnext", "classifier.max_pool"),
        ("revnext_resnet18", "classifier.max_pool"),
        ("deeplab_resnet18", "head"),
        ("wider_resnet16_a2", "bn_out"),
    ],
)
def test_torchvision_extracts_features(arch: str, node: str, norm: str) -> None:
    torch.manual_seed(0)
    model, images = zoo.get(arch, norm=norm).eval(), torch.randn(2, 3, 64, 64)
    outputs: dict[str, torch.Tensor] = {}
    module = model.get_submodule(node)
    if node != "classifier.max_pool":  # RevNeXt runs it inside of a chain, which calls no hook
        module.register_forward_hook(lambda module, args, output: outputs.update(node=output.clone()))
    last = "cls" if arch.startswith("deeplab") else "classifier"
    extractor = create_feature_extractor(model, {node: "features", last: "logits"}).eval()
    for buffer in model.buffers():  # the extractor shares the tensors of the model
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    with torch.no_grad():
        logits = model.forward_logits(images) if arch.startswith("deeplab") else model(images)
        found = extractor(images)
    assert torch.allclose(found["logits"], logits, rtol=1e-4, atol=1e-4 * logits.abs().max().item())
    if outputs:
        like = outputs["node"]
        assert torch.allclose(found["features"], like, rtol=1e-4, atol=1e-4 * like.abs().max().item())


def test_features_are_extracted_in_training_too() -> None:
    torch.manual_seed(0)
    model, images = zoo.get("resnet18", num_classes=3).train(), torch.randn(2, 3, 64, 64)
    extractor = create_feature_extractor(model, ["mod5", "classifier"])
    before = model.mod2.block1.convs.bn1.num_batches_tracked.item()
    extractor.train()(images)["classifier"].square().mean().backward()
    assert model.mod2.block1.convs.bn1.num_batches_tracked == before + 1
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.slow
def test_torch_hub_loads_every_network() -> None:
    with torch.device("meta"):
        for name in ARCHITECTURES:
            model = torch.hub.load(str(ROOT), name, source="local", num_classes=3)
            assert model.num_classes == 3
    named = torch.hub.load(str(ROOT), "resnext101_ipabn_lr_512", source="local", features_only=True)
    assert named.feature_info.channels() == zoo.get("resnext101", features_only=True).feature_info.channels()
