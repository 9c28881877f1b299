"""With scales near 0 and larger biases, gradients may vanish like exact gradients, but do not explode."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.ops.back_ends import ON_CPU
from tests.ops.small_scales import BIASES, CHANNELS, DTYPES, assert_bounded, errors_of, make
from zoo.ops.abn.functional import inplace_abn
from zoo.ops.abn.kernels import KERNELS
from zoo.ops.backend import force_back_end


@pytest.mark.parametrize("back_end", ON_CPU)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bound_holds_for_planes_computed_by_channel(dtype, back_end):
    x, dz, settings = make(dtype, "leaky_relu", size=(2, 131, 127))
    leaves = [t.clone().requires_grad_() for t in (x, settings.weight)]
    with force_back_end(back_end):
        z = inplace_abn(leaves[0] * 1, leaves[1], settings.bias, None, None, True, 0.1, *settings[2:])
        gradients = torch.autograd.grad(z, leaves, dz)
    assert_bounded(errors_of(*gradients, x, dz, settings), dtype)


@pytest.mark.parametrize("back_end", ON_CPU)
@pytest.mark.parametrize("dtype", DTYPES)
def test_x_hat_is_zero_only_where_it_is_lost(dtype, back_end):
    """The gradient of the scale is then exactly 0, so that only weight decay can still change it."""
    x, dz, settings = make(dtype, "leaky_relu")
    kernels, unit = KERNELS[back_end], torch.finfo(x.dtype).eps / 2
    z = kernels.apply(x, *kernels.statistics(x), settings)
    lost = kernels.backward_reduce(z, dz, settings)[1] == 0
    assert lost.tolist() == [abs(scale) + settings.eps < unit * abs(bias) for scale, bias in CHANNELS]
    assert lost.any() == (dtype in ("bfloat16", "float16"))


@pytest.mark.parametrize("back_end", ON_CPU)
def test_nan_reaches_all_gradients_of_channel(back_end):
    x, dz, settings = make("bfloat16", "leaky_relu")
    settings = settings._replace(weight=torch.zeros_like(settings.weight))
    kernels = KERNELS[back_end]
    mean, var = kernels.statistics(x)
    z = kernels.apply(x, mean, var, settings)
    z[0, :, 0, 0] = torch.nan
    sums = kernels.backward_reduce(z, dz, settings)
    dx, _ = kernels.backward_apply(z, dz, var, sums, settings)
    assert sums[1].isnan().all()
    assert dx.isnan().all()


@pytest.mark.parametrize("back_end", ON_CPU)
def test_gradients_of_zero_scale_have_float32_size(back_end):
    """The network has biases as after training, beside scales that weight decay has brought to 0."""
    generator = torch.Generator().manual_seed(0)
    kernel = torch.randn(8, 8, 3, 3, generator=generator) / 8
    images = torch.randn(16, 8, 14, 14, generator=generator)
    bias = torch.tensor([BIASES[1]] * 8)

    def gradient(dtype):
        x = images.to(dtype).requires_grad_()
        y = x
        for scale in (1.0, 0.0):
            y = F.conv2d(y, kernel.to(dtype), padding=1)
            y = inplace_abn(y, torch.full((8,), scale), bias, None, None)
        return torch.autograd.grad(y.float().square().mean(), x)[0].float()

    with force_back_end(back_end):
        truth, ours = gradient(torch.float32), gradient(torch.bfloat16)
    assert ours.norm() < 3 * truth.norm()
