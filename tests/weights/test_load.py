"""Weights load completely or not at all, and every difference is reported."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

import zoo
from tests.nets import differing
from tests.refusals import refused
from tests.weights.files import save_described
from zoo import load_weights
from zoo.config.network import NetworkSpec
from zoo.convert import from_torchvision
from zoo.errors import ConversionError, WeightsError
from zoo.layers.norm import ABN, InPlaceABN, InPlaceABNSync
from zoo.weights import LoadReport, load_state_dict

pytestmark = pytest.mark.usefixtures("small_networks")


class Net(nn.Module):
    """A network with the key grammar of the zoo and random values everywhere."""

    def __init__(self, num_classes: int = 5, norm: type[ABN] = InPlaceABN, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, bias=False)
        self.bn1 = norm(width)
        self.bn_out = norm(width)
        if num_classes:
            self.classifier = nn.Sequential(OrderedDict(fc=nn.Linear(width, num_classes)))
        with torch.no_grad():
            for tensor in self.state_dict().values():
                tensor.copy_(tensor + 1 + torch.rand(tensor.shape) if tensor.is_floating_point() else torch.tensor(9))


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in model.state_dict().items()}


def load(model: nn.Module, state_dict: dict[str, Tensor]) -> LoadReport:
    return load_state_dict(model, state_dict, source="w.pth")


def refusal_of(model: nn.Module, state_dict: dict[str, Tensor]) -> str:
    """Return the message of the error, after checking that the model was left as it was."""
    before = values_of(model)
    with pytest.raises(WeightsError) as caught:
        load(model, state_dict)
    after = model.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)
    return str(caught.value)


def assert_loaded(model: nn.Module, state_dict: dict[str, Tensor], without: str = "nothing") -> None:
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, state_dict[key]) is not key.startswith(without), key


def test_fitting_file_is_loaded_bit_for_bit_and_reported(tmp_path: Path) -> None:
    written = Net().state_dict()
    torch.save({"state_dict": {f"module.{key}": tensor for key, tensor in written.items()}}, tmp_path / "w.pth")
    model = Net()
    report = load_weights(model, tmp_path / "w.pth")
    assert_loaded(model, written)
    assert report == LoadReport(str(tmp_path / "w.pth"), len(written), "loaded")
    assert str(report) == f"{len(written)} tensors loaded from {tmp_path / 'w.pth'}"


def test_every_difference_is_named_by_kind_and_nothing_is_loaded() -> None:
    written = Net().state_dict()
    del written["bn1.weight"], written["bn_out.running_var"]
    written["conv1.weight"] = torch.ones(4, 3, 7, 7)
    written["bn1.bias"] = torch.ones(4, dtype=torch.int64)
    written |= {"conv9.weight": torch.ones(1), "fc.weight": torch.ones(1)}
    assert refusal_of(Net(), written).splitlines()[:-1] == [
        "w.pth: does not fit Net, which was not changed:",
        "  missing in the file (2): bn1.weight, bn_out.running_var",
        "  unknown to the network (2): conv9.weight, fc.weight",
        "  of another shape (1): conv1.weight: (4, 3, 7, 7) in the file, (4, 3, 3, 3) in the network",
        "  of an incompatible dtype (1): bn1.bias: torch.int64 in the file, torch.float32 in the network",
    ]


def test_half_precision_weights_without_counters_are_completed() -> None:
    written = {key: tensor.half() for key, tensor in Net().state_dict().items() if "num_batches" not in key}
    model = Net()
    assert load(model, written).num_loaded == len(written)
    assert model.conv1.weight.dtype == torch.float32
    assert torch.equal(model.conv1.weight, written["conv1.weight"].float())
    assert model.bn1.num_batches_tracked.item() == model.bn_out.num_batches_tracked.item() == 0


def test_headless_network_drops_classifier_with_notice(caplog: pytest.LogCaptureFixture) -> None:
    written, model = Net().state_dict(), Net(num_classes=0)
    with caplog.at_level(logging.INFO, logger="zoo"):
        report = load(model, written)
    assert_loaded(model, written)
    assert (report.classifier, report.num_loaded) == ("dropped", len(written) - 2)
    assert "w.pth: the classifier was not loaded" in caplog.text


def test_classifier_with_other_classes_is_kept_with_warning(caplog: pytest.LogCaptureFixture) -> None:
    written, model = Net(num_classes=7).state_dict(), Net(num_classes=5)
    before = values_of(model)
    report = load(model, written)
    assert torch.equal(model.classifier.fc.weight, before["classifier.fc.weight"])
    assert torch.equal(model.classifier.fc.bias, before["classifier.fc.bias"])
    assert torch.equal(model.conv1.weight, written["conv1.weight"])
    assert (report.classifier, report.num_loaded) == ("kept", len(written) - 2)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("zoo", "WARNING")
    assert "7 classes and the network 5" in caplog.text


W, B = "classifier.fc.weight", "classifier.fc.bias"
#: Functions that return tensors of other shapes for a classifier, or that no network supports.
MISFITS: list[Callable[[], dict[str, Tensor]]] = [
    lambda: {W: torch.ones(7, 3), B: torch.ones(7)},
    lambda: {W: torch.ones(7, 4)},
    lambda: {B: torch.ones(7)},
    lambda: {W: torch.ones(7, 4, 1, 1), B: torch.ones(7)},
    lambda: {W: torch.ones(7, 4), B: torch.ones(7), "classifier.x": torch.ones(1)},
    lambda: {"conv1.weight": torch.eye(4).to_sparse()},
    lambda: {"conv1.weight": torch.ones(4, 4, device="meta")},
    lambda: {"conv1.weight": torch.zeros(4, 4, dtype=torch.float8_e4m3fn)},
    lambda: {"conv1.weight": torch.nested.nested_tensor([torch.ones(4)] * 4, layout=torch.strided)},
]


@pytest.mark.filterwarnings("ignore")  # raised by torch about prototypes
@pytest.mark.parametrize("make", MISFITS)
def test_misfit_is_named_and_nothing_is_loaded(make: Callable[[], dict[str, Tensor]]) -> None:
    change = make()
    message = refusal_of(Net(), Net().state_dict() | change)
    assert all(key in message for key in change)
    assert "conv1.weight" not in change or "tensors that no network supports (1): conv1.weight (torch." in message


@pytest.mark.parametrize("norm", [InPlaceABN, InPlaceABNSync])
def test_negative_scales_of_in_place_norms_are_counted_with_hint(norm: Any, caplog: pytest.LogCaptureFixture) -> None:
    written = Net(norm=norm).state_dict()
    written["bn_out.weight"][:3] = torch.tensor([-1.0, -0.0, -1e-30])
    load(Net(norm=norm), written)
    assert "w.pth: in-place norms have 2 negative scales" in caplog.text
    assert "norm='standard' for those" in caplog.text


def test_torchvision_files_raise_with_conversion_command() -> None:
    with torch.device("meta"):
        source = torchvision.models.resnet50()
    written = {key: torch.zeros(()).expand(tensor.shape) for key, tensor in source.state_dict().items()}
    assert "`zoo convert from-torchvision SOURCE TARGET --arch NAME`" in refusal_of(Net(), written)
    spec = NetworkSpec(arch="resnet34", activation="relu")
    assert len(refused(ConversionError, lambda: from_torchvision(written, spec), "resnet34", " more")) < 1500


def test_prefix_of_module_around_network_is_named() -> None:
    model = zoo.get("resnet18", num_classes=2)
    wrapped = {f"model.{key}": tensor for key, tensor in model.state_dict().items()}
    refused(WeightsError, lambda: load_state_dict(model, wrapped, source="lightning.ckpt"), "'model.'")


@pytest.mark.parametrize("arch", ["irevnet_cifar", "revbifpn_s0", "pyramid_revbifpn_s0"])
def test_described_file_loads_if_no_convolution_reads_the_image(arch: str, tmp_path: Path) -> None:
    """Their first convolution reads windows of the image, so the file does not show the number of image channels."""
    network = zoo.get(arch, num_classes=3)
    loaded = zoo.get(save_described(network, tmp_path / "w.pth"))
    assert differing(loaded.state_dict(), network.state_dict()) == []
    refused(zoo.ConfigError, lambda: zoo.get(arch, in_chans=1), "in_chans")
