"""`zoo.get` and related functions: names, variants, arguments, weights, preprocessing, errors."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import zoo
from tests.nets import differing
from tests.refusals import refused
from tests.weights.files import save_described
from zoo.config.architectures import ARCHITECTURES
from zoo.config.network import NetworkSpec
from zoo.config.published import published
from zoo.layers import ABN, InPlaceABN, InPlaceABNSync
from zoo.layers.checkpointing import CheckpointedSequential
from zoo.registry.get import build_from_config

pytestmark = pytest.mark.usefixtures("small_networks")


def norms_of(model):
    return {type(m) for m in model.modules() if isinstance(m, ABN)}


@pytest.fixture
def meta():
    with torch.device("meta"):
        yield


def test_names_are_listed_in_natural_order():
    names = zoo.list_models()
    assert set(names) == set(ARCHITECTURES) | set(published())
    resnets = zoo.list_models("resnet*")
    assert resnets.index("resnet34") < resnets.index("resnet34_ipabn-sync_lr_512") < resnets.index("resnet101")
    assert len(zoo.list_models(pretrained=True)) == 17
    assert zoo.list_models("densenet*", pretrained=True) == ["densenet264_ipabn_lr_256"]


@pytest.mark.usefixtures("meta")
def test_arguments_override_published_variant():
    model = zoo.get("resnext101_ipabn_lr_512")
    assert norms_of(model) == {InPlaceABN}
    assert sum(p.numel() for p in model.parameters()) == 42_902_312  # the 3x3 stem
    assert norms_of(zoo.get("resnext101_ipabn-sync_lr_256")) == {InPlaceABNSync}
    changed = zoo.get("resnext101_ipabn_lr_512", norm="standard", input_3x3=False, num_classes=5, activation="relu")
    assert norms_of(changed) == {ABN}
    assert changed.classifier.fc.out_features == 5
    assert not hasattr(changed.mod1, "conv2")
    assert changed.bn_out.activation == "relu"


PREPROCESSING = {"scale_val": 36, "crop_val": 32, "mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
FILE = "there is no such file"
PUBLISHED = "densenet264_ipabn_lr_256"
#: The arguments of a call -> the error, and what its message names.
REFUSALS: list[tuple[str, dict[str, Any], type[Exception], tuple[str, ...]]] = [
    ("resnet18", {"norm": ABN, "activation": "elu"}, zoo.ConfigError, ("resnet18: activation", "norm function")),
    ("resnet18", {"norm": ABN, "activation_param": 0.1}, zoo.ConfigError, ("resnet18: activation_param",)),
    ("resnet18", {"pretrained": True, "weights": "x.pth"}, zoo.ConfigError, ("pretrained", "weights")),
    ("resnet18", {"features_only": True, "num_classes": 10}, zoo.ConfigError, ("resnet18: num_classes",)),
    ("resnet18", {"weight": None}, TypeError, ("'weight'", "resnet18", "'weights'")),
    ("resnet18", {"input_3x3": True}, TypeError, ("'input_3x3'", "resnet18", "drop_path_rate, dilation, memory")),
    ("no/such/file.pth", {}, zoo.ConfigError, (FILE,)),
    ("checkpoint.pth.tar", {}, zoo.ConfigError, (FILE,)),
    (".", {}, zoo.ConfigError, ("folder",)),
    ("resnet5O", {}, ValueError, ("resnet50",)),
    ("resnet18", {"pretrained": True}, zoo.WeightsError, ("resnet18", "no published weights")),
    ("resnext101", {"pretrained": True}, zoo.WeightsError, ("resnext101_stdbn_lr_256", "resnext101_ipabn_lr_512")),
    ("revnet38_cifar10", {"pretrained": True}, zoo.WeightsError, ("revnet38_cifar10",)),
    ("densenet", {"pretrained": True}, zoo.ConfigError, ("densenet264",)),
    *(
        ("densenet264", {"pretrained": True, key: value}, zoo.WeightsError, (PUBLISHED, f"{key}="))
        for key, value in {"norm": "standard", "activation": "elu", "activation_param": 0.2, "input_3x3": False}.items()
    ),
    # names of networks of other packages
    ("mobilenet_v3_small", {}, zoo.ConfigError, ("called mobilenet_v3_small", "torchvision:mobilenet_v3_small")),
    ("convnext_large", {}, zoo.ConfigError, ("torchvision:convnext_large",)),
    ("swin_v2", {}, zoo.ConfigError, ("torchvision:swin_v2_b, torchvision:swin_v2_s, torchvision:swin_v2_t",)),
    ("ResNet-18", {}, zoo.ConfigError, ("resnet18",)),
    ("mobilenett", {}, zoo.ConfigError, ("zoo list",)),
]


@pytest.mark.usefixtures("meta")
@pytest.mark.parametrize(("name", "arguments", "error", "names"), REFUSALS)
def test_wrong_calls_raise_with_remedy(name, arguments, error, names):
    refused(error, lambda: zoo.get(name, **arguments), *names)


def test_other_wrong_calls_raise(monkeypatch):
    refused(TypeError, lambda: zoo.get("resnet50", True), "positional")
    refused(TypeError, lambda: zoo.get(5), "PathLike")
    network = NetworkSpec(arch="resnet19")
    refused(zoo.ConfigError, lambda: build_from_config(network), "network.arch 'resnet19'", "resnet18")
    monkeypatch.setattr("zoo.weights.read_weights", lambda name: pytest.fail("the weights were asked for"))
    refused(zoo.ConfigError, lambda: zoo.get("resnext101_stdbn_lr_256", pretrained=True, memory="nonsense"), "memory")


def test_weights_load_strictly_from_any_path(tmp_path):
    source = zoo.get("resnet18", norm="inplace", num_classes=10)
    torch.save({"state_dict": {f"module.{k}": v for k, v in source.state_dict().items()}}, tmp_path / "w.pth.tar")
    model = zoo.get("resnet18", norm="inplace", num_classes=10, weights=tmp_path / "w.pth.tar")
    assert differing(model.state_dict(), source.state_dict()) == []
    refused(zoo.WeightsError, lambda: zoo.get("resnet34", num_classes=10, weights=tmp_path / "w.pth.tar"), "mod2")


def test_standard_norms_read_negative_scales_with_their_sign(tmp_path):
    """As the in-place networks of December 2017 were trained."""
    source = zoo.get("resnet18", norm="standard", num_classes=4).eval()
    with torch.no_grad():
        source.mod3.block1.convs.bn1.weight.neg_()
    torch.save(source.state_dict(), tmp_path / "w.pth")
    x = torch.randn(2, 3, 64, 64)
    signed = zoo.get("resnet18", num_classes=4, weights=tmp_path / "w.pth", norm="standard").eval()
    absolute = zoo.get("resnet18", num_classes=4, weights=tmp_path / "w.pth", norm="inplace").eval()
    with torch.no_grad():
        assert torch.equal(signed(x), source(x))
        assert not torch.allclose(absolute(x.clone()), source(x), atol=1e-3)


def test_classifier_without_bias_is_loaded_or_kept_like_others(tmp_path, caplog):
    source = zoo.get("revnext_flat")
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    same = zoo.get("revnext_flat", weights=tmp_path / "weights.pth")
    assert torch.equal(same.classifier.fc.weight, source.classifier.fc.weight)
    with caplog.at_level(logging.WARNING):
        other = zoo.get("revnext_flat", num_classes=100, weights=tmp_path / "weights.pth")
    assert "the classifier has 10 classes and the network 100" in caplog.text
    assert torch.equal(other.level2[1].f.weight, source.level2[1].f.weight)


def test_cifar_networks_have_its_classes_and_preprocessing():
    model = zoo.get("resnet32_cifar")
    assert model.classifier.fc.out_features == 10
    assert zoo.get("revnet38_cifar", num_classes=100).classifier.fc.out_features == 100
    assert (model.pretrained_cfg["scale"], model.pretrained_cfg["crop"]) == (-1, 32)
    assert zoo.transforms("revnext")(Image.new("RGB", (32, 32))).shape == (3, 32, 32)


def test_pretrained_cfg_holds_published_preprocessing():
    cfg = zoo.get("resnet18", num_classes=2).pretrained_cfg
    assert cfg == {
        "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "scale": 256, "crop": 224, "source": None,
        "interpolation": "bilinear", "crop_mode": "center", "input_size": (3, 224, 224), "crop_pct": 0.875,
    }  # fmt: skip
    assert zoo.get("resnet18", in_chans=1).pretrained_cfg["input_size"] == (1, 224, 224)


def test_published_weights_are_fetched_before_network_is_built(monkeypatch, tmp_path):
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path))
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    monkeypatch.setattr("zoo.registry.get.build_network", lambda *_, **__: pytest.fail("built"))
    refused(zoo.WeightsError, lambda: zoo.get("resnext152", pretrained=True), "ZOO_OFFLINE")


def test_omitted_options_come_from_weights_file(tmp_path):
    source = zoo.get("resnet18", activation="relu", num_classes=7, dilation=[1, 1, 1, 2])
    path = save_described(source, tmp_path / "relu.pth", preprocessing=PREPROCESSING)
    for model in (zoo.get("resnet18", weights=path), zoo.get(path)):
        assert model.mod1.bn1.activation == "relu"
        assert model.classifier.fc.out_features == 7
        assert model.mod5.block1.convs.conv2.dilation == (2, 2)
        assert (model.pretrained_cfg["scale"], model.pretrained_cfg["std"]) == (36, (0.25, 0.25, 0.25))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), source.parameters(), strict=True))
    assert zoo.transforms(str(path))(Image.new("RGB", (40, 36))).shape == (3, 32, 32)


def test_arguments_without_effect_on_weights_override_file(tmp_path, caplog):
    path = save_described(zoo.get("resnet18", norm="inplace", num_classes=7, memory="plain"), tmp_path / "w.pth")
    model = zoo.get(path, norm="sync", memory="checkpoint", num_classes=3)
    assert norms_of(model) == {InPlaceABNSync}
    assert isinstance(model.mod2, CheckpointedSequential)
    assert "the classifier has 7 classes and the network 3" in caplog.text
    assert zoo.get(path, features_only=True).feature_info.channels()[-1] == 512


def test_stride_overrides_dilation_of_file(tmp_path):
    source = zoo.get("resnet18", num_classes=2, dilation=[1, 1, 1, 2])
    path = save_described(source, tmp_path / "w.pth", class_names=["cat", "dog"])
    assert zoo.get(path).pretrained_cfg["label_names"] == ["cat", "dog"]
    assert zoo.get(path, num_classes=2).pretrained_cfg["label_names"] == ["cat", "dog"]
    assert "label_names" not in zoo.get(path, num_classes=1).pretrained_cfg
    assert zoo.get(path, output_stride=8, features_only=True).feature_info.reduction()[-1] == 8


def test_network_and_weights_may_come_from_two_files(tmp_path):
    first = save_described(zoo.get("resnet18", num_classes=2, activation="elu"), tmp_path / "first.pth")
    second = zoo.get(first)
    torch.nn.init.zeros_(second.classifier.fc.bias)
    torch.save(second.state_dict(), tmp_path / "second.pth")
    model = zoo.get(first, weights=tmp_path / "second.pth")
    assert model.mod1.bn1.activation == "elu"
    assert not model.classifier.fc.bias.any()
    refused(zoo.ConfigError, lambda: zoo.get(first, pretrained=True), "weights", "pretrained")


def test_transforms_by_name_build_no_network(monkeypatch):
    monkeypatch.setattr(nn.Module, "__init__", lambda self, *args, **kwargs: pytest.fail("a module was built"))
    for name in ("resnet50", "resnext101_ipabn_lr_512", "revnet38_cifar"):
        assert zoo.transforms(name) is not None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mobilenet_v3_small", "timm:mobilenetv3_small_100"),
        ("efficientnet_b0", "timm:efficientnet_b0, torchvision:efficientnet_b0"),
        ("vit_base_patch16_224", "timm:vit_base_patch16_224"),
    ],
)
def test_name_of_timm_is_recognized(name: str, words: str) -> None:
    pytest.importorskip("timm")
    refused(zoo.ConfigError, lambda: zoo.get(name), words)
