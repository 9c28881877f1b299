"""torchvision's ResNets compute the same under this package's names, and converting back is exact."""

from __future__ import annotations

import pytest
import torch
import torchvision

import zoo
from tests.convert.networks import IMAGES, outputs, scramble
from tests.refusals import refused
from zoo.config.network import NetworkSpec
from zoo.convert import from_torchvision, to_torchvision
from zoo.convert._torchvision import torchvision_key
from zoo.errors import ConversionError


def relu(arch: str) -> NetworkSpec:
    return NetworkSpec(arch=arch, activation="relu")


def torchvision_resnet(depth: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return scramble(getattr(torchvision.models, f"resnet{depth}")(num_classes=10)).double().eval()


@pytest.mark.parametrize("depth", [18, 34, 50])
def test_outputs_equal_torchvision_and_file_round_trips(depth):
    model, arch = torchvision_resnet(depth), f"resnet{depth}"
    given = {key: value for key, value in model.state_dict().items() if depth != 18 or "num_batches" not in key}
    converted, spec, report = from_torchvision(given, arch if depth == 18 else relu(arch))
    assert spec == relu(arch).changed(num_classes=10, memory="auto")
    assert converted["mod1.bn1.num_batches_tracked"] == 0  # also without counters in the file
    with torch.no_grad():
        expected = model(IMAGES)
    assert torch.allclose(outputs(converted, arch, activation="relu"), expected, rtol=1e-10, atol=1e-12)
    assert report.exact
    back, of_torchvision, _ = to_torchvision(converted, spec)
    assert of_torchvision is None
    assert list(back) == list(model.state_dict())
    assert all(torch.equal(back[key], given[key]) for key in given)


@pytest.mark.parametrize("depth", [101, 152])
def test_keys_of_deep_networks_correspond_one_to_one(depth):
    with torch.device("meta"):
        own = zoo.get(f"resnet{depth}").state_dict()
        other = getattr(torchvision.models, f"resnet{depth}")().state_dict()
    assert {torchvision_key(key): value.shape for key, value in own.items()} == {k: v.shape for k, v in other.items()}
    assert len(own) == len(other)


def test_missing_and_unknown_keys_are_named_and_counted():
    given = torchvision_resnet(18).state_dict()
    given["layer9.conv"] = given.pop("layer1.0.conv1.weight")
    for convert, names in (
        (from_torchvision, ["missing (1): layer1.0.conv1.weight", "unknown (1): layer9.conv"]),
        (to_torchvision, ["missing (102): mod1.conv1.weight", "97 more", "unknown (122)"]),
    ):
        refused(ConversionError, lambda: convert(given, relu("resnet18")), *names)  # noqa: B023
