"""Networks of other packages are found by name, and errors list the available names."""

from __future__ import annotations

from urllib.error import URLError

import pytest
import torch

from tests.refusals import refused
from zoo.errors import ConfigError
from zoo.models.external import (
    build_external,
    check_logits,
    image_shape,
    iter_tensors,
    smallest_of_each_family,
)


def test_smallest_network_has_fewest_parameters() -> None:
    names = ["torchvision:resnet50", "torchvision:resnet18", "resnet18", "torchvision:vgg11", "torchvision:resnet18"]
    assert smallest_of_each_family(names) == ["torchvision:resnet18", "resnet18", "torchvision:vgg11"]


def test_network_gets_images_of_supported_size() -> None:
    assert image_shape("torchvision:resnet18", 32) == (3, 32, 32)
    assert image_shape("torchvision:inception_v3", 32) == (3, 75, 75)
    assert image_shape("torchvision:inception_v3", 96) == (3, 96, 96)


def test_network_of_timm_gets_its_own_images() -> None:
    pytest.importorskip("timm")
    assert image_shape("timm:vit_tiny_patch16_224", 96) == (3, 224, 224)
    assert image_shape("timm:resnet18", 96) == (3, 96, 96)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("torchvision:resnet19", ["torchvision", "'resnet19'", "resnet18"]),
        ("keras:resnet50", ["'keras'", "timm, torchvision"]),
        ("torchvision:resnet1*", ["'torchvision:resnet1*'", " torchvision:resnet101, "]),
        ("resnet50", ["'resnet50'", "package"]),
    ],
)
def test_unknown_names_raise(name: str, names: list[str]) -> None:
    refused(ConfigError, lambda: build_external(name), *names)


def test_network_is_built_with_its_number_of_classes() -> None:
    model = build_external("torchvision:shufflenet_v2_x0_5", num_classes=7)
    assert model.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 7)
    refused(
        ConfigError,
        lambda: build_external("torchvision:shufflenet_v2_x0_5", num_classes=0),
        "shufflenet_v2_x0_5",
        "classifier",
    )


def test_options_reach_builder_and_unknown_ones_raise() -> None:
    model = build_external("torchvision:resnet18", width_per_group=64, norm_layer=torch.nn.Identity)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules())
    refused(
        ConfigError,
        lambda: build_external("torchvision:resnet18", drop_path_rate=0.1),
        "torchvision:resnet18",
        "'drop_path_rate'",
    )


def test_unavailable_weights_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **options: object) -> None:
        raise URLError("no network")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", offline)
    refused(
        ConfigError,
        lambda: build_external("torchvision:resnet18", pretrained=True),
        "torchvision:resnet18",
        "no network",
    )


@pytest.mark.parametrize("num_classes", [None, 1000, 7])
def test_pretrained_weights_load_except_other_classifier(
    num_classes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = build_external("torchvision:squeezenet1_1").state_dict()
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", lambda *_, **__: weights)
    model = build_external("torchvision:squeezenet1_1", num_classes=num_classes, pretrained=True, dropout=0.25)
    other = {key for key, value in model.state_dict().items() if not torch.equal(value, weights[key])}
    assert other == ({"classifier.1.weight", "classifier.1.bias"} if num_classes == 7 else set())
    assert model.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, num_classes or 1000)
    assert [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)] == [0.25]


@pytest.mark.parametrize(
    ("name", "options", "names"),
    [
        ("torchvision:vit_b_16", {}, ["input.crop_train = 64", "vit_b_16", "64 x 64 px"]),
        ("torchvision:googlenet", {"init_weights": False}, ["GoogLeNetOutputs", '"aux_logits": false']),
        ("torchvision:lraspp_mobilenet_v3_large", {}, ["OrderedDict"]),
    ],
)
def test_networks_without_logits_raise(name: str, options: dict[str, bool], names: list[str]) -> None:
    with torch.device("meta"):
        model = build_external(name, num_classes=3, **options)
    refused(ConfigError, lambda: check_logits(model, name, 3, 64, "input.crop_train"), *names)


def test_networks_with_logits_or_data_dependent_code_pass_check() -> None:
    class Asks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum().item() > 0 else -x

    with torch.device("meta"):
        check_logits(build_external("torchvision:resnet18", num_classes=3), "resnet18", 3, 40, "input.crop_val")
        check_logits(Asks(), "asks", 3, 40, "input.crop_val")


def test_network_of_timm_takes_its_options() -> None:
    pytest.importorskip("timm")
    with torch.device("meta"):
        model = build_external("timm:efficientnet_b0", num_classes=3, drop_path_rate=0.1)
        check_logits(model, "timm:efficientnet_b0", 3, 64, "input.crop_train")
    assert any(type(module).__name__ == "DropPath" for module in model.modules())


def test_tensors_are_found_in_any_output() -> None:
    a, b = torch.zeros(1), torch.zeros(2)
    assert [id(each) for each in iter_tensors({"out": a, "aux": [b, torch.zeros(1, dtype=torch.long), None]})] == [
        id(a),
        id(b),
    ]
