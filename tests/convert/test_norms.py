"""Standard and in-place norms convert into each other exactly, or the error names the norms that do not."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torchvision

import zoo
from tests.convert.networks import IMAGES, outputs, scrambled, spec_of
from tests.refusals import refused
from zoo.config.network import ExternalSpec, NetworkSpec, Spec
from zoo.config.published import published_record
from zoo.convert import inplace_to_standard, relu_to_leaky_relu, standard_to_inplace
from zoo.convert._conversion import source_spec
from zoo.convert._files import convert_file
from zoo.errors import ConfigError, ConversionError, WeightsError, ZooError
from zoo.layers import ABN

pytestmark = pytest.mark.usefixtures("small_networks")

RESNET18 = NetworkSpec(arch="resnet18")
CASES = [
    ("resnet18", {}),
    ("resnext50", {"input_3x3": True}),
    ("densenet121", {"input_3x3": True, "dilation": 2}),
    ("wider_resnet16", {}),
    ("deeplab_resnet18", {"pooling_size": (2, 3)}),
]


def unfoldable(arch: str, **options: object) -> tuple[str, ...]:
    """Return, from the published structure, the norms that do not directly follow a convolution."""
    with torch.device("meta"):
        norms = [name for name, part in zoo.get(arch, **options).named_modules() if isinstance(part, ABN)]
    if arch == "deeplab_resnet18":
        return "head.map_bn", "head.red_bn"
    if arch.startswith("resnet"):
        return ()
    if arch.startswith("densenet"):
        return tuple(n for n in norms if n == "bn_out" or n.startswith("tra") or ".convs1." in n)
    return tuple(n for n in norms if n == "bn_out" or (n.endswith(".bn1") and not n.startswith("mod1.")))


@pytest.mark.parametrize(("arch", "options"), CASES)
def test_negative_scales_fold_into_filters_or_raise_by_name(arch, options):
    names = unfoldable(arch, **options)
    given = scrambled(arch, positive=names, **options)
    before = copy.deepcopy(given)
    converted, spec, report = standard_to_inplace(given, spec_of(arch, **options))
    expected = outputs(given, arch, **options)
    found = outputs(converted, arch, norm="inplace", **options)
    assert (found - expected).abs().max() <= 1e-10 * expected.abs().max()
    assert report.exact
    assert report.max_difference <= 1e-10 * report.max_output
    assert arch != "deeplab_resnet18" or "head.global_pooling_conv" in report.layers
    assert all(torch.equal(given[key], before[key]) for key in given)
    assert list(converted) == list(given)
    assert spec == spec_of(arch, norm="inplace", num_classes=10, **options)
    if names:
        with pytest.raises(ConversionError, match=f"(?s)^{len(names)} of .*allow_approximate=True") as error:
            standard_to_inplace(scrambled(arch, **options), spec_of(arch, **options))
        named = {line.split()[0] for line in str(error.value).splitlines() if "(ABN): " in line}
        assert len(named) == min(10, len(names))
        assert named <= set(names)


def test_training_continues_unchanged():
    given = scrambled("resnet18")
    converted, _, _ = standard_to_inplace(given, RESNET18)
    gradients = []
    for norm, weights in (("standard", given), ("inplace", converted)):
        model = zoo.get("resnet18", num_classes=10, norm=norm).double()
        model.load_state_dict(weights)
        loss = model(IMAGES.clone()).square().sum()
        loss.backward()
        gradients.append((loss.item(), model.mod3.block1.convs.bn2.bias.grad, model.mod3.block1.convs.bn2.running_var))
    assert gradients[0][0] == pytest.approx(gradients[1][0], rel=1e-9)
    assert torch.allclose(gradients[0][1], gradients[1][1], rtol=1e-7, atol=1e-9)
    assert torch.allclose(gradients[0][2], gradients[1][2], rtol=1e-9)


def test_scales_below_eps_raise_unless_approximate():
    given = scrambled("resnet18", positive=True)
    given["mod2.block1.convs.bn2.weight"][:3] = torch.tensor([0.0, 5e-6, -5e-6])
    refused(ConversionError, lambda: standard_to_inplace(given, RESNET18), "mod2.block1.convs.bn2", "3 scales")
    converted, _, report = standard_to_inplace(given, RESNET18, allow_approximate=True)
    assert not report.exact
    assert report.clamped == {"mod2.block1.convs.bn2": 3}
    assert torch.equal(converted["mod2.block1.convs.bn2.weight"][:3], torch.zeros(3, dtype=torch.float64))
    assert 0 < report.max_difference < 1e-3
    given = scrambled("resnext50", positive=unfoldable("resnext50"))
    given["bn_out.weight"][5] = -0.5  # no convolution before it can take the sign
    converted, _, report = standard_to_inplace(given, spec_of("resnext50"), allow_approximate=True)
    assert report.clamped == {"bn_out": 1}
    assert converted["bn_out.weight"][5] == 0


@pytest.mark.parametrize(("arch", "options"), [*CASES[:2], pytest.param(*CASES[4], marks=pytest.mark.slow)])
def test_in_place_scales_of_any_sign_become_standard_scales(arch, options):
    given = scrambled(arch, **options)
    converted, spec, report = inplace_to_standard(given, spec_of(arch, norm="sync", **options))
    assert spec == spec_of(arch, num_classes=10, **options)
    expected = outputs(given, arch, norm="inplace", **options)
    assert torch.allclose(outputs(converted, arch, **options), expected, rtol=1e-9, atol=1e-12)
    assert report.exact
    norms = [key for key in given if key.endswith("running_var")]
    assert {f"{name}.running_var" for name in report.layers} == set(norms)
    back, _, _ = standard_to_inplace(converted, spec)
    assert all(torch.allclose(back[key].abs(), given[key].abs(), rtol=1e-9, atol=1e-12) for key in given)


@pytest.mark.parametrize(
    ("arch", "options"), [("revnext", {"channels": 4}), ("revnext_flat", {"channels": 4, "layers": [1, 1, 1]})]
)
def test_weights_of_invertible_networks_are_of_both_kinds(arch, options):
    given = scrambled(arch, norm="inplace", **options)
    standard, spec, report = inplace_to_standard(given, spec_of(arch, norm="inplace", **options))
    assert (report.exact, report.max_difference, report.layers) == (True, 0, ())
    back, _, _ = standard_to_inplace(standard, spec)
    assert all(torch.equal(given[key], back[key]) for key in given)


def test_leaky_relu_takes_relu_weights_with_a_report():
    given = scrambled("resnet18", activation="relu")
    converted, spec, report = relu_to_leaky_relu(given, spec_of("resnet18", activation="relu"))
    assert (spec.activation, spec.activation_param) == ("leaky_relu", 0.01)
    assert all(torch.equal(converted[key], given[key]) for key in given)
    assert not report.exact
    assert report.max_difference > 1e-3
    assert "mod2.block1.convs.bn2" not in report.layers  # has no activation


# Names in place of descriptions


def test_architecture_name_selects_network_to_convert() -> None:
    given = scrambled("resnet18", activation="relu")
    leaky, target, _ = relu_to_leaky_relu(given, "resnet18")
    assert target.activation == "leaky_relu"
    inplace, target, _ = standard_to_inplace(leaky, "resnet18")
    assert (target.norm, target.activation) == ("inplace", "leaky_relu")
    _, target, report = inplace_to_standard(inplace, "resnet18")
    assert (target.norm, report.arch) == ("standard", "resnet18")


def test_published_name_stands_for_network() -> None:
    name = "resnet34_ipabn-sync_lr_512"
    weights = {"classifier.fc.weight": torch.zeros(7, 512), "classifier.fc.bias": torch.zeros(7)}
    spec = source_spec(weights, name, "inplace-to-standard")
    assert spec == published_record(name).spec.changed(num_classes=7, memory="auto")


def _torchvision():
    return torchvision.models.resnet18(num_classes=2).state_dict()


@pytest.mark.parametrize(
    ("convert", "network", "error", "names"),
    [
        (standard_to_inplace, spec_of("resnet18", norm="sync"), ConversionError, ["norm='standard'", "'sync'"]),
        (inplace_to_standard, spec_of("resnet18"), ConversionError, ["norm='inplace'", "'standard'"]),
        (relu_to_leaky_relu, spec_of("resnet18"), ConversionError, ["activation='relu'", "'leaky_relu'"]),
        *(
            (convert, network, ConversionError, names)
            for convert in (standard_to_inplace, inplace_to_standard, relu_to_leaky_relu)
            for network, names in (
                (ExternalSpec(arch="torchvision:resnet18"), ["torchvision:resnet18"]),
                (Spec(arch="revvit_s"), ["revvit_s", "zoo convert export"]),
            )
        ),
        (relu_to_leaky_relu, "torchvision:resnet50", ConversionError, ["torchvision", "--arch resnet50"]),
        (relu_to_leaky_relu, "torchvision:vgg11", ConversionError, ["zoo convert export"]),
        (relu_to_leaky_relu, "resnet19", ConfigError, ["resnet19", "resnet18"]),
    ],
)
def test_unsupported_network_raises(convert, network, error, names):
    refused(error, lambda: convert({}, network), *names)


def test_state_dict_of_torchvision_is_recognized(tmp_path: Path) -> None:
    refused(WeightsError, lambda: relu_to_leaky_relu(_torchvision(), "resnet18"), "zoo.convert.from_torchvision")
    torch.save(_torchvision(), tmp_path / "tv.pth")
    convert = lambda: convert_file(  # noqa: E731
        "relu-to-leaky-relu", tmp_path / "tv.pth", tmp_path / "out.pth", {"arch": "torchvision:resnet18"}
    )
    assert "\n" not in refused(ConversionError, convert, "--arch resnet18")


def test_misspelled_argument_of_description_names_the_nearest() -> None:
    refused(ZooError, lambda: NetworkSpec(arch="resnet50", actvation="relu"), 'actvation = "relu"', "activation")
    refused(ZooError, lambda: NetworkSpec(zzz=1), "NetworkSpec", "zzz = 1")
