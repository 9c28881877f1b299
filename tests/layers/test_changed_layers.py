"""Code that bypasses layers notices changed layers, or names them in an error."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import zoo
from tests.formula import relative_error
from tests.nets import build as build_network
from tests.refusals import refused
from zoo.errors import ConfigError
from zoo.layers import ABN, InPlaceABN, init_weights
from zoo.layers.dense import DenseModule
from zoo.layers.invertible import (
    BatchPool,
    ChannelPool,
    InvertibleConv,
    InvertibleLeakyReLU,
    InvertibleNorm,
    LayerwiseBlock,
    Stem,
)
from zoo.layers.residual import IdentityResidualBlock
from zoo.models.resnet import ResidualBlock
from zoo.ops.chain import run_chain


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def scale_forward(layer):
    layer.forward = lambda *args, own=layer.forward, **options: 1.5 * own(*args, **options)


def scale_inner_forward(layer):
    if isinstance(layer, nn.Conv2d):
        layer._conv_forward = lambda *args, own=layer._conv_forward: 1.5 * own(*args)
    else:
        layer.compute = lambda *args, own=layer.compute: 1.5 * own(*args)


def scale_by_hook(layer):
    layer.register_forward_hook(lambda module, args, output: 1.5 * output)


def scale_by_pre_hook(layer):
    layer.register_forward_pre_hook(lambda module, args: (1.5 * args[0] + 1, *args[1:]))


def double_weight(layer):
    parametrize.register_parametrization(layer, "weight", Doubled())


def prune_weight(layer):
    prune.l1_unstructured(layer, "weight", 0.5)


def weight_norm_by_hook(layer):
    if isinstance(layer, nn.Conv2d):
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            nn.utils.weight_norm(layer)


def weight_norm(layer):
    if isinstance(layer, nn.Conv2d):
        nn.utils.parametrizations.weight_norm(layer)


def spectral_norm_by_hook(layer):
    if isinstance(layer, nn.Conv2d):
        nn.utils.spectral_norm(layer)


def offload(layer):
    """Give the layer the values of its parameters during calls only, as libraries that offload weights do."""
    values, own = dict(layer._parameters), layer.forward

    def forward(*args, **options):
        layer._parameters.update(values)
        try:
            return own(*args, **options)
        finally:
            layer._parameters.update(empty)

    empty = {name: None if p is None else nn.Parameter(p.to("meta")) for name, p in values.items()}
    layer._parameters.update(empty)
    layer.forward = forward
    layer.offloaded = [p for p in values.values() if p is not None]


CHANGES = [
    scale_forward, scale_inner_forward, scale_by_hook, scale_by_pre_hook, double_weight, prune_weight,
    weight_norm_by_hook, weight_norm, spectral_norm_by_hook, offload,
]  # fmt: skip


def dense(memory):
    return DenseModule(8, 4, 3, InPlaceABN, memory=memory)


def residual(memory):
    return ResidualBlock(8, (4, 4, 8), InPlaceABN, memory=memory)


def projected(memory):
    return ResidualBlock(8, (12, 12), InPlaceABN, stride=2, memory=memory)


def build(make, *args):
    torch.manual_seed(0)
    module = make(*args)
    init_weights(module)
    return module.double()


def layers_of(module, kind):
    return [layer for layer in module.modules() if isinstance(layer, kind)]


def outcome(module, x):
    """Return the output without and with gradients, and the gradients of input and parameters."""
    with torch.no_grad():
        without = module(x.clone()).clone()
    leaf = x.clone().requires_grad_()
    y = module(1.0 * leaf)
    y.square().sum().backward()
    offloaded = [p for layer in module.modules() for p in getattr(layer, "offloaded", ())]
    return [without, y.detach(), leaf.grad, *(p.grad for p in [*module.parameters(), *offloaded] if not p.is_meta)]


def worst(found, expected):
    assert [each is None for each in found] == [each is None for each in expected]
    return max(relative_error(a, b) for a, b in zip(found, expected, strict=True) if a is not None)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", [nn.Conv2d, ABN])
@pytest.mark.parametrize(
    ("make", "training"), [(dense, True), (dense, False), (residual, True), (residual, False), (projected, True)]
)
def test_changed_layer_equals_unfused_layer(make, kind, change, training):
    x, results = torch.randn(2, 8, 6, 6, dtype=torch.float64), []
    for memory in ("auto", "plain"):
        block = build(make, memory).train(training)
        for layer in layers_of(block, kind):
            change(layer)
        torch.manual_seed(1)
        results.append(outcome(block, x))
    assert worst(*results) < 1e-9


@pytest.mark.parametrize("hook", ["forward", "backward", "of_branch"])
@pytest.mark.parametrize("norm", [ABN, InPlaceABN])
@pytest.mark.parametrize("channels", [(4, 8), (4, 4, 8)])
def test_hooks_of_branch_see_its_output_without_shortcut(channels, norm, hook):
    block, x, seen = build(IdentityResidualBlock, 8, channels, norm), torch.randn(2, 8, 6, 6).double(), []
    last = block.convs if hook == "of_branch" else block.convs[-1]
    if hook == "backward":
        last.register_full_backward_hook(lambda module, dx, dy: seen.append(dy[0]))
        y = block(x)
        y.sum().backward()
        assert torch.equal(seen[0], torch.ones_like(y))
    else:
        last.register_forward_hook(lambda module, args, output: seen.append(output))
        assert torch.equal(block(x), seen[0] + x)


def test_output_saved_by_replaced_last_layer_is_not_overwritten():
    block, x = build(IdentityResidualBlock, 8, (4, 8), ABN), torch.randn(2, 8, 6, 6).double()
    kept = torch.randn(2, 8, 6, 6).double()
    for last in (nn.Identity(), nn.Conv2d(4, 8, 3)):
        last.forward = lambda x: kept
        block.convs[-1] = last
        before = kept.clone()
        assert torch.equal(block(x), before + x)
        assert torch.equal(kept, before)


class Chain(nn.Module):
    """A stem and invertible layers; activations are saved with memory "plain"."""

    def __init__(self, memory):
        super().__init__()
        self.memory = memory
        self.layers = nn.Sequential(
            Stem(8), InvertibleConv(8), InvertibleNorm(InPlaceABN(8), 0.1), ChannelPool(), BatchPool(), LayerwiseBlock(
                [InvertibleConv(16)], [InvertibleConv(16), InvertibleNorm(InPlaceABN(16), 0.1)]
            ), InvertibleLeakyReLU(0.5),
        )  # fmt: skip

    def forward(self, x):
        return run_chain(list(self.layers), x, store=self.memory == "plain")[0]


@pytest.mark.parametrize("change", [change for change in CHANGES if change not in (offload, spectral_norm_by_hook)])
@pytest.mark.parametrize("training", [True, False])
def test_chain_calls_changed_convolutions_in_both_directions(change, training):
    x, results = torch.randn(2, 3, 8, 8, dtype=torch.float64), []
    for memory in ("auto", "plain"):
        chain = build(Chain, memory).train(training)
        for conv in layers_of(chain, nn.Conv2d):
            change(conv)
        torch.manual_seed(1)
        results.append(outcome(chain, x))
    assert worst(*results) < 1e-8


def test_chain_calls_convolutions_of_other_classes():
    class Own(nn.Module):  # has none of the attributes of a convolution
        def __init__(self, conv):
            super().__init__()
            self.conv, self.bias = conv, nn.Parameter(torch.ones(conv.out_channels, 1, 1, dtype=torch.float64))

        def forward(self, x):
            return self.conv(x) + self.bias

    def with_bias(conv):
        return nn.Conv2d(conv.in_channels, conv.out_channels, 3, padding=1, padding_mode="reflect", dtype=torch.float64)

    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    for new in (Own, with_bias):
        results = []
        for memory in ("auto", "plain"):
            chain = build(Chain, memory).eval()  # in training a norm makes gradients of biases 0
            for layer in layers_of(chain, (Stem, InvertibleConv)):
                for name, conv in list(layer.named_children()):
                    setattr(layer, name, new(conv))
            results.append(outcome(chain, x))
        assert worst(*results) < 1e-8


@pytest.mark.parametrize("memory", ["auto", "plain"])
def test_offloaded_convolutions_run_without_gradients(memory):
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    chain = build(Chain, memory).eval()
    with torch.no_grad():
        expected = chain(x)
        for conv in layers_of(chain, nn.Conv2d):
            offload(conv)
        assert torch.equal(chain(x), expected)


@pytest.mark.parametrize("change", [change for change in CHANGES if "norm" not in change.__name__])
@pytest.mark.parametrize("memory", ["auto", "plain"])
@pytest.mark.parametrize("gradients", [True, False])
def test_changed_norm_of_invertible_layer_is_named(memory, change, gradients):
    model = zoo.get("revnext", norm="inplace", num_classes=4, memory=memory)
    norm = model.get_submodule("level1.1.g.1.norm")
    change(norm)
    with torch.set_grad_enabled(gradients):
        message = refused(ConfigError, lambda: model(torch.randn(2, 3, 8, 8)), "invertible norm")
    assert message.startswith(f"level1.1.g.1.norm ({type(norm).__name__}): it")
    assert norm.num_batches_tracked == 0


@pytest.mark.parametrize("change", [scale_forward, scale_by_hook, scale_by_pre_hook])
@pytest.mark.parametrize("name", ["level0.1", "level1.0", "level1.1.f.0", "level1.1.f.2", "classifier.max_pool"])
def test_changed_link_of_chain_is_named_unless_activations_are_saved(name, change):
    model = zoo.get("revnext", norm="inplace", num_classes=4)
    x = torch.randn(2, 3, 8, 8)
    change(model.get_submodule(name))
    assert refused(ConfigError, lambda: model(x), "memory=", "store=True").startswith(f"{name} ")
    model.store = True
    before = copy.deepcopy(model)
    model(x).sum().backward()
    with torch.no_grad():
        assert torch.isfinite(before(x)).all()


def test_observing_hooks_change_nothing():
    report = {}
    for name in ("revnext", "resnet18", "densenet121"):
        model = build_network(name, norm="inplace")
        report[name] = zoo.memory_report(model, torch.randn(2, 3, 32, 32))
    plain = zoo.memory_report(build_network("resnet18", norm="inplace", memory="plain"), torch.randn(2, 3, 32, 32))
    assert report["resnet18"].plain < 0.8 * plain.plain
