"""The arguments of zoo.get that other packages share: image channels, selected features, stride, dropout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import zoo
from tests.refusals import refused
from zoo.layers import ABN
from zoo.weights import StoredWeights

IMAGE = torch.randn(2, 3, 64, 64)


def test_stem_filters_are_adapted_to_other_numbers_of_channels(tmp_path) -> None:
    source = zoo.get("resnet18", norm="inplace", num_classes=3).eval()
    path = tmp_path / "w.pth"
    torch.save(source.state_dict(), path)
    gray = torch.randn(2, 1, 64, 64)
    with torch.no_grad():
        one = zoo.get("resnet18", norm="inplace", num_classes=3, in_chans=1, weights=path).eval()
        assert torch.allclose(one(gray), source(gray.expand(-1, 3, -1, -1)), atol=1e-4)
        five = zoo.get("resnet18", norm="inplace", num_classes=3, in_chans=5, weights=path).eval()
        assert torch.allclose(five.mod1.conv1.weight[:, 3], source.mod1.conv1.weight[:, 0] * 0.6)
        six = zoo.get("resnet18", norm="inplace", num_classes=3, in_chans=6, weights=path).eval()
        twice = torch.cat([IMAGE, IMAGE], 1)
        assert torch.allclose(six(twice), source(IMAGE), atol=1e-4)
    torch.save(six.state_dict(), path)
    zoo.load_weights(six, path)
    assert torch.allclose(six(twice), source(IMAGE), atol=1e-4)  # no effect: the file has six


@pytest.mark.parametrize(
    ("arch", "options", "module"),
    [("resnet18", {}, "mod1.bn1"), ("resnext50", {"input_3x3": True}, "mod1.conv3"), ("revnet56", {}, "mod1.bn1")],
)
def test_map_before_stem_pool_is_named_by_its_module(arch, options, module) -> None:
    with torch.device("meta"):
        model = zoo.get(arch, features_only=True, out_indices=("stem", 0), norm="inplace", **options)
        whole = zoo.get(arch, features_only=True, norm="inplace", **options)
    assert model.feature_info.reduction() == [2, 4]
    assert model.feature_info.module_name()[0] == module
    assert model.feature_info.get_dicts()[1:] == whole.feature_info.get_dicts()[:1]


@pytest.mark.parametrize(
    ("arch", "arguments", "names"),
    [
        ("resnet18", {"out_indices": [0]}, ["out_indices", "features_only=True"]),
        ("resnet18", {"out_indices": [0, 9], "features_only": True}, ["ResNet", "feature 9", "0 to 4"]),
        ("resnet18", {"pretrained": "yes"}, ["resnet18: pretrained"]),
        ("resnet18", {"features_only": 1}, ["resnet18: features_only"]),
        ("resnet18", {"in_chans": 0}, ["resnet18: in_chans"]),
        ("resnet18", {"in_chans": 10**9}, ["resnet18: in_chans"]),
        ("resnet18", {"out_indices": [None], "features_only": True}, ["resnet18: out_indices"]),
        ("resnet18", {"out_indices": [], "features_only": True}, ["resnet18: out_indices"]),
        ("resnet18", {"output_stride": "8"}, ["resnet18: output_stride"]),
        ("resnet18", {"drop_rate": 1}, ["resnet18: drop_rate"]),
        ("resnet18", {"drop_rate": "0.5"}, ["resnet18: drop_rate"]),
        ("resnet34_ipabn-sync_lr_512", {"drop_rate": 1}, ["resnet34_ipabn-sync_lr_512: drop_rate = 1"]),
        ("timm:resnet18", {"in_chans": 0}, ["timm:resnet18: in_chans = 0"]),
        ("resnet18\n", {"pretrained": "yes"}, [r"resnet18\n: pretrained"]),
        ("resnet18", {"out_indices": [2, 1], "features_only": True}, ["finest first"]),
        ("wider_resnet16", {"out_indices": ["stem"], "features_only": True}, ["feature 'stem'", "0 to 6"]),
        ("resnet18", {"output_stride": 8, "dilation": [1, 1, 2, 4]}, ["output_stride", "dilation"]),
        ("wider_resnet16", {"output_stride": 8}, ["wider_resnet16: output_stride"]),
        ("wider_resnet16_a2", {"output_stride": 64}, ["output_stride = 64", "8, 16, 32"]),
        ("resnet18", {"drop_rate": 0.2, "features_only": True}, ["drop_rate", "ResNet has no classifier"]),
        ("revnext", {"drop_rate": 0.2}, ["drop_rate", "RevNeXt", "average pooling"]),
        (
            "resnext50",
            {"norm": nn.BatchNorm2d},
            ["norm", "BatchNorm2d has no activation", "nn.Sequential(nn.BatchNorm2d"],
        ),
        ("resnet18", {"norm": lambda c: nn.Sequential(nn.BatchNorm2d(c), nn.ReLU())}, ["`activation`"]),
        ("resnet18", {"norm": lambda c: c}, ["norm", "got int"]),
    ],
)
def test_incompatible_options_raise_with_remedy(arch, arguments, names) -> None:
    refused(zoo.ConfigError, lambda: zoo.get(arch, **arguments), *names)


@pytest.mark.parametrize("arch", ["resnet50", "resnext50", "densenet121", "wider_resnet16_a2"])
def test_stride_of_the_last_map_is_option(arch) -> None:
    with torch.device("meta"):
        models = [zoo.get(arch, output_stride=stride, features_only=True) for stride in (8, 16, 32)]
        assert [model(torch.empty(2, 3, 64, 64))[-1].shape[-1] for model in models] == [8, 4, 2]
    assert [model.feature_info.reduction()[-1] for model in models] == [8, 16, 32]


def test_published_weights_may_be_read_at_another_stride(monkeypatch) -> None:
    """Dilation does not change weights, as dense prediction requires."""
    nothing = StoredWeights(Path("weights.pth.tar"), {}, None, {})
    monkeypatch.setattr("zoo.weights.read_weights", lambda name: nothing)
    monkeypatch.setattr("zoo.registry.get.load_state_dict", lambda model, state_dict, source: None)
    with torch.device("meta"):
        model = zoo.get("resnet34_ipabn-sync_lr_512", pretrained=True, features_only=True, output_stride=8)
    assert model.feature_info.reduction() == [4, 4, 8, 8, 8]


def test_dropout_before_classifier_applies_only_in_training() -> None:
    model = zoo.get("resnet18", num_classes=5, drop_rate=0.5)
    plain = zoo.get("resnet18", num_classes=5)
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(IMAGE), plain.eval()(IMAGE))
    model.classifier.train()
    assert not torch.equal(model(IMAGE), model(IMAGE))
    model.reset_classifier(7)
    assert isinstance(model.classifier.drop, nn.Dropout)


def test_norm_function_builds_preactivation_networks() -> None:
    def norm(channels: int) -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU())

    for arch in ("resnext50", "densenet121", "resnet32_cifar"):
        model = zoo.get(arch, norm=norm, num_classes=2)
        model(torch.randn(2, 3, 64, 64)).sum().backward()
    assert isinstance(zoo.get("resnet18", norm=ABN).mod1.bn1, ABN)
