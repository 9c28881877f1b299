"""The option ``memory`` of the networks: same gradients, fewer bytes, and which networks have which."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import nn

import zoo
from tests.formula import relative_error
from tests.held import held_bytes
from tests.step import step
from zoo.config.architectures import ARCHITECTURES, LEAN
from zoo.convert.trace import Trace
from zoo.layers import ABN, init_weights, norm_act
from zoo.models import wider_resnet
from zoo.models.resnet import ResNet
from zoo.models.resnext import ResNeXt
from zoo.models.wider_resnet import WiderResNet, WiderResNetA2
from zoo.remat.lean import StepsAside, is_lean

SMALL = {
    "resnet": [
        functools.partial(ResNet, structure=(2, 1, 1, 1), bottleneck=True, dilation=1),
    ],
    "resnext": [functools.partial(ResNeXt, structure=(2, 2, 1, 1), input_3x3=True, dilation=1)],
    "wider_resnet": [
        functools.partial(WiderResNet, structure=(2, 2, 1, 1, 1, 1)),
        functools.partial(WiderResNetA2, structure=(1, 1, 2, 1, 1, 1), dilation=False),
    ],
}
THIN = ((4, 4), (4, 8), (8, 8), (8, 16), (4, 8, 16), (4, 8, 24))  # the channels of a WiderResNet for these tests
CASES = [
    (family, index, memory)
    for family, builders in SMALL.items()
    for index in range(len(builders))
    for memory in ARCHITECTURES[f"{family}50" if family != "wider_resnet" else "wider_resnet16"].memory
    if memory not in ("plain", LEAN)  # no family builds a network for lean: `build_network` makes any of them lean
]


def build(family, index, memory, norm="inplace", **options) -> nn.Module:
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wider_resnet, "CHANNELS", THIN)
        network = SMALL[family][index](norm_act(norm), 5, memory=memory, **options).double()
    init_weights(network)
    return network


@functools.cache
def plain_step(family, index, training, features_only):
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    network = build(family, index, "plain", features_only=features_only)
    return x, step(network.train(training), x)


@pytest.mark.parametrize(("training", "features_only"), [(True, False), (False, True)])
@pytest.mark.parametrize(("family", "index", "memory"), CASES)
def test_every_strategy_equals_plain(family, index, memory, training, features_only):
    x, expected = plain_step(family, index, training, features_only)
    network = build(family, index, memory, features_only=features_only)
    actual = step(network.train(training), x)
    assert len(actual) == len(expected)
    assert max(map(relative_error, actual, expected)) < 1e-10
    norms = [module for module in network.modules() if isinstance(module, ABN)]
    assert {int(norm.num_batches_tracked) for norm in norms if norm is not getattr(network, "bn_out", None)} == {
        int(training)
    }


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        ("resnet18", "plain"),
        ("densenet121", "plain"),
        ("revnet38_cifar", "auto"),  # which computes activations again, in other bits than it had
        ("deeplab_resnet18", "plain"),
    ],
)
def test_step_of_lean_network_is_bit_identical(name, twin):
    """The maps are large enough for recipes: tensors below 64 KiB are kept."""
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(2))

    def results(memory):
        torch.manual_seed(0)
        network = zoo.get(name, norm="standard", activation="relu", memory=memory)
        assert is_lean(network) == (memory == LEAN)
        return step(network, x)

    assert all(map(torch.equal, results(LEAN), results(twin)))


@functools.cache
def bytes_of(name, norm, memory) -> int:
    with torch.device("meta"):
        network = zoo.get(name, norm=norm, memory=memory)
        x = torch.empty(2, 3, 64, 64)
    return held_bytes(lambda: network(x).sum(), warmup=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most", "of_auto"),
    [("resnet18", 0.6, 0.75), ("revnet38_cifar", 0.2, 0.9)],
)
def test_standard_norms_hold_about_half_or_less_in_lean_networks(name, most, of_auto):
    plain, auto, lean = (bytes_of(name, "standard", memory) for memory in ("plain", "auto", LEAN))
    assert lean < most * plain
    assert lean < of_auto * auto


def test_every_network_can_be_lean_as_backbones_can():
    one_of_each_family = {record.family: name for name, record in ARCHITECTURES.items()}
    assert all(LEAN in record.memory for record in ARCHITECTURES.values())
    with torch.device("meta"):
        assert all(is_lean(zoo.get(arch, memory=LEAN)) for arch in one_of_each_family.values())
        assert is_lean(zoo.get("resnet18", memory=LEAN, features_only=True))


def test_memory_options_change_no_keys():
    with torch.device("meta"):
        for family, index, memory in CASES:
            assert list(build(family, index, "plain").state_dict()) == list(build(family, index, memory).state_dict())


def test_every_family_names_its_strategies_in_error_for_another():
    with torch.device("meta"):
        for arch in ARCHITECTURES:
            with pytest.raises(zoo.ConfigError, match=r"memory = \"none\": should be 'auto', 'plain'.* or 'lean'"):
                zoo.get(arch, norm="inplace", memory="none")


@pytest.mark.parametrize(("family", "index", "memory"), CASES)
def test_every_strategy_can_be_traced(family, index, memory):
    with torch.device("meta"):
        plain, other = (build(family, index, value) for value in ("plain", memory))
    norms = [name for name, module in plain.named_modules() if isinstance(module, ABN)]
    expected, trace = Trace(plain), Trace(other)
    assert [trace.producer_of(name) for name in norms] == [expected.producer_of(name) for name in norms]
    assert any(trace.producer_of(name) for name in norms)


def test_lean_networks_can_be_traced_and_exported():
    with torch.device("meta"):
        auto, lean = (zoo.get("resnet18", norm="inplace", memory=memory) for memory in ("auto", LEAN))
        x = torch.empty(2, 3, 64, 64)
    names = [name for name, module in auto.named_modules() if isinstance(module, ABN)]
    expected, trace = Trace(auto), Trace(lean)
    assert [trace.producer_of(name) for name in names] == [expected.producer_of(name) for name in names]
    with warnings.catch_warnings(action="ignore", category=StepsAside):
        graphs = [torch.export.export(network.eval(), (x,)).graph for network in (auto, lean)]
    assert [node.target for node in graphs[0].nodes] == [node.target for node in graphs[1].nodes]
