"""timm builds the networks of this package by its own registry, and reads their preprocessing as this package does."""

from __future__ import annotations

import sys

import pytest
import torch
from PIL import Image
from torch import nn

import zoo
from tests.refusals import refused
from zoo.config.architectures import ARCHITECTURES
from zoo.config.published import published
from zoo.layers import InPlaceABN


def test_without_timm_error_names_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm.models", None)
    monkeypatch.delitem(sys.modules, "zoo.registry.timm_models", raising=False)
    refused(ImportError, lambda: __import__("zoo.registry.timm_models"), "pip install timm")


@pytest.fixture(scope="module")
def timm():
    module = pytest.importorskip("timm")
    import zoo.registry.timm_models  # noqa: F401

    return module


def test_timm_lists_every_classifier(timm) -> None:
    classifiers = [name for name, facts in ARCHITECTURES.items() if facts.task == "classification"]
    names = {f"zoo_{name}{norm}" for name in classifiers for norm in ("", "_iabn")}
    pretrained = {f"zoo_{name}" for name in published() if not name.endswith("_vistas")}
    assert set(timm.list_models("zoo_*")) == set(timm.list_models(module="timm_models")) == names | pretrained
    assert set(timm.list_pretrained("zoo_*")) == pretrained
    assert timm.is_model("zoo_resnet50_iabn")


@pytest.mark.usefixtures("small_networks")
def test_timm_builds_network_of_name(timm) -> None:
    torch.manual_seed(0)
    model = timm.create_model("zoo_resnet18_iabn", num_classes=3, in_chans=1, drop_rate=0.5).eval()
    torch.manual_seed(0)
    ours = zoo.get("resnet18", norm="inplace", num_classes=3, in_chans=1, drop_rate=0.5).eval()
    images = torch.randn(2, 1, 32, 32)
    assert torch.equal(model(images), ours(images))
    assert isinstance(model.mod1.bn1, InPlaceABN)
    assert isinstance(timm.create_model("zoo_resnet18", num_classes=0, global_pool="").global_pool, nn.Identity)
    backbone = timm.create_model("zoo_resnet18", features_only=True, out_indices=(1, 4)).eval()
    assert [each.shape[1] for each in backbone(torch.randn(1, 3, 32, 32))] == backbone.feature_info.channels()


def test_timm_knows_configuration_of_weights(timm) -> None:
    cfg = timm.get_pretrained_cfg("zoo_resnet34_ipabn-sync_lr_512")
    entry = published()["resnet34_ipabn-sync_lr_512"]
    assert (cfg.url, cfg.num_classes, cfg.crop_pct, cfg.license) == (entry.page, 1000, 0.875, entry.weights.license)
    assert cfg.architecture == "zoo_resnet34_ipabn-sync_lr_512"
    with torch.device("meta"):
        model = timm.create_model("zoo_revnet38_cifar", pretrained_cfg_overlay={"mean": (0.5, 0.5, 0.5)})
        assert (model.pretrained_cfg["mean"], model.pretrained_cfg["input_size"]) == ((0.5,) * 3, (3, 32, 32))
        for error, ending, options, names in (
            (RuntimeError, ".a1_in1k", {}, ["a1_in1k"]),
            (zoo.ConfigError, "", {"cache_dir": "there"}, ["cache_dir = 'there'", "ZOO_CACHE"]),
            (zoo.WeightsError, "", {"pretrained": True}, ["revnet38_cifar"]),
        ):
            refused(error, lambda: timm.create_model(f"zoo_revnet38_cifar{ending}", **options), *names)  # noqa: B023


@pytest.mark.parametrize("name", ["resnet50_ipabn-sync_lr_512", "revnet38_cifar"])
def test_transform_of_timm_equals_zoo(timm, name: str) -> None:
    with torch.device("meta"):
        model = zoo.get(name)
    generator = torch.Generator().manual_seed(0)
    side = 32 if name.endswith("cifar") else 300
    pixels = torch.randint(256, (side, side, 3), dtype=torch.uint8, generator=generator)
    image = Image.fromarray(pixels.numpy())
    config = timm.data.resolve_data_config({}, model=model)
    torch.testing.assert_close(timm.data.create_transform(**config)(image), zoo.transforms(name)(image))
