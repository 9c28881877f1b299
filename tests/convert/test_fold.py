"""Folded networks compute the same without the norms that follow convolutions, and can be exported."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

import zoo
from tests.convert.networks import IMAGES, outputs, scramble, scrambled
from tests.convert.test_norms import CASES, unfoldable
from zoo.convert import fold_network
from zoo.layers import ABN


@pytest.mark.parametrize(
    ("arch", "options", "norm"),
    [*((arch, options, "standard") for arch, options in CASES),
     ("resnet18", {}, "inplace"), ("resnext50", {"input_3x3": True}, "inplace")],
)  # fmt: skip
def test_outputs_stay_and_the_norms_that_stay_are_listed(arch, options, norm):
    given = scrambled(arch, **options)
    model = zoo.get(arch, num_classes=10, norm=norm, **options).double()
    model.load_state_dict(given)
    model = fold_network(model)
    expected = outputs(given, arch, norm=norm, **options)
    with torch.no_grad():
        assert torch.allclose(model(IMAGES.clone()), expected, rtol=1e-9, atol=1e-11)
    names = tuple(name for name, part in model.named_modules() if isinstance(part, ABN))
    assert names == unfoldable(arch, **options)
    assert all(type(model.get_submodule(name)) is ABN for name in names)


@pytest.mark.parametrize(
    ("arch", "options", "kept"),
    [("revnet38_cifar", {}, 18), ("irevnet_revnext", {"blocks": (1, 1)}, 0), ("revnext", {}, 15)],
)
def test_reversible_networks_fold_and_norms_that_are_undone_stay(arch, options, kept):
    network = scramble(zoo.get(arch, norm="inplace", **options).double())
    model = fold_network(network)
    expected = outputs(network.state_dict(), arch, norm="inplace", **options)
    assert sum(isinstance(part, ABN) for part in model.modules()) == kept
    with torch.no_grad():
        assert torch.allclose(model(IMAGES.clone()), expected, rtol=1e-9, atol=1e-11 * expected.abs().max())


def test_the_network_that_is_folded_is_left_as_it_is():
    model = scramble(zoo.get("resnet18", num_classes=10, norm="inplace"))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fold_network(model)
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_torchvision_networks_fold_too():
    model = scramble(torchvision.models.resnet18(num_classes=10)).double().eval()
    folded = fold_network(model)
    assert not any(isinstance(part, nn.BatchNorm2d) for part in folded.modules())
    with torch.no_grad():
        assert torch.allclose(folded(IMAGES), model(IMAGES), rtol=1e-9, atol=1e-11)


def test_a_convolution_that_feeds_a_second_reader_is_not_folded_into():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x):
            y = self.conv(x)
            return self.bn(y) + y

    model = scramble(Two()).double().eval()
    folded = fold_network(model)
    assert isinstance(folded.bn, nn.BatchNorm2d)
    with torch.no_grad():
        assert torch.equal(folded(IMAGES), model(IMAGES))
