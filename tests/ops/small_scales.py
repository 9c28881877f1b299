"""Errors of gradients for scales that are small against the bias, relative to the largest possible gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.formula import activated_batch_norm
from zoo.ops.abn.reference import NormSettings
from zoo.ops.operators import accumulate_dtype

ACTIVATIONS = {"leaky_relu": 0.01, "elu": 1.0, "identity": 0.0}
DTYPES = ["float64", "float32", "bfloat16", "float16"]
SCALES = [0.0, 1e-4, 1e-3, -1e-3, 1e-2, 1.0]
BIASES = [0.0, 0.3003, -2.0]
CHANNELS = [(scale, bias) for scale in SCALES for bias in BIASES]

Errors = dict[str, list[float]]


def make(dtype: str, activation: str, size: tuple[int, int, int] = (6, 9, 7)) -> tuple[Tensor, Tensor, NormSettings]:
    """Return x, dz (whose mean is not 0: the worst case) and the settings, a channel for each of CHANNELS."""
    generator = torch.Generator().manual_seed(0)
    shape = (size[0], len(CHANNELS), *size[1:])
    x, dz = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    x, dz = ((t * 2 + 0.5).to(getattr(torch, dtype)) for t in (x, dz))
    weight, bias = torch.tensor(CHANNELS, dtype=accumulate_dtype(x.dtype)).T.contiguous()
    return x, dz, NormSettings(weight, bias, 1e-5, activation, ACTIVATIONS[activation])


def errors_of(dx: Tensor, dweight: Tensor, x: Tensor, dz: Tensor, settings: NormSettings) -> Errors:
    """Return per channel the rms error of dx over g / std rms(dy), and the error of dweight over n rms(dy).

    The truth is float64 autograd of the formula. By the inequality of Cauchy and Schwarz neither gradient can be
    larger than what it is divided by.
    """
    leaves = [t.double().clone().requires_grad_() for t in (x, settings.weight, settings.bias) if t is not None]
    y = activated_batch_norm(*leaves, settings.eps, "identity")
    activate = {"leaky_relu": F.leaky_relu, "elu": F.elu}.get(settings.activation, lambda t, _: t)
    z = activate(y, settings.activation_param)
    true_dx, true_dweight, dy = torch.autograd.grad(z, [*leaves[:2], y], dz.double())
    slope = (leaves[1].abs() + settings.eps) / torch.sqrt(leaves[0].var((0, 2, 3), correction=0) + settings.eps)
    size, count = rms(dy), x.numel() / x.shape[1]
    return {
        "dx": (rms(dx.double() - true_dx) / (slope * size)).tolist(),
        "dweight": ((dweight.double() - true_dweight).abs() / (count * size)).tolist(),
    }


def rms(x: Tensor) -> Tensor:
    """Return the root mean square per channel."""
    return x.square().mean((0, 2, 3)).sqrt()


def measure_kernels(kernels: Any, x: Tensor, dz: Tensor, settings: NormSettings) -> Errors:
    """Return the errors of the kernels of a back end, called as the autograd function calls them."""
    mean, var = kernels.statistics(x)
    z = kernels.apply(x, mean, var, settings)
    sum_dy, sum_dy_xhat = kernels.backward_reduce(z, dz, settings)
    count = x.numel() / x.shape[1]
    dx, _ = kernels.backward_apply(z, dz, var, (sum_dy / count, sum_dy_xhat / count), settings)
    assert settings.weight is not None
    return errors_of(dx, torch.where(settings.weight < 0, -sum_dy_xhat, sum_dy_xhat), x, dz, settings)


def assert_bounded(errors: Errors, dtype: str) -> None:
    """Check the bounds of csrc/README.md, and that errors are mere roundings where the scale is 1."""
    roundings = 16 * torch.finfo(getattr(torch, dtype)).eps
    for (scale, bias), dx, dweight in zip(CHANNELS, errors["dx"], errors["dweight"], strict=True):
        assert dx < (roundings if scale == 1 else 3), (scale, bias)
        assert dweight < (roundings if scale == 1 else 1), (scale, bias)
