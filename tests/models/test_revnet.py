"""RevNets and their pre-activation twins: strides, norms and outputs of the paper."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zoo
from tests.formula import relative_error
from tests.nets import build, images
from zoo.layers import ABN
from zoo.layers.revnet_blocks import PooledShortcut, PreactBlock


def test_first_convolution_of_f_and_shortcuts_have_strides():
    with torch.device("meta"):
        strided = {key: m.stride for key, m in zoo.get("revnet104").named_modules() if hasattr(m, "stride")}
        pooled = {key: m.stride for key, m in zoo.get("revnet38_cifar").named_modules() if hasattr(m, "stride")}
    expected = {f"mod{i}.first.{layer}" for i in (3, 4, 5) for layer in ("f.conv1", "shortcut1", "shortcut2")}
    assert {key for key, stride in strided.items() if stride == (2, 2)} == expected | {"mod1.conv1"}
    expected = {f"mod{i}.first.{layer}" for i in (3, 4) for layer in ("f.conv1", "shortcut1", "shortcut2")}
    assert {key for key, stride in pooled.items() if stride in (2, (2, 2))} == expected


def test_norms_of_every_kind_have_papers_eps_and_momentum():
    for norm in ("standard", "inplace", "sync", lambda channels: nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU())):
        for name in ("resnet32_cifar", "revnet38_cifar"):
            with torch.device("meta"):
                model = zoo.get(name, norm=norm)
            found = [(m.eps, m.momentum) for m in model.modules() if hasattr(m, "running_mean")]
            assert set(found) == {(1e-3, 0.01)}
            assert len(found) == {"resnet32_cifar": 31, "revnet38_cifar": 37}[name]


def norm_relu(norm: ABN, x: torch.Tensor) -> torch.Tensor:
    return F.relu(F.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, 1e-3))


def paper_branch(branch: nn.Module, x: torch.Tensor, bottleneck: bool, stride: int) -> torch.Tensor:
    """Return the residual function of equation 3, written out from the weights."""
    for index in range(1, 4 if bottleneck else 3):
        if hasattr(branch, f"bn{index}"):
            x = norm_relu(getattr(branch, f"bn{index}"), x)
        weight = getattr(branch, f"conv{index}").weight
        x = F.conv2d(x, weight, stride=stride if index == 1 else 1, padding=weight.shape[-1] // 2)
    return x


def paper_shortcut(shortcut: nn.Module, x: torch.Tensor, channels: int, bottleneck: bool, stride: int) -> torch.Tensor:
    if bottleneck:
        return F.conv2d(x, shortcut.weight, stride=stride)
    n, c, h, w = x.shape
    x = x.view(n, c, h // stride, stride, w // stride, stride).mean((3, 5))
    zeros = x.new_zeros(n, (channels - c) // 2, *x.shape[2:])
    return torch.cat((zeros, x, zeros), 1)


@pytest.mark.parametrize(("name", "bottleneck"), [("revnet38_cifar", False), ("revnet164_cifar", True)])
def test_revnets_follow_formulas_of_paper_with_the_same_weights(name, bottleneck):
    model, x = build(name, norm="standard", activation="relu").double(), images(dtype=torch.float64)
    actual = model(x)
    out = norm_relu(model.mod1.bn1, F.conv2d(x, model.mod1.conv1.weight, padding=1))
    x1, x2 = out.chunk(2, 1)
    for index, module in enumerate((model.mod2, model.mod3, model.mod4)):
        if hasattr(module, "first"):
            unit, stride = module.first, 2 if index > 0 else 1
            half = unit.g.conv1.weight.shape[1]
            y1 = paper_shortcut(unit.shortcut1, x1, half, bottleneck, stride)
            x1 = y1 + paper_branch(unit.f, x2, bottleneck, stride)
            y2 = paper_shortcut(unit.shortcut2, x2, half, bottleneck, stride)
            x2 = y2 + paper_branch(unit.g, x1, bottleneck, 1)
        for block in module.chain:
            x1 = x1 + paper_branch(block.f, x2, bottleneck, 1)
            x2 = x2 + paper_branch(block.g, x1, bottleneck, 1)
    features = norm_relu(model.bn_out, torch.cat((x1, x2), 1)).mean((2, 3))
    expected = F.linear(features, model.classifier.fc.weight, model.classifier.fc.bias)
    assert relative_error(actual, expected) < 1e-12


@pytest.mark.parametrize(("name", "bottleneck"), [("resnet32_cifar", False), ("resnet164_cifar", True)])
def test_resnets_follow_formulas_of_paper_with_the_same_weights(name, bottleneck):
    model, x = build(name, norm="standard", activation="relu").double(), images(dtype=torch.float64)
    out = norm_relu(model.mod1.bn1, F.conv2d(x, model.mod1.conv1.weight, padding=1))
    for index, module in enumerate((model.mod2, model.mod3, model.mod4)):
        for number, block in enumerate(module):
            assert isinstance(block, PreactBlock)
            stride = 2 if index > 0 and number == 0 else 1
            added = paper_branch(block.branch, out, bottleneck, stride)
            changes = number == 0 and (index > 0 or bottleneck)
            shortcut = paper_shortcut(block.shortcut, out, added.shape[1], bottleneck, stride) if changes else out
            out = shortcut + added
    expected = F.linear(norm_relu(model.bn_out, out).mean((2, 3)), model.classifier.fc.weight, model.classifier.fc.bias)
    assert relative_error(model(x), expected) < 1e-12


def test_pooled_shortcuts_fit_odd_maps():
    x = torch.randn(2, 4, 7, 5)
    out = PooledShortcut(4, 10, 2)(x)
    assert out.shape == (2, 10, *F.conv2d(x, torch.ones(1, 4, 3, 3), stride=2, padding=1).shape[2:])
    assert not out[:, :3].any()
    assert not out[:, 7:].any()
    assert torch.allclose(out[:, 3:7, :3, :2], F.avg_pool2d(x, 2))
    assert torch.allclose(out[:, 3:7, 3, 2], x[:, :, 6, 4])  # the last window has one pixel, not one and three zeros
