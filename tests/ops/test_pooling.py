"""The pooling that saves indices as bytes: windows, fallbacks and held bytes; test_back_ends.py has its bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from tests.ops.back_ends import needs
from tests.refusals import refused
from zoo.layers.conv import MaxPool2d
from zoo.memory.allocations import measure_memory
from zoo.ops import pooling
from zoo.ops.backend import force_back_end
from zoo.ops.pooling import max_pool2d

needs_kernels = needs("native")
LAYOUTS = [torch.contiguous_format, torch.channels_last]


def gradients(pool, x, *args):
    """Return output, gradient of the input for a gradient full of different numbers."""
    x = x.detach().requires_grad_()
    z = pool(x, *args)
    numbers = torch.arange(z.numel(), dtype=torch.float64).cos().to(z.dtype)
    (dx,) = torch.autograd.grad(z, x, numbers.view(z.shape))
    return z, dx


def all_equal(actual, expected):
    return all(torch.equal(ours, theirs) for ours, theirs in zip(actual, expected, strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_every_kind_of_window_has_gradient_of_torch(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return tuple(torch.randint(low, high + 1, (2,), generator=generator).tolist())

    kernel, stride, dilation = draw(1, 4), draw(1, 4), draw(1, 3)
    padding = tuple(p % (k // 2 + 1) for p, k in zip(draw(0, 2), kernel, strict=True))
    reach = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(dilation, kernel, padding, strict=True)]
    size = [max(1, r) + extra for r, extra in zip(reach, draw(0, 9), strict=True)]
    x = torch.randint(0, 3, (2, 2, *size), generator=generator).float()  # many ties
    args = (kernel, stride, padding, dilation, bool(seed % 2))
    for layout in LAYOUTS:
        x = x.contiguous(memory_format=layout)
        assert all_equal(gradients(max_pool2d, x, *args), gradients(F.max_pool2d, x, *args))


def test_pooling_falls_back_to_torch_without_compiled_kernels(monkeypatch):
    monkeypatch.setattr(pooling, "_MaxPool", None)
    x = torch.randn(2, 3, 8, 8)
    with force_back_end("reference"):
        assert all_equal(gradients(max_pool2d, x, 3, 2, 1), gradients(F.max_pool2d, x, 3, 2, 1))


@pytest.mark.parametrize(("shape", "window"), [((1, 2, 40, 40), (17, 3)), ((3, 8, 8), (3, 2, 1))])
def test_large_windows_and_maps_without_batch_equal_torch(shape, window):
    x = torch.randn(shape)
    assert all_equal(gradients(max_pool2d, x, *window), gradients(F.max_pool2d, x, *window))


@pytest.mark.parametrize("cut", [lambda x: x[:, 1:], lambda x: x[:, :, ::2], lambda x: x[:1].expand(3, -1, -1, -1)])
def test_strided_inputs_have_gradient_of_torch(cut):
    for layout in LAYOUTS:
        x = torch.randn(2, 4, 12, 12).contiguous(memory_format=layout)
        ours = gradients(lambda x: max_pool2d(cut(x), 3, 2, 1), x)
        theirs = gradients(lambda x: F.max_pool2d(cut(x), 3, 2, 1), x)
        assert all_equal(ours, theirs)


@needs_kernels
def test_one_byte_per_output_is_saved():
    x = torch.randn(8, 16, 64, 64, requires_grad=True)
    outputs = x.numel() // 4
    memory = measure_memory(lambda: max_pool2d(x, 3, 2, 1).sum(), [x])
    assert outputs <= memory.held < outputs + 5000
    theirs = measure_memory(lambda: F.max_pool2d(x, 3, 2, 1).sum(), [x])
    assert theirs.held >= 8 * outputs
    assert memory.peak < theirs.peak + outputs + 5000  # the indices are restored for the call, in addition to the bytes


@needs_kernels
def test_second_gradient_call_raises():
    x = torch.randn(1, 1, 4, 4, requires_grad=True)
    (dx,) = torch.autograd.grad(max_pool2d(x, 3, 2, 1).square().sum(), x, create_graph=True)
    refused(RuntimeError, lambda: dx.sum().backward(), "second derivatives")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # decompositions of torch 2.11
def test_compiled_exported_or_transformed_pooling_uses_torch():
    module = MaxPool2d(3, 2, 1)
    x = torch.randn(2, 3, 8, 8)
    expected = gradients(nn.MaxPool2d(3, 2, 1), x)
    assert all_equal(gradients(torch.compile(module, fullgraph=True), x), expected)
    assert torch.equal(torch.export.export(module, (x,)).module()(x), expected[0])
    per_sample = torch.func.vmap(torch.func.grad(lambda x: module(x[None]).square().sum()))(x)
    whole = torch.autograd.grad(module(leaf := x.clone().requires_grad_()).square().sum(), leaf)[0]
    assert torch.equal(per_sample, whole)


def test_module_replaces_torch_module():
    module, theirs = MaxPool2d(3, 2, 1, dilation=2, ceil_mode=True), nn.MaxPool2d(3, 2, 1, dilation=2, ceil_mode=True)
    x = torch.randn(2, 3, 11, 11)
    assert all_equal(gradients(module, x), gradients(theirs, x))
    z, index = MaxPool2d(2, return_indices=True)(x.requires_grad_())
    assert index.dtype == torch.int64
    assert z.requires_grad


@needs_kernels
def test_empty_window_gives_minus_infinity():
    """For such a window, torch itself returns an index outside of the map."""
    for layout in LAYOUTS:
        x = torch.ones(1, 2, 2, 2).contiguous(memory_format=layout)
        z, dx = gradients(max_pool2d, x, 2, 1, 1, 3)
        assert z.shape == (1, 2, 1, 1)
        assert (z == -torch.inf).all()
        assert not dx.any()


@needs_kernels
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck_accepts_both_operators(layout):
    x = torch.randn(2, 3, 9, 8).contiguous(memory_format=layout)
    window = [3, 3], [2, 2], [1, 1], [1, 1], False
    tests = ("test_schema", "test_faketensor")  # the autograd Function above has the gradient
    torch.library.opcheck(torch.ops.zoo.max_pool2d.default, (x, *window), test_utils=tests)
    z, place = torch.ops.zoo.max_pool2d(x, *window)
    channels_last = layout == torch.channels_last
    arguments = (z, place, 9, 8, channels_last, *window)
    torch.library.opcheck(torch.ops.zoo.max_pool2d_backward.default, arguments, test_utils=tests)


@pytest.mark.parametrize(
    "window",
    [(3, 2, 2), (0, 1, 0), (2, 0, 0), (2, 1, -1), (9, 1, 0)],
    ids=["pad", "size", "stride", "negative", "small"],
)
def test_invalid_windows_raise_torchs_own_error(window):
    x = torch.randn(1, 1, 4, 4)
    with pytest.raises(RuntimeError) as theirs:
        F.max_pool2d(x, *window)
    with pytest.raises(RuntimeError) as ours:
        max_pool2d(x, *window)
    assert str(ours.value) == str(theirs.value)
