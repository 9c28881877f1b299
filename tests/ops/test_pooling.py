"""The pooling that saves indices as bytes: torch's outputs and gradients bit for bit, and held bytes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from tests.refusals import refused
from zoo.layers.conv import MaxPool2d
from zoo.memory.allocations import measure_memory
from zoo.ops import native, pooling
from zoo.ops.backend import force_back_end
from zoo.ops.pooling import max_pool2d

needs_kernels = pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason()))


def gradients(pool, x, *args):
    """Return output, gradient of the input for a gradient full of different numbers."""
    x = x.detach().requires_grad_()
    z = pool(x, *args)
    numbers = torch.arange(z.numel(), dtype=torch.float64).cos().to(z.dtype)
    (dx,) = torch.autograd.grad(z, x, numbers.view(z.shape))
    return z, dx


def all_equal(actual, expected):
    return all(torch.equal(ours, theirs) for ours, theirs in zip(actual, expected, strict=True))


def same(actual, expected):
    return torch.equal(actual.nan_to_num(nan=7e4), expected.nan_to_num(nan=7e4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(2, 3, 12, 12), (1, 1, 7, 5), (3, 2, 1, 1), (2, 3, 2, 9), (0, 3, 6, 6)])
def test_outputs_gradients_and_layout_equal_torch(shape, layout, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype).contiguous(memory_format=layout)
    (z, dx), (their_z, their_dx) = gradients(max_pool2d, x, 3, 2, 1), gradients(F.max_pool2d, x, 3, 2, 1)
    assert torch.equal(z, their_z)
    assert torch.equal(dx, their_dx)
    assert z.stride() == their_z.stride()
    assert dx.stride() == their_dx.stride()
    assert dx.dtype == dtype


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
    for layout in (torch.contiguous_format, torch.channels_last):
        x = x.contiguous(memory_format=layout)
        assert all_equal(gradients(max_pool2d, x, *args), gradients(F.max_pool2d, x, *args))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_ties_nan_and_infinities_choose_the_same_element(layout):
    torch.manual_seed(0)
    x = torch.randint(0, 2, (2, 3, 9, 9)).float()
    x[0, 0, 2:5, 2:5] = float("nan")
    x[0, 1, 0:6] = -float("inf")
    x[1, 2, 4:] = float("inf")
    x = x.contiguous(memory_format=layout)
    (z, dx), (their_z, their_dx) = gradients(max_pool2d, x, 3, 2, 1), gradients(F.max_pool2d, x, 3, 2, 1)
    assert same(z, their_z)
    assert torch.equal(dx, their_dx)


def test_maps_narrower_than_window_and_maps_without_batch():
    x = torch.tensor([[[[3.0], [1.0], [5.0]]]])
    args = (16, 1, 8)
    assert torch.equal(gradients(max_pool2d, x, *args)[1], gradients(F.max_pool2d, x, *args)[1])
    x = torch.randn(3, 8, 8)
    assert torch.equal(gradients(max_pool2d, x, 3, 2, 1)[1], gradients(F.max_pool2d, x, 3, 2, 1)[1])


def test_pooling_falls_back_to_torch_without_compiled_kernels(monkeypatch):
    monkeypatch.setattr(pooling, "_MaxPool", None)
    x = torch.randn(2, 3, 8, 8)
    with force_back_end("reference"):
        assert all_equal(gradients(max_pool2d, x, 3, 2, 1), gradients(F.max_pool2d, x, 3, 2, 1))


def test_large_windows_fall_back_to_torch():
    x = torch.randn(1, 2, 40, 40)
    assert torch.equal(gradients(max_pool2d, x, 17, 3)[1], gradients(F.max_pool2d, x, 17, 3)[1])


@pytest.mark.parametrize("cut", [lambda x: x[:, 1:], lambda x: x[:, :, ::2], lambda x: x[:1].expand(3, -1, -1, -1)])
def test_strided_inputs_have_gradient_of_torch(cut):
    for layout in (torch.contiguous_format, torch.channels_last):
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("window", [(3, 2, 1), (2, 2), (3, 1, 1), (5, 1, 2), (3, 3, 0, 2)])
def test_maps_of_many_vectors_are_bit_identical_to_torch(window, layout, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 150, 37, 41, generator=generator).to(dtype).contiguous(memory_format=layout)
    x[0, 3, 5:9, 7] = torch.nan
    threads = torch.get_num_threads()
    theirs = gradients(F.max_pool2d, x, *window)
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            ours = gradients(max_pool2d, x, *window)
            assert same(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [(3, 2, 1), (2, 3), (3, 1, 1), ((1, 200), 2), (3, 5, 1, 30), ((16, 3), 2, (8, 1))])
def test_planes_of_many_bands_are_bit_identical_to_torch(window, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-3, 4, (1, 2, 203, 211), generator=generator).to(dtype)
    x[0, 0, :50] = -torch.inf
    x[0, 1, :, :150] = -torch.inf
    ours, theirs = gradients(max_pool2d, x, *window), gradients(F.max_pool2d, x, *window)
    assert all_equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("channels", [1, 3, 40])
def test_zeros_have_sign_of_torch(channels, layout, dtype):
    torch.manual_seed(0)
    x = (torch.rand(2, channels, 20, 20) - 0.5).sign().mul(0).to(dtype).contiguous(memory_format=layout)
    x.requires_grad_()
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()]
    results = []
    for pool in (max_pool2d, F.max_pool2d):
        z = pool(x, 3, 2, 1)
        (dx,) = torch.autograd.grad(z, x, -z)
        results.append((z.view(bits), dx.view(bits)))
    assert all_equal(*results)


@needs_kernels
def test_empty_window_gives_minus_infinity():
    """For such a window, torch itself returns an index outside of the map."""
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.ones(1, 2, 2, 2).contiguous(memory_format=layout)
        z, dx = gradients(max_pool2d, x, 2, 1, 1, 3)
        assert z.shape == (1, 2, 1, 1)
        assert (z == -torch.inf).all()
        assert not dx.any()


def test_all_16_bit_values_compare_like_torch():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16)[torch.randperm(2**16)]
    for dtype in (torch.bfloat16, torch.float16):
        x = every.view(dtype).view(1, 4, 128, 128)
        (z, dx), (their_z, their_dx) = gradients(max_pool2d, x, 2, 2), gradients(F.max_pool2d, x, 2, 2)
        assert torch.equal(z.isnan(), their_z.isnan())
        assert torch.equal(z.nan_to_num(7), their_z.nan_to_num(7))
        assert torch.equal(dx, their_dx)


@needs_kernels
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
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
