"""zoo.get and its relatives: names, variants, arguments, weights, preprocessing, errors."""

from __future__ import annotations

import logging

import pytest
import torch
from PIL import Image
from torch import nn

import zoo
from zoo.config.architectures import ARCHITECTURES
from zoo.config.network import NetworkSpec
from zoo.config.published import published
from zoo.layers import ABN, InPlaceABN, InPlaceABNSync
from zoo.layers.checkpointing import CheckpointedSequential
from zoo.registry.get import build_from_config


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


@pytest.mark.usefixtures("meta")
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("resnet18", {"norm": ABN, "activation": "elu"}, "^resnet18: activation: a norm function includes"),
        ("resnet18", {"norm": ABN, "activation_param": 0.1}, "^resnet18: activation_param: a norm function includes"),
        ("resnet18", {"pretrained": True, "weights": "x.pth"}, "two sources of weights"),
        ("resnet18", {"features_only": True, "num_classes": 10}, "^resnet18: num_classes: .*builds no classifier"),
        ("no/such/file.pth", {}, "there is no such file"),
        ("checkpoint.pth.tar", {}, "there is no such file"),
        (".", {}, "this is a folder"),
    ],
)
def test_contradictory_arguments_raise_with_remedy(name, arguments, message):
    with pytest.raises(zoo.ConfigError, match=message):
        zoo.get(name, **arguments)


@pytest.mark.usefixtures("meta")
def test_pretrained_finds_single_variant():
    with pytest.raises(zoo.WeightsError, match="has no published weights"):
        zoo.get("resnet18", pretrained=True)
    with pytest.raises(zoo.WeightsError, match="several published weights, name one of them: resnext101_stdbn_lr_256"):
        zoo.get("resnext101", pretrained=True)
    with pytest.raises(zoo.ConfigError, match="nearest names"):
        zoo.get("densenet", pretrained=True)


@pytest.mark.parametrize(
    "arguments", [{"norm": "standard"}, {"activation": "elu"}, {"activation_param": 0.2}, {"input_3x3": False}]
)
def test_arguments_contradicting_pretrained_weights_raise(arguments):
    (key,) = arguments
    with pytest.raises(zoo.WeightsError, match=f"densenet264_ipabn_lr_256: belongs to another network: {key}="):
        zoo.get("densenet264", pretrained=True, **arguments)


def test_wrong_option_raises_before_weights_are_downloaded(monkeypatch):
    monkeypatch.setattr("zoo.weights.read_weights", lambda name: pytest.fail("the weights were asked for"))
    with pytest.raises(zoo.ConfigError, match="memory"):
        zoo.get("resnext101_stdbn_lr_256", pretrained=True, memory="nonsense")


def test_weights_load_strictly_from_any_path(tmp_path):
    source = zoo.get("resnet18", norm="inplace", num_classes=10)
    torch.save({"state_dict": {f"module.{k}": v for k, v in source.state_dict().items()}}, tmp_path / "w.pth.tar")
    model = zoo.get("resnet18", norm="inplace", num_classes=10, weights=tmp_path / "w.pth.tar")
    for key, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[key], value)
    with pytest.raises(zoo.WeightsError, match="mod2"):
        zoo.get("resnet34", num_classes=10, weights=tmp_path / "w.pth.tar")


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
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "scale": 256,
        "crop": 224,
        "interpolation": "bilinear",
        "crop_mode": "center",
        "input_size": (3, 224, 224),
        "crop_pct": 0.875,
        "source": None,
    }
    assert zoo.get("resnet18", in_chans=1).pretrained_cfg["input_size"] == (1, 224, 224)


@pytest.mark.usefixtures("meta")
def test_impossible_networks_raise_with_json_path():
    with pytest.raises(zoo.ConfigError, match=r"network.arch 'resnet19': unknown .*; the nearest names are resnet18"):
        build_from_config(NetworkSpec(arch="resnet19"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight": None}, r"unexpected keyword argument 'weight' for resnet18.*the nearest argument is 'weights'"),
        ({"input_3x3": True}, r"'input_3x3' for resnet18, whose options are drop_path_rate, dilation, memory"),
    ],
)
def test_unknown_argument_raises_type_error(arguments, message):
    with pytest.raises(TypeError, match=message):
        zoo.get("resnet18", **arguments)


def test_wrong_calls_raise_type_error_and_wrong_values_value_error():
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        zoo.get("resnet50", True)
    with pytest.raises(TypeError, match="PathLike"):
        zoo.get(5)
    with pytest.raises(ValueError, match="resnet50"):
        zoo.get("resnet5O")


def test_published_weights_are_fetched_before_network_is_built(monkeypatch, tmp_path):
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path))
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    monkeypatch.setattr("zoo.registry.get.build_network", lambda *_, **__: pytest.fail("built"))
    with pytest.raises(zoo.WeightsError, match="ZOO_OFFLINE"):
        zoo.get("resnext152", pretrained=True)


def _with_record(model, path, **changes):
    """Write the weights of a network together with its record, as ``zoo convert`` does."""
    record = {**model.built_as.model_dump(mode="json"), **changes}
    torch.save({"state_dict": model.state_dict(), "network": record}, path)
    return path


def test_omitted_options_come_from_weights_file(tmp_path):
    images = {"scale_val": 36, "crop_val": 32, "mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
    source = zoo.get("resnet18", activation="relu", num_classes=7, dilation=[1, 1, 1, 2])
    path = _with_record(source, tmp_path / "relu.pth", preprocessing=images)
    for model in (zoo.get("resnet18", weights=path), zoo.get(path)):
        assert model.mod1.bn1.activation == "relu"
        assert model.classifier.fc.out_features == 7
        assert model.mod5.block2.convs.conv1.dilation == (2, 2)
        assert (model.pretrained_cfg["scale"], model.pretrained_cfg["std"]) == (36, (0.25, 0.25, 0.25))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), source.parameters(), strict=True))


def test_argument_contradicting_weights_file_raises(tmp_path):
    path = _with_record(zoo.get("resnet18", activation="relu", num_classes=7), tmp_path / "relu.pth")
    with pytest.raises(zoo.WeightsError, match=r"relu.pth: .*arch='resnet18' in the file, but arch='resnet34'"):
        zoo.get("resnet34", weights=path)
    with pytest.raises(zoo.WeightsError, match=r"arch='resnet18' in the file, but arch='resnet34'"):
        zoo.get("resnet34_ipabn-sync_lr_512", weights=path)


def test_arguments_without_effect_on_weights_override_file(tmp_path, caplog):
    path = _with_record(zoo.get("resnet18", norm="inplace", num_classes=7, memory="plain"), tmp_path / "w.pth")
    model = zoo.get(path, norm="sync", memory="checkpoint", num_classes=3)
    assert norms_of(model) == {InPlaceABNSync}
    assert isinstance(model.mod2, CheckpointedSequential)
    assert "the classifier has 7 classes and the network 3" in caplog.text
    assert zoo.get(path, features_only=True).feature_info.channels()[-1] == 512


def test_stride_overrides_dilation_of_file(tmp_path):
    source = zoo.get("resnet18", num_classes=2, dilation=[1, 1, 1, 2])
    path = _with_record(source, tmp_path / "w.pth", class_names=["cat", "dog"])
    assert zoo.get(path).pretrained_cfg["label_names"] == ["cat", "dog"]
    assert zoo.get(path, num_classes=2).pretrained_cfg["label_names"] == ["cat", "dog"]
    assert "label_names" not in zoo.get(path, num_classes=1).pretrained_cfg
    assert zoo.get(path, output_stride=8, features_only=True).feature_info.reduction()[-1] == 8


def test_network_and_weights_may_come_from_two_files(tmp_path):
    first = _with_record(zoo.get("resnet18", num_classes=2, activation="elu"), tmp_path / "first.pth")
    second = zoo.get(first)
    torch.nn.init.zeros_(second.classifier.fc.bias)
    torch.save(second.state_dict(), tmp_path / "second.pth")
    model = zoo.get(first, weights=tmp_path / "second.pth")
    assert model.mod1.bn1.activation == "elu"
    assert not model.classifier.fc.bias.any()
    with pytest.raises(zoo.ConfigError, match="two sources of weights"):
        zoo.get(first, pretrained=True)


def test_transforms_by_name_build_no_network(monkeypatch):
    monkeypatch.setattr(nn.Module, "__init__", lambda self, *args, **kwargs: pytest.fail("a module was built"))
    for name in ("resnet50", "resnext101_ipabn_lr_512", "revnet38_cifar"):
        assert zoo.transforms(name) is not None


def test_transforms_of_a_weights_file_are_its_own(tmp_path):
    images = {"scale_val": 36, "crop_val": 32, "mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
    path = _with_record(zoo.get("resnet18", num_classes=2, in_chans=1), tmp_path / "w.pth", preprocessing=images)
    assert zoo.transforms(str(path))(Image.new("RGB", (40, 36))).shape == (3, 32, 32)


def test_pretrained_experiment_without_published_weights_raises():
    with pytest.raises(zoo.WeightsError, match="revnet38_cifar10 has no published weights"):
        zoo.get("revnet38_cifar10", pretrained=True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mobilenet_v3_small", "torchvision:mobilenet_v3_small"),
        ("convnext_large", "torchvision:convnext_large"),
        ("swin_v2", "torchvision:swin_v2_b, torchvision:swin_v2_s, torchvision:swin_v2_t"),
        ("ResNet-18", "nearest names are resnet18"),
        ("mobilenett", "zoo list shows all networks"),
    ],
)
def test_name_of_other_package_is_recognized(name: str, words: str) -> None:
    with pytest.raises(zoo.ConfigError, match=rf"called {name};.*{words}"):
        zoo.get(name)


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
    with pytest.raises(zoo.ConfigError, match=words):
        zoo.get(name)
