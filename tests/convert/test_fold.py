"""Folded networks compute the same without the norms that follow convolutions, and can be exported."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
import torch
import torchvision
from torch import nn

import zoo
from tests.convert.networks import IMAGES, outputs, scramble, scrambled, spec_of
from tests.convert.test_norms import CASES, unfoldable
from zoo.convert import export, fold, fold_network
from zoo.convert.export import _outputs
from zoo.convert.fold import Activation
from zoo.errors import ConversionError, VerificationError
from zoo.layers import ABN


@pytest.mark.parametrize(
    ("arch", "options", "norm"),
    [*((arch, options, "standard") for arch, options in CASES),
     ("resnet18", {}, "inplace"), ("resnext50", {"input_3x3": True}, "inplace")],
)  # fmt: skip
def test_outputs_stay_and_the_norms_that_stay_are_listed(arch, options, norm):
    given = scrambled(arch, **options)
    folded, spec, report = fold(given, spec_of(arch, norm=norm, **options), images=IMAGES)
    assert spec == spec_of(arch, norm=norm, num_classes=10, folded=True, **options)
    model = fold_network(zoo.get(arch, num_classes=10, norm=norm, **options)).double()
    model.load_state_dict(folded)
    expected = outputs(given, arch, norm=norm, **options)
    with torch.no_grad():
        assert torch.allclose(model(IMAGES.clone()), expected, rtol=1e-9, atol=1e-11)
    names = tuple(name for name, part in model.named_modules() if isinstance(part, ABN))
    assert report.kept == names == unfoldable(arch, **options)
    assert all(type(model.get_submodule(name)) is ABN for name in names)


@pytest.mark.parametrize(
    ("arch", "options", "kept"),
    [("revnet38_cifar", {}, 18), ("irevnet_revnext", {"blocks": (1, 1)}, 0), ("revnext", {}, 15)],
)
def test_reversible_networks_fold_and_norms_that_are_undone_stay(arch, options, kept):
    given = scramble(zoo.get(arch, norm="inplace", **options).double()).state_dict()
    folded, _, report = fold(given, spec_of(arch, norm="inplace", **options), images=IMAGES)
    model = fold_network(zoo.get(arch, norm="inplace", **options)).double()
    model.load_state_dict(folded)
    expected = outputs(given, arch, norm="inplace", **options)
    assert len(report.kept) == kept
    assert len(report.layers) == sum(type(part) is Activation for part in model.modules())
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


METADATA = {"arch": "resnet18", "input": {"mean": [0.5, 0.25], "size": 32}, "classes": ["a", "ü"]}


@pytest.mark.slow
def test_an_onnx_file_has_the_usual_names_and_carries_metadata(tmp_path, capfd):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    model = fold_network(scramble(zoo.get("resnet18", num_classes=2)))
    export(model, tmp_path / "net.onnx", 32, metadata=METADATA)
    written = onnx.load(tmp_path / "net.onnx")
    assert [value.name for value in written.graph.input] == ["input"]
    assert [value.name for value in written.graph.output] == ["logits"]
    for value in (*written.graph.input, *written.graph.output):
        assert value.type.tensor_type.shape.dim[0].dim_param == "batch"
    assert {item.key: json.loads(item.value) for item in written.metadata_props} == {"metadata": METADATA}
    assert capfd.readouterr() == ("", "")


def test_metadata_that_json_cannot_hold_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConversionError, match=r"metadata .* not JSON: Object of type object"):
        export(nn.Identity(), tmp_path / "net.pt2", metadata={"size": object()})
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("ending", ["pt2", "onnx"])
def test_a_feature_network_is_exported_with_an_output_for_each_stage(ending, tmp_path):
    if ending == "onnx":
        pytest.importorskip("onnxscript")
    model = fold_network(scramble(zoo.get("resnet18", features_only=True)))
    path = tmp_path / f"net.{ending}"
    assert export(model, path, 64) < 1e-3
    images = torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        expected = model(images)
    if ending == "pt2":
        found = torch.export.load(path).module()(images)
    else:
        session = pytest.importorskip("onnx.reference").ReferenceEvaluator(str(path))
        assert session.output_names == [f"stage{stage}" for stage in range(1, len(expected) + 1)]
        found = map(torch.from_numpy, session.run(None, {"input": images.numpy()}))
    for ours, truth in zip(found, expected, strict=True):
        assert torch.allclose(ours, truth, rtol=1e-3, atol=1e-4)


def test_in_place_norms_are_refused_in_onnx_because_no_other_program_has_them(tmp_path):
    pytest.importorskip("onnxscript")
    with pytest.raises(ConversionError, match=r'ResNet has in-place norms.*convert_norm\(model, "standard"\)'):
        export(zoo.get("resnet18", num_classes=2, norm="inplace"), tmp_path / "net.onnx", 32)


def test_outputs_that_differ_leave_the_old_file(tmp_path, monkeypatch):
    (tmp_path / "net.pt2").write_text("old")
    monkeypatch.setattr(sys.modules["zoo.convert.export"], "TOLERANCE", -1.0)
    with pytest.raises(VerificationError, match="differ"):
        export(nn.Sequential(nn.Flatten(), nn.Linear(48, 2)), tmp_path / "net.pt2", 4)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_network_of_other_outputs_is_refused(tmp_path):
    class Pair(nn.Module):
        def forward(self, x):
            return {"logits": x}

    with pytest.raises(ConversionError, match=r"Pair returns a dict.*a tensor or a list of tensors"):
        export(Pair(), tmp_path / "net.pt2", 8)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11's own loader
def test_an_exported_program_computes_the_same_for_any_number_of_images(tmp_path):
    model = fold_network(scramble(zoo.get("resnet18", num_classes=10)))
    difference = export(model, tmp_path / "net.pt2", size=32)
    assert difference < 1e-4
    program = torch.export.load(tmp_path / "net.pt2").module()
    images = torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(program(images), model(images), rtol=1e-4, atol=1e-5)


def test_other_formats_and_missing_packages_are_named(tmp_path, monkeypatch):
    with pytest.raises(ConversionError, match=r"use the suffix \.pt2"):
        export(nn.Identity(), tmp_path / "net.pth")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConversionError, match=r'ONNX needs onnx and onnxscript.*pip install "\.\[onnx\]"'):
        export(nn.Identity(), tmp_path / "net.onnx")


@pytest.mark.parametrize(("num_classes", "name"), [(3, "logits"), (0, "features")])
def test_an_exported_output_is_called_by_what_it_is(num_classes: int, name: str) -> None:
    outputs, names = _outputs(zoo.get("resnet18", num_classes=num_classes).eval(), torch.randn(2, 3, 32, 32))
    assert (outputs[0].dim(), names) == (2, [name])
