"""convert_norm replaces the norms of any model where that is safe, and otherwise lists them and changes nothing."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import zoo
from tests.convert.networks import IMAGES, scramble
from zoo.errors import ConversionError
from zoo.layers import ABN, InPlaceABN, InPlaceABNSync, convert_norm

KINDS = {"standard": ABN, "inplace": InPlaceABN, "sync": InPlaceABNSync}


def chain(activation: nn.Module) -> nn.Sequential:
    """Two convolutions with norms of both signs; the second norm has no activation."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), activation, nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4))
    return scramble(nn.Sequential(*layers)).double()


class Tail(nn.Module):
    """A convolution and a norm, called by a function of the test."""

    def __init__(self, rest, activation=None):
        super().__init__()
        self.conv, self.bn, self.rest = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), rest
        self.gelu = nn.GELU()
        self.act = activation if activation is not None else nn.LeakyReLU(0.1)

    def forward(self, x):
        return self.rest(self, self.conv(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", [nn.LeakyReLU(0.2), nn.LeakyReLU(0.2, inplace=True), nn.ELU(0.7)])
@pytest.mark.parametrize("training", [True, False])
def test_outputs_gradients_and_statistics_stay(kind, activation, training):
    model = chain(copy.deepcopy(activation)).train(training)
    twin = copy.deepcopy(model)
    weights = list(twin.parameters())
    assert convert_norm(twin, kind) is twin
    assert [type(part) for part in twin] == [nn.Conv2d, KINDS[kind], nn.Identity, nn.Conv2d, KINDS[kind]]
    assert all(a is b for a, b in zip(twin.parameters(), weights, strict=True))
    expected, found = model(IMAGES), twin(IMAGES.clone())
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-11)
    expected.square().sum().backward()
    found.square().sum().backward()
    assert torch.allclose(twin[1].bias.grad, model[1].bias.grad, rtol=1e-7, atol=1e-8)
    assert torch.allclose(twin[1].running_var, model[1].running_var, rtol=1e-9)
    assert twin[1].training == training


def test_relu_goes_into_the_standard_norm_only():
    model = chain(nn.ReLU())
    twin = convert_norm(copy.deepcopy(model), "standard")
    assert twin[1].activation == "relu"
    assert torch.allclose(twin(IMAGES), model(IMAGES), rtol=1e-10, atol=1e-12)
    with pytest.raises(ConversionError, match=r"1 \(BatchNorm2d\): its activation 2 \(ReLU\) has no in-place form"):
        convert_norm(model, "inplace")


UNSAFE = {
    "another reader of its input": (lambda m, y: m.act(m.bn(y)) + y, r"the output of 3\.conv, is also read by add"),
    "a producer that keeps its output": (lambda m, y: m.act(m.bn(torch.sigmoid(y))), r"comes from sigmoid"),
    "a view": (lambda m, y: m.act(m.bn(y[:, :, 1:])), r"comes from getitem"),
    "a functional activation": (
        lambda m, y: F.leaky_relu(m.bn(y), 0.1),
        r"leaky_relu is a function, which no module owns",
    ),
    "an activation that is used again": (
        lambda m, y: m.act(m.act(m.bn(y)) * 2),
        r"3\.act \(LeakyReLU\) is called 2 times",
    ),
    "an activation without in-place form": (lambda m, y: m.gelu(m.bn(y)), r"3\.gelu \(GELU\) has no in-place form"),
    "an output that is overwritten": (lambda m, y: m.act(m.bn(y)).add_(1), r"is overwritten by add_"),
    "two calls": (lambda m, y: m.bn(m.conv(m.bn(y)[:, :3])), r"calls it 2 times"),
    "no call": (lambda m, y: y, r"calls it 0 times"),
}
ADVICE = {
    "another reader of its input": "let the others read the norm's output",
    "a functional activation": r"call a module \(nn\.LeakyReLU or nn\.ELU\) instead of the function",
    "an activation that is used again": "give each norm an activation module of its own",
    "an activation without in-place form": r"nn\.LeakyReLU or nn\.ELU in its place, and train again",
    "an output that is overwritten": r"write x = x \+ y for x \+= y",
    "two calls": "a norm of its own for each call",
}


@pytest.mark.parametrize("case", UNSAFE)
def test_unsafe_neighbours_are_refused_by_name_and_nothing_is_converted(case):
    rest, message = UNSAFE[case]
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.LeakyReLU(), Tail(rest))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ConversionError, match=f"3.bn.*{message}"):
        convert_norm(model, "inplace")
    assert [type(part) for part in model.modules()].count(nn.BatchNorm2d) == 2
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("case", ADVICE)
def test_every_cause_comes_with_what_to_do_about_it_and_with_no_other_advice(case):
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.LeakyReLU(), Tail(UNSAFE[case][0]))
    with pytest.raises(ConversionError, match=ADVICE[case]) as error:
        convert_norm(model, "inplace")
    assert str(error.value).count("\n- ") == 1


def test_a_long_list_of_norms_is_cut_and_the_advice_counts_them_all():
    model = torchvision.models.resnet50()
    with pytest.raises(ConversionError) as error:
        convert_norm(model, "inplace")
    lines = str(error.value).splitlines()
    assert len([line for line in lines if "(BatchNorm2d): " in line]) == 10
    assert "  and 39 more" in lines
    counts = [int(line.rpartition("(")[2].partition(" ")[0]) for line in lines if line.startswith("- ")]
    assert sum(counts) == 49  # all but those of the shortcuts


def test_names_from_outside_cannot_forge_lines_of_the_message():
    model = nn.Sequential()
    model.add_module("conv", nn.Conv2d(3, 4, 3))
    model.add_module("evil\n\x1b[31m", nn.BatchNorm2d(4))
    model.add_module("relu", nn.ReLU())
    with pytest.raises(ConversionError) as error:
        convert_norm(model, "inplace")
    assert r"evil\n\x1b[31m (BatchNorm2d)" in str(error.value)


OTHER_NORMS = {
    "SyncBatchNorm": (nn.SyncBatchNorm(4), 'before nn.SyncBatchNorm.convert_sync_batchnorm, and to "sync"'),
    "BatchNorm1d": (nn.BatchNorm1d(4), "BatchNorm2d"),
    "BatchNorm3d": (nn.BatchNorm3d(4), "BatchNorm2d"),
    "Linear": (nn.Linear(2, 2), "BatchNorm2d"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OTHER_NORMS)
def test_a_model_without_norms_to_convert_is_refused_and_its_other_norms_are_named(name, kind):
    other, hint = OTHER_NORMS[name]
    with pytest.raises(ConversionError, match="Sequential has no norm to convert") as error:
        convert_norm(nn.Sequential(nn.Conv2d(3, 4, 3), other), kind)
    assert (f"1 ({name})" in str(error.value)) == (name != "Linear")
    assert hint in str(error.value)


def test_norms_that_are_left_beside_converted_ones_are_named_in_the_log(caplog):
    model = chain(nn.LeakyReLU()).append(nn.Flatten()).append(nn.BatchNorm1d(4))
    with caplog.at_level(logging.WARNING, "zoo"):
        convert_norm(model, "inplace")
    assert isinstance(model[1], InPlaceABN)
    assert type(model[-1]) is nn.BatchNorm1d
    assert "left as they are: 6 (BatchNorm1d)" in caplog.text


def test_an_output_overwritten_by_a_sum_is_refused_because_backward_would_fail():
    model = torchvision.models.resnet18()
    with pytest.raises(ConversionError) as error:
        convert_norm(model, "inplace")
    assert "layer1.0.bn2 (BatchNorm2d): its output, which backward needs, is overwritten by iadd" in str(error.value)
    assert "bn1 (BatchNorm2d): its activation relu (ReLU) has no in-place form" in str(error.value)


def test_torchvision_networks_become_standard_norms_with_shared_activations_left_alone():
    model = scramble(torchvision.models.resnet18(num_classes=10)).double().eval()
    twin = convert_norm(copy.deepcopy(model), "standard")
    assert (twin.bn1.activation, twin.layer1[0].bn1.activation) == ("relu", "identity")
    assert torch.allclose(twin(IMAGES), model(IMAGES), rtol=1e-10, atol=1e-12)
    twin.train()(IMAGES).sum().backward()


@pytest.mark.parametrize("arch", ["resnet18", "resnext50", "densenet121"])
def test_networks_of_this_package_turn_both_ways_with_the_same_gradients(arch):
    torch.manual_seed(0)
    model = scramble(zoo.get(arch, classes=3), positive=True).double()
    built = zoo.get(arch, classes=3, norm="inplace")
    twin = convert_norm(copy.deepcopy(model), "inplace")
    for (name, part), other in zip(twin.named_modules(), built.modules(), strict=True):
        assert type(part) is type(other)
        assert part.inplace <= other.inplace if isinstance(part, InPlaceABN) else True, name
    back = convert_norm(copy.deepcopy(twin), "standard")
    for net in (model, twin, back):
        net(IMAGES.clone()).square().sum().backward()
    for other in (twin, back):
        for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
            assert (p.grad - q.grad).norm() <= 1e-6 * p.grad.norm() + 1e-12, name


def test_scales_that_cannot_be_represented_are_refused_or_become_eps():
    model = chain(nn.LeakyReLU())
    with torch.no_grad():
        model[1].weight[0] = 0
    with pytest.raises(ConversionError, match=r"1 \(BatchNorm2d\): 1 scales with \|scale\| < eps = 1e-05"):
        convert_norm(model, "inplace")
    twin = convert_norm(copy.deepcopy(model), "inplace", allow_approximate=True)
    assert twin[1].weight[0] == 0
    assert torch.allclose(twin(IMAGES.clone()), model(IMAGES), atol=1e-3)


def test_norms_of_the_kind_asked_for_stay_as_they_are():
    model = zoo.get("resnet18", norm="inplace")
    norm = model.mod1.bn1
    assert convert_norm(model, "inplace").mod1.bn1 is norm
    with pytest.raises(ConversionError, match="'batch' is not one of standard, inplace, sync"):
        convert_norm(model, "batch")


def test_models_that_cannot_be_traced_are_refused():
    model = Tail(lambda m, y: m.bn(y) if y.sum() > 0 else y)
    with pytest.raises(ConversionError, match="Tail cannot be traced"):
        convert_norm(model, "inplace")
