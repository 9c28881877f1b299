"""Dense modules compute the same with every memory strategy, and held bytes grow linearly with depth."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.formula import relative_error, worst_error
from tests.held import held_bytes
from tests.nets import build
from tests.step import step
from zoo.layers import ABN, InPlaceABN
from zoo.layers.dense import DenseModule
from zoo.models.densenet import DenseNet
from zoo.ops.pooling import mean_pool2d

MEMORY = ["auto", "plain", "checkpoint"]


def network(norm: str = "inplace", memory: str = "auto", **options) -> DenseNet:
    return build("densenet121", norm=norm, memory=memory, **options)


@pytest.mark.parametrize("features_only", [False, True])
@pytest.mark.parametrize("dilation", [1, [1, 1, 2, 4]])
@pytest.mark.parametrize("norm", ["standard", "inplace"])
def test_every_memory_strategy_takes_the_same_step(norm, dilation, features_only):
    x = torch.randn(2, 3, 72, 56, dtype=torch.float64)  # 9x7 maps before the last pool, which drops odd rows
    options = {"dilation": dilation, "features_only": features_only}
    plain = step(network(norm, "plain", **options).double(), x)
    for memory in ("auto", "checkpoint"):
        found = step(network(norm, memory, **options).double(), x)
        assert worst_error(found, plain) < 1e-9
        assert {int(count) for count in found if count.dtype == torch.long} == {1, 0} if features_only else {1}


@pytest.mark.parametrize("memory", MEMORY)
def test_channels_last_and_evaluation_agree_with_plain(memory):
    x = torch.randn(2, 3, 64, 64)
    plain, model = network(memory="plain"), network(memory=memory).to(memory_format=torch.channels_last)
    out = step(model, x.contiguous(memory_format=torch.channels_last))
    assert worst_error(out, step(plain, x)) < 1e-3
    with torch.no_grad():
        assert relative_error(model.eval()(x), plain.eval()(x)) < 1e-4


@pytest.mark.parametrize("memory", ["auto", "checkpoint"])
def test_under_autocast_step_equals_plain_training(memory):
    x = torch.randn(2, 3, 64, 64)
    found, truth = (step(network(memory=each), x, autocast=True) for each in (memory, "plain"))
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in truth]
    assert worst_error(found[:1], truth[:1]) < 1e-2
    assert worst_error(found[1:], truth[1:]) < 0.1  # gradients of bfloat16 through 16 norms


def held(memory: str, layers: int, norm=InPlaceABN) -> int:
    with torch.device("meta"):
        module, conv = DenseModule(16, 8, layers, norm, memory=memory), nn.Conv2d(3, 16, 1)
        x = torch.empty(2, 3, 8, 8)
    return held_bytes(lambda: module(conv(x)).sum())


@pytest.mark.slow
def test_held_bytes_grow_linearly_with_depth():
    map_bytes = 2 * 8 * 8 * 4
    auto, checkpoint, plain, standard = (
        [held(memory, layers, norm) for layers in (2, 4, 6)]
        for memory, norm in (("auto", InPlaceABN), ("checkpoint", InPlaceABN), ("plain", InPlaceABN), ("plain", ABN))
    )
    per_channel = 16 * 8 * 16  # generous: the vectors of a norm are as long as its concatenation has channels

    def bend(sizes):
        return sizes[0] - 2 * sizes[1] + sizes[2]

    for sizes, channels in ((auto, 8 + 32), (checkpoint, 8)):
        assert abs(bend(sizes)) < per_channel
        assert abs(sizes[1] - sizes[0] - 2 * channels * map_bytes) < 2 * per_channel + 2 * 8 * map_bytes
    assert bend(plain) >= 2 * 2 * 8 * map_bytes  # 2 more layers; each reads 2 x 8 more channels
    assert bend(standard) >= 2 * 2 * 2 * 8 * map_bytes


@pytest.mark.parametrize("memory", MEMORY)
def test_hooks_see_outputs_of_modules_layers_and_norms(memory):
    model, seen = network(memory=memory), {}
    for name in ("mod2", "mod3.convs1.1", "mod3.convs1.1.bn", "tra3", "tra3.conv"):
        model.get_submodule(name).register_forward_hook(lambda m, i, out, name=name: seen.update({name: out.shape}))
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    assert seen == {
        "mod2": (2, 128, 16, 16),
        "mod3.convs1.1": (2, 128, 8, 8),
        "mod3.convs1.1.bn": (2, 96, 8, 8),
        "tra3": (2, 64, 4, 4),
        "tra3.conv": (2, 64, 8, 8),
    }


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(2, 3, 8, 6), (2, 3, 7, 5), (1, 4, 4, 5), (0, 3, 4, 4)])
def test_mean_pooling_equals_torchs_and_saves_nothing(shape, layout):
    x = torch.randn(shape, dtype=torch.float64).contiguous(memory_format=layout).requires_grad_()
    out, truth = mean_pool2d(x), F.avg_pool2d(x, 2)
    wave = torch.arange(out.numel(), dtype=torch.float64).cos().view(out.shape)
    assert torch.equal(out, truth)
    assert out.grad_fn.saved_tensors == ()
    found, expected = torch.autograd.grad(out, x, wave)[0], torch.autograd.grad(truth, x, wave)[0]
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
