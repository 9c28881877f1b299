"""Invertible operations: pooling, batch norm, leaky ReLU and coupling convolutions, with their inverses.

Functions whose names end in an underscore work in place. The inverse of a layer overwrites the output y with the input
x, and dy with dx. Operations that need scratch memory, mainly convolutions of half the channels, process an eighth of
the batch at a time, so that the scratch memory stays below the size of the feature map.

Source: Hascoet et al., EURASIP JIVP 2023:1, section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.ops.abn.kernels import kernels_for
from zoo.ops.abn.reference import NormSettings, parameter_gradients
from zoo.ops.abn.statistics import Statistics, means_over_group
from zoo.ops.chain import Gradients
from zoo.ops.context import is_fx_proxy
from zoo.ops.convolution import Convolution

NUM_PARTS = 8


def parts(*maps: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of the maps, each with an eighth of the batch."""
    return zip(*(x.chunk(NUM_PARTS) for x in maps), strict=True)


def channel_pool(x: Tensor) -> Tensor:
    """Move the four values of each 2x2 window to channels: (N, C, H, W) -> (N, 4 C, H/2, W/2).

    Channel c of offset (dy, dx) becomes channel (2 dy + dx) C + c: the first half of the channels are the even rows.
    Raises ValueError for odd H or W.
    """
    return _split_windows(x).flatten(1, 3)


def channel_unpool(y: Tensor) -> Tensor:
    """Return the inverse of `channel_pool`, bit for bit."""
    return _join_windows(y.unflatten(1, (2, 2, -1)))


def batch_pool(x: Tensor) -> Tensor:
    """Move the four values of each 2x2 window to the batch: (N, C, H, W) -> (4 N, C, H/2, W/2).

    Offset (dy, dx) of image n becomes image 4 n + 2 dy + dx, so the parts of an image stay adjacent. Raises ValueError
    for odd H or W.
    """
    return _split_windows(x).flatten(0, 2)


def _split_windows(x: Tensor) -> Tensor:
    """Split 2x2 windows: (N, C, H, W) -> (N, 2, 2, C, H/2, W/2), contiguous."""
    if not is_fx_proxy(x) and (x.shape[2] % 2 or x.shape[3] % 2):
        raise ValueError(f"invertible 2x2 pooling needs an even height and width, got a map of shape {tuple(x.shape)}")
    windows = x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))  # N, C, H/2, dy, W/2, dx
    return windows.permute(0, 3, 5, 1, 2, 4).contiguous()


def _join_windows(windows: Tensor) -> Tensor:
    """Return the inverse of `_split_windows`."""
    return windows.permute(0, 3, 4, 1, 5, 2).flatten(4, 5).flatten(2, 3)


def channel_unpool_(y: Tensor) -> Tensor:
    """Return the inverse of `channel_pool`, in the memory of the contiguous map y."""
    n, c, h, w = y.shape
    x = y.view(n, c // 4, 2 * h, 2 * w)  # values only move within the memory of their image
    for source, target in parts(y, x):
        target.copy_(channel_unpool(source))
    return x


def batch_unpool_(y: Tensor) -> Tensor:
    """Return the inverse of `batch_pool`, in the memory of the contiguous map y."""
    n, c, h, w = y.shape
    return channel_unpool_(y.view(n // 4, 4 * c, h, w))  # the same memory order


def invert_leaky_relu_(y: Tensor, dy: Tensor, slope: float) -> None:
    """Invert leaky ReLU: overwrite y with x = leaky_relu(y, 1 / slope), and dy with dx."""
    torch.ops.aten.leaky_relu_backward.grad_input(dy, y, slope, True, grad_input=dy)
    F.leaky_relu_(y, 1 / slope)


def normalize_(x: Tensor, statistics: Statistics, settings: NormSettings) -> None:
    """Overwrite x with (|weight| + eps) x_hat + bias."""
    for (part,) in parts(x):
        kernels_for(x).apply_(part, statistics.mean, statistics.var, settings)


def invert_norm_(y: Tensor, dy: Tensor, statistics: Statistics, settings: NormSettings) -> tuple[Tensor, Tensor]:
    """Overwrite y with x, and dy with dx; return the gradients of weight and bias.

    x = (y - bias) sqrt(var + eps) / (|weight| + eps) + mean.
    """
    assert settings.weight is not None
    assert settings.bias is not None
    kernels, count = kernels_for(y), statistics.num_values
    sums_of_parts = [torch.stack(kernels.backward_reduce(z, dz, settings)) for z, dz in parts(y, dy)]
    sums = torch.stack(sums_of_parts).sum(0)
    means = None if count is None else means_over_group(sums.clone(), count, statistics.group)
    for z, dz in parts(y, dy):
        dz.copy_(kernels.backward_apply(z, dz, statistics.var, means, settings)[0])
    scale = torch.sqrt(statistics.var + settings.eps) / (settings.weight.abs() + settings.eps)
    y.sub_(_per_channel(settings.bias)).mul_(_per_channel(scale)).add_(_per_channel(statistics.mean))
    dgain, dbias = parameter_gradients(sums[0], sums[1], settings.weight, settings.bias)
    assert dgain is not None
    assert dbias is not None
    return dgain, dbias


def _per_channel(vector: Tensor) -> Tensor:
    return vector.view(1, -1, 1, 1)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the first and the second half of the channels."""
    x1, x2 = x.chunk(2, 1)
    return x1, x2


def couple_(x: Tensor, f: nn.Conv2d, g: nn.Conv2d) -> None:
    """Overwrite the halves of x with y1 = x1 + f(x2), y2 = x2 + g(y1), for two convolutions of half the channels."""
    for (part,) in parts(x):
        x1, x2 = halves(part)
        x1.add_(f(x2))
        x2.add_(g(x1))


def invert_coupling_(y: Tensor, dy: Tensor, f: nn.Conv2d, g: nn.Conv2d) -> Gradients:
    """Invert `couple_`: overwrite y with x, dy with dx; return the gradients of the weights."""
    gradients: Gradients = {}
    for y_part, dy_part in parts(y, dy):
        (y1, y2), (dy1, dy2) = halves(y_part), halves(dy_part)
        _subtract_conv_(g, y1, y2, dy1, dy2, gradients)
        _subtract_conv_(f, y2, y1, dy2, dy1, gradients)
    return gradients


def _subtract_conv_(
    conv: nn.Conv2d, source: Tensor, target: Tensor, dsource: Tensor, dtarget: Tensor, gradients: Gradients
) -> None:
    """Subtract ``conv(source)`` from target; accumulate its gradients into dsource and ``gradients`` (weight)."""
    convolution, weight = Convolution.of(conv, source), conv.weight
    target.sub_(convolution(source, weight, None))
    dx, dweight, _ = convolution.backward(dtarget, source, weight, None, needed=(True, weight.requires_grad, False))
    assert dx is not None
    dsource.add_(dx)
    if dweight is not None:
        gradients[weight] = gradients[weight].add_(dweight) if weight in gradients else dweight


def convolve(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """Return a same-size convolution of x in a new contiguous tensor, in float32 or the wider dtype of x."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = x.new_empty((x.shape[0], conv.out_channels, *x.shape[2:]), dtype=dtype)
    for x_part, y_part in parts(x, y):
        y_part.copy_(conv(x_part))
    return y


def convolve_gradients(x: Tensor, dy: Tensor, conv: nn.Conv2d) -> tuple[Tensor | None, Tensor]:
    """Return the gradients of `convolve` for x (None if x requires none) and for the weight."""
    convolution, needed = Convolution.of(conv, x), (x.requires_grad, True, False)
    dx = torch.empty_like(x) if x.requires_grad else None
    dweight = torch.zeros_like(conv.weight)
    for x_part, dy_part, dx_part in parts(x, dy, x if dx is None else dx):
        new_dx, new_dweight, _ = convolution.backward(dy_part, x_part, conv.weight, None, needed)
        if new_dx is not None:
            dx_part.copy_(new_dx)
        assert new_dweight is not None
        dweight.add_(new_dweight)
    return dx, dweight


def global_max(x: Tensor, images: int) -> Tensor:
    """Return the maximum of each channel over the positions of each group of ``images`` adjacent images."""
    return x.unflatten(0, (-1, images)).amax((1, 3, 4))


def global_max_gradient(x: Tensor, best: Tensor, dbest: Tensor, images: int) -> Tensor:
    """Return dx of `global_max`. Equal maxima share the gradient."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    grouped = (x.unflatten(0, (-1, images)), dx.unflatten(0, (-1, images)), best, dbest)
    for x_part, dx_part, best_part, dbest_part in parts(*grouped):
        dx_part.copy_(x_part == best_part[:, None, :, None, None])
        share = dbest_part / dx_part.sum((1, 3, 4))
        dx_part.mul_(share[:, None, :, None, None])
    return dx
