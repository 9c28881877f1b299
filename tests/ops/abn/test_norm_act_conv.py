"""Norm, activation and convolution as one operation, and the paper's five strategies, against autograd."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.formula import activated_batch_norm, relative_error, worst_error
from tests.refusals import refused
from zoo.benchmark.variants import STRATEGIES, bn_act_conv
from zoo.ops.abn.kernels import KERNELS
from zoo.ops.abn.norm_act_conv import join, norm_act_conv
from zoo.ops.abn.reference import NormSettings
from zoo.ops.abn.statistics import Statistics
from zoo.ops.convolution import Convolution, convolution_dtype

PLAIN = ((1, 1), (0, 0), (1, 1), 1)
# kernel size; stride, padding, dilation, groups
CONVOLUTIONS = {
    "1x1": (1, PLAIN),
    "3x3 strided": (3, ((2, 2), (1, 1), (1, 1), 1)),
    "3x3 grouped": (3, ((1, 1), (1, 1), (1, 1), 2)),
    "3x3 dilated": (3, ((1, 1), (2, 2), (2, 2), 1)),
    "all, uneven": (3, ((2, 1), (2, 0), (1, 2), 2)),
}
SCALES = torch.tensor([1.0, -0.7, 0.4, 1.5, -1.2, 0.8])  # |w| of x_hat that can be recovered in half precision too
ACTIVATIONS = [("leaky_relu", 0.01), ("elu", 0.7), ("identity", 0.01)]


def leaves(channels=(6,), size=3, groups=1, dtype=torch.float64, seed=0):
    """Return weight, bias, conv_weight, conv_bias and an input (3, C, 9, 7) per entry of ``channels``: leaves."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(channels)
    shapes = [(total,), (total,), (4, total // groups, size, size), (4,), *[(3, c, 9, 7) for c in channels]]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def run(weight, bias, conv_weight, conv_bias, *inputs, geometry=PLAIN, activation=("leaky_relu", 0.01), fixed=None):
    with torch.no_grad():
        joined = join(inputs)
        taken = Statistics(*KERNELS["reference"].statistics(joined), joined.numel() // joined.shape[1], None)
    settings = NormSettings(weight, bias, 1e-5, *activation)
    convolution = Convolution(*geometry, convolution_dtype(joined))
    return norm_act_conv(inputs, joined, fixed or taken, settings, conv_weight, conv_bias, convolution)


def run_formula(
    weight, bias, conv_weight, conv_bias, *inputs, geometry=PLAIN, activation=("leaky_relu", 0.01), fixed=None
):
    z = activated_batch_norm(torch.cat(inputs, 1), weight, bias, 1e-5, *activation, statistics=fixed)
    return F.conv2d(z, conv_weight, conv_bias, *geometry)


def gradients(out, tensors):
    wave = torch.arange(out.numel(), dtype=torch.float64).cos().view(out.shape)
    return torch.autograd.grad(out, tensors, wave.to(out.dtype))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda activation: activation[0])
@pytest.mark.parametrize("channels", [(6,), (3, 1, 2)], ids=["one input", "three inputs"])
@pytest.mark.parametrize("convolution", CONVOLUTIONS)
def test_outputs_and_gradients_equal_autograd_of_formula(convolution, channels, activation):
    size, geometry = CONVOLUTIONS[convolution]
    tensors = leaves(channels, size, geometry[3])
    before = [tensor.detach().clone() for tensor in tensors]
    out = run(*tensors, geometry=geometry, activation=activation)
    truth = run_formula(*tensors, geometry=geometry, activation=activation)
    assert relative_error(out, truth) < 1e-10
    assert worst_error(gradients(out, tensors), gradients(truth, tensors)) < 1e-10
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))


def test_constant_statistics_are_constant_in_backward():
    tensors = leaves((4, 2), 1)
    mean, var = torch.randn(6, dtype=torch.float64), torch.rand(6, dtype=torch.float64) + 0.5
    out = run(*tensors, fixed=Statistics(mean, var, None, None))
    truth = run_formula(*tensors, fixed=(mean, var))
    assert relative_error(out, truth) < 1e-10
    assert worst_error(gradients(out, tensors), gradients(truth, tensors)) < 1e-10


def test_norms_and_convolutions_may_lack_their_parameters():
    _, _, conv_weight, _, *inputs = leaves((4, 2))
    out, truth = run(None, None, conv_weight, None, *inputs), run_formula(None, None, conv_weight, None, *inputs)
    assert worst_error(gradients(out, [conv_weight, *inputs]), gradients(truth, [conv_weight, *inputs])) < 1e-10


@pytest.mark.parametrize("trained", [*itertools.combinations(range(6), 1), (0, 1), (2, 3), (4, 5), (1, 2, 5)])
def test_only_inputs_that_require_gradients_receive_them(trained):
    tensors = leaves((4, 2))
    for index, tensor in enumerate(tensors):
        tensor.requires_grad_(index in trained)
    wanted = [tensors[index] for index in trained]
    assert worst_error(gradients(run(*tensors), wanted), gradients(run_formula(*tensors), wanted)) < 1e-10


def test_input_of_several_layers_receives_all_gradients():
    weight, bias, conv_weight, conv_bias, a, b = tensors = leaves((4, 2))

    def chain(layer):
        first = layer(weight, bias, conv_weight, conv_bias, a, b)
        second = layer(weight, bias, conv_weight, conv_bias, first[:, :2], a * 1)
        third = layer(weight, bias, conv_weight, conv_bias, a, second[:, :2])
        return third + layer(weight, bias, conv_weight, conv_bias, a, b)

    def padded(layer):
        return lambda *args: layer(*args, geometry=((1, 1), (1, 1), (1, 1), 1))

    assert worst_error(gradients(chain(padded(run)), tensors), gradients(chain(padded(run_formula)), tensors)) < 1e-10


def test_only_inputs_are_saved():
    tensors = leaves((4, 2))
    out = run(*tensors)
    kept = [tensor for tensor in out.grad_fn.saved_tensors if tensor is not None and tensor.dim() == 4]
    storages = {tensor.data_ptr() for tensor in kept if tensor.shape != tensors[2].shape}
    assert storages == {tensors[4].data_ptr(), tensors[5].data_ptr()}


def test_input_modified_before_backward_raises():
    *parameters, x = leaves()
    x = x * 1
    out = run(*parameters, x)
    x.detach().add_(1)
    refused(RuntimeError, lambda: out.sum().backward(), "modified by an inplace operation")


def test_differentiating_twice_raises():
    tensors = leaves()
    (dx,) = torch.autograd.grad(run(*tensors).square().sum(), tensors[-1], create_graph=True)
    refused(RuntimeError, lambda: dx.sum().backward(), "second derivatives")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_agrees_within_its_own_rounding(dtype):
    tensors = leaves((4, 2), dtype=dtype)
    with torch.no_grad():
        tensors[0].copy_(SCALES)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    out, truth = run(*tensors), run_formula(*exact)
    found = gradients(out, tensors)
    assert all(gradient.dtype == dtype for gradient in found)
    # The gradient of conv_bias is a sum of 105 numbers in half precision. All others are as precise as in the
    # in-place norm, with a convolution on both sides.
    assert worst_error(found, gradients(truth, exact)) < 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("inner", [torch.float32, torch.bfloat16, torch.float64])
def test_under_autocast_dtypes_equal_ordinary_convolution(inner):
    *parameters, a, b = leaves((4, 2), dtype=torch.float64 if inner == torch.float64 else torch.float32)
    inputs = [x.detach().to(inner).requires_grad_() for x in (a, b)]
    with torch.no_grad():
        parameters[0].copy_(SCALES)
    with torch.autocast("cpu", torch.bfloat16):
        out = run(*parameters, *inputs)
        truth = run_formula(*parameters, *inputs)
    assert out.dtype == (torch.float64 if inner == torch.float64 else torch.bfloat16)
    found, expected = gradients(out, [*parameters, *inputs]), gradients(truth, [*parameters, *inputs])
    assert [g.dtype for g in found] == [g.dtype for g in expected]
    assert worst_error(found, expected) < 16 * torch.finfo(inner if inner == torch.float64 else torch.bfloat16).eps


def test_autocast_cache_keeps_gradient_of_shared_kernel():
    weight, bias, conv_weight, _, x = leaves((6,), 1, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        run(weight, bias, conv_weight, None, x)
        later = F.conv2d(x, conv_weight)
    assert torch.autograd.grad(later.float().sum(), conv_weight)[0].abs().max() > 0


@pytest.mark.parametrize(("size", "groups"), [(1, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_five_strategies_of_paper_have_gradients_of_formula(strategy, size, groups):
    gamma, beta, conv_weight, _, x = leaves((6,), size, groups)
    tensors = [x, gamma, beta, conv_weight]
    out = bn_act_conv(x, gamma, beta, conv_weight, strategy, groups)
    truth = F.conv2d(activated_batch_norm(x, gamma, beta, signed=True), conv_weight, padding=size // 2, groups=groups)
    assert gamma.min() < -0.5 < 0.5 < gamma.max()
    assert relative_error(out, truth) < 1e-10
    assert worst_error(gradients(out, tensors), gradients(truth, tensors)) < 1e-10


def test_standard_saves_two_maps_and_other_strategies_one():
    gamma, beta, conv_weight, _, x = leaves()
    for strategy in STRATEGIES:
        out = bn_act_conv(x, gamma, beta, conv_weight, strategy)
        maps = {
            tensor.data_ptr() for tensor in out.grad_fn.saved_tensors if tensor is not None and tensor.shape == x.shape
        }
        assert len(maps) == (2 if strategy == "standard" else 1)
        assert (x.data_ptr() in maps) == (strategy in ("standard", "checkpoint"))
