"""Folded networks compute the same without the norms that follow convolutions, and can be exported."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torchvision
from torch import nn

import zoo
from tests.convert.networks import IMAGES, outputs, scramble, scrambled
from tests.convert.test_norms import CASES, unfoldable
from zoo.convert import export, fold, fold_network
from zoo.convert.fold import Activation
from zoo.errors import ConversionError
from zoo.layers import ABN


@pytest.mark.parametrize(
    ("arch", "options", "norm"),
    [*((arch, options, "standard") for arch, options in CASES if arch != "wider_resnet16"),
     ("resnet18", {}, "inplace"), ("resnext50", {"input_3x3": True}, "inplace")],
)  # fmt: skip
def test_outputs_stay_and_the_norms_that_stay_are_listed(arch, options, norm):
    given = scrambled(arch, **options)
    folded, report = fold(given, arch, norm=norm, images=IMAGES, **options)
    model = fold_network(zoo.get(arch, classes=10, norm=norm, **options)).double()
    model.load_state_dict(folded)
    expected = outputs(given, arch, norm=norm, **options)
    with torch.no_grad():
        assert torch.allclose(model(IMAGES.clone()), expected, rtol=1e-9, atol=1e-11)
    names = tuple(name for name, part in model.named_modules() if isinstance(part, ABN))
    assert report.kept == names == unfoldable(arch, **options)
    assert all(type(model.get_submodule(name)) is ABN for name in names)


@pytest.mark.parametrize(("arch", "kept"), [("revnet38_cifar", 18), ("irevnet_revnext", 0), ("revnext", 15)])
def test_reversible_networks_fold_and_norms_that_are_undone_stay(arch, kept):
    given = scramble(zoo.get(arch, norm="inplace").double()).state_dict()
    folded, report = fold(given, arch, norm="inplace", images=IMAGES)
    model = fold_network(zoo.get(arch, norm="inplace")).double()
    model.load_state_dict(folded)
    expected = outputs(given, arch, norm="inplace")
    assert len(report.kept) == kept
    assert len(report.layers) == sum(type(part) is Activation for part in model.modules())
    with torch.no_grad():
        assert torch.allclose(model(IMAGES.clone()), expected, rtol=1e-9, atol=1e-11 * expected.abs().max())


def test_the_network_that_is_folded_is_left_as_it_is():
    model = scramble(zoo.get("resnet18", classes=10, norm="inplace"))
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


def test_a_convolution_with_a_bias_is_folded_into():
    model = scramble(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).double().eval()
    with torch.no_grad():
        assert torch.allclose(fold_network(model)(IMAGES), model(IMAGES), rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11's own loader
def test_an_exported_program_computes_the_same_for_any_number_of_pictures(tmp_path):
    model = fold_network(scramble(zoo.get("resnet18", classes=10)))
    difference = export(model, tmp_path / "net.pt2", size=32)
    assert difference < 1e-4
    program = torch.export.load(tmp_path / "net.pt2").module()
    images = torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(program(images), model(images), rtol=1e-4, atol=1e-5)


def test_other_formats_and_missing_packages_are_named(tmp_path, monkeypatch):
    with pytest.raises(ConversionError, match=r"name the file \.pt2"):
        export(nn.Identity(), tmp_path / "net.pth")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConversionError, match=r'ONNX needs onnx and onnxscript.*pip install "zoo\[onnx\]"'):
        export(nn.Identity(), tmp_path / "net.onnx")


def test_onnx_computes_the_same(tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    model = fold_network(scramble(zoo.get("resnet18", classes=10)))
    assert export(model, tmp_path / "net.onnx", size=32) < 1e-3
