"""RevNeXts, i-RevNets and the networks they are compared with: weights, gradients, memory and precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import zoo
from tests.formula import relative_error
from tests.nets import build
from tests.refusals import refused
from zoo.memory.allocations import count_memory, measure_memory


def count(name, **options):
    with torch.device("meta"):
        return sum(p.numel() for p in zoo.get(name, num_classes=10, **options).parameters())


def test_compared_networks_have_convolutions_of_paper():
    for name, kernels in (("revnext_resnet18", 3_133_440), ("revnext_revnet", 3_133_440)):
        with torch.device("meta"):
            model = zoo.get(name, num_classes=10)
        levels = [p for key, p in model.named_parameters() if key.startswith("level") and p.dim() == 4]
        assert sum(p.numel() for p in levels) == kernels
    assert 170.5e6 < 4 * count("irevnet_revnext") < 171.4e6


@pytest.mark.parametrize("memory", ["auto", "plain"])
@pytest.mark.parametrize("name", ["revnext_resnet18", "revnext_revnet"])
def test_compared_networks_have_max_pools_of_section_3_4(name, memory):
    """Between the levels: the largest value of each window, and zeros for the channels that are new."""
    model = zoo.get(name, num_classes=10, memory=memory)
    for level, channels in enumerate((32, 64, 128), start=1):
        pool = model.get_submodule(f"level{level}")[0]
        x = torch.randn(2, channels, 4, 6, requires_grad=True)
        y, half = pool(x), channels // 2
        assert torch.equal(y[:, half:-half], F.max_pool2d(x, 2))
        assert not torch.cat([y[:, :half], y[:, -half:]], 1).any()
        (found,) = torch.autograd.grad(y.square().sum(), x)
        assert torch.equal(found, torch.autograd.grad(F.max_pool2d(x, 2).square().sum(), x)[0])


def test_logits_are_eighth_of_linear_layer():
    model = build("revnext").eval()
    x = torch.randn(2, 3, 8, 8)
    largest = model.forward_features(x).amax((2, 3))
    assert torch.allclose(model(x), 0.125 * largest @ model.classifier.fc.weight.T, atol=1e-6)
    assert model.classifier.fc.bias is None


def test_batch_pooled_networks_see_each_image_alone():
    torch.manual_seed(0)
    model = zoo.get("revnext", num_classes=5, channels=8, blocks=[1, 1, 1], pools=["batch", "channel", "batch"]).eval()
    x = torch.randn(3, 3, 16, 16)
    alone = torch.cat([model(image) for image in x.split(1)])
    assert relative_error(model(x), alone) < 1e-5
    assert model.forward_features(x).shape == (3 * 16, 32, 2, 2)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("revnext", {"blocks": [1, 1, 1]}, "[1, 1, 1]"),
        ("revnext_flat", {"layers": [1, 1]}, "3 depths"),
        ("revnext", {"norm": torch.nn.BatchNorm2d}, "BatchNorm2d"),
    ],
)
def test_unbuildable_options_raise_with_their_value(name, options, message):
    refused(zoo.ConfigError, lambda: zoo.get(name, num_classes=5, **options), message)


def memory_of(name, batch, size, **options):
    model = zoo.get(name, num_classes=10, activation_param=0.2, **options)
    x = torch.randn(batch, 3, size, size)
    return measure_memory(lambda: model(x).sum(), model.parameters())


def bytes_per_pixel(name, **options):
    """Return the growth of a step's peak with the pixels of a batch of 8."""
    sizes = (48, 64)  # at smaller sizes, the scratch memory of convolutions determines the peak
    found = [memory_of(name, 8, size, **options).peak_without_gradients for size in sizes]
    return (found[1] - found[0]) / (8 * (sizes[1] ** 2 - sizes[0] ** 2))


@pytest.mark.slow
def test_flat_step_takes_at_most_published_bytes_per_pixel():
    assert 2 * 128 < bytes_per_pixel("revnext_flat") <= 320  # one map of 32 float32 values per pixel, and its gradient


@pytest.mark.parametrize("name", ["irevnet_revnext", "revnext_revnet"])
def test_outputs_are_freed_while_blocks_are_inverted(name):
    with torch.device("meta"):
        model, x = zoo.get(name, num_classes=10), torch.empty(8, 3, 64, 64)
    peak = count_memory(lambda: model(x).sum(), model.parameters()).peak_without_gradients
    # In float32 values: the map and its gradient 64, a branch 48, the gradients in it 32. An output and a gradient that
    # are kept would be 64 more, and so would the stem's convolution and output.
    assert peak == pytest.approx(4 * (64 + 48 + 32) * 8 * 64**2, rel=0.02)


@pytest.mark.parametrize(
    ("options", "warns"),
    [({}, True), ({"grid_bits": 14}, False), ({"memory": "plain"}, False), ({"norm": "inplace"}, True)],
)
def test_inexact_irevnet_warns_once(options, warns, caplog):
    model, x = zoo.get("irevnet_cifar", **options), torch.randn(2, 3, 32, 32)
    model.eval()(x)
    with torch.no_grad():
        model.train()(x)
    assert not caplog.records
    for _ in range(2):
        model(x)
    assert caplog.text.count("set grid_bits=14, which is exact") == warns
