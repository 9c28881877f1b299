"""Faster kernels of norms and pooling with the bits of torch, and exact recomputation of norms."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from zoo.ops.backend import name_for
from zoo.ops.meta_attention import kernel_device_of
from zoo.remat._operations import Operation, aten, first_output
from zoo.torch_internals.dispatch import DisableTorchDispatch

LINE_DTYPES = (torch.float32, torch.float64)  # dtypes that `apply_line` supports
HALF_OR_FLOAT = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that `normalize` supports
CENTERED = "centered"  # order for the meta device, where any order does
MIN_COMPARED = 2**18  # compared elements: many, since the orders rarely differ in half precision
VECTOR = 8  # number of channels that kernels vectorize over


def max_pool_with_indices(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return the outputs of `max_pool2d_with_indices`.

    On the CPU, torch's channels-last kernel is three times as fast as its contiguous kernel, given enough channels to
    vectorize over. Maxima are not rounded, so both kernels return the same bits. Half precision uses the contiguous
    kernel, because the other one has different bits for NaN beside infinity.
    """
    is_slow = (
        type(x) is Tensor and x.device.type == "cpu" and x.dtype in LINE_DTYPES and x.ndim == 4 and x.is_contiguous()
    )
    if not is_slow or x.shape[1] < VECTOR:
        first: tuple[Tensor, Tensor] = aten.max_pool2d_with_indices(x, *args, **kwargs)
        return first
    out, indices = aten.max_pool2d_with_indices(x.contiguous(memory_format=torch.channels_last), *args, **kwargs)
    # `contiguous` would keep the strides of sizes of 1.
    return out.clone(memory_format=torch.contiguous_format), indices.clone(memory_format=torch.contiguous_format)


def batch_norm(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs of `native_batch_norm`, and update the running statistics.

    In training on the CPU, torch accumulates each channel in double precision, one element after another. The compiled
    kernel vectorizes over channels in the same order, and takes a third of the time.
    """
    if kwargs or not _can_vectorize(x, *args):
        out: tuple[Tensor, Tensor, Tensor] = aten.native_batch_norm(x, *args, **kwargs)
        return out
    *tensors, _, momentum, eps = args
    fast: tuple[Tensor, Tensor, Tensor] = torch.ops.zoo.batch_norm.default(x, *tensors, momentum, eps)
    return fast


def _can_vectorize(x: Tensor, *args: Any) -> bool:
    *vectors, is_training, _, _ = args
    return (
        is_training
        and type(x) is Tensor
        and x.dtype is torch.float32
        and x.is_contiguous()
        and (1 not in x.shape or x.stride() == _contiguous_strides(x))  # the strides of torch's output
        and x.ndim > 2
        and x.shape[1] % VECTOR == 0
        and x.numel() > x.shape[0] * x.shape[1]  # torch sums single positions in another order
        and name_for(x.device) == "native"
        and all(vector is None or (vector.dtype is torch.float32 and vector.is_contiguous()) for vector in vectors)
        and batch_norm_is_exact()
    )


def _contiguous_strides(x: Tensor) -> tuple[int, ...]:
    return tuple(prod(x.shape[dim + 1 :]) for dim in range(x.ndim))


#: Operation -> faster function with the same bits, also used in forward.
FASTER = {
    aten.max_pool2d_with_indices.default: max_pool_with_indices,
    aten.native_batch_norm.default: batch_norm,
}


def recipe_of_batch_norm(
    operation: Operation, args: tuple[Any, ...], outputs: Any
) -> tuple[Operation, tuple[Any, ...], tuple[Any, ...]]:
    """Return a function that recomputes the first output of a batch norm exactly, and its arguments.

    The arguments are in two parts: the norm's own, and small ones that nothing else modifies. The function does not
    update running statistics. In training, it needs only their dtype, which selects the kernel. It recomputes norms
    from their saved mean and inverse standard deviation, in one pass over x: on the CPU as a scale and shift, on CUDA
    in the order of operations with the bits of the norm. Without Triton, torch's own norms on CUDA run the second of
    their kernels again. Other norms recompute their statistics.
    """
    x, weight, bias, _, _, is_training = args[:6]
    if not is_training:
        return first_output, (operation, *args), ()
    if operation is aten.native_batch_norm.default and has_exact_line(x, weight, bias, outputs[1]):
        return apply_line, (x,), (*line_of(weight, bias, outputs[1], outputs[2]), None, False)
    order = order_of(operation, x, weight, bias, outputs)
    if order is not None:
        return normalize, (x, weight, bias), (outputs[1], outputs[2], order, None, False)
    if operation is aten.native_batch_norm.default and x.is_cuda:
        return aten.batch_norm_elemt.default, (x, weight, bias), (outputs[1], outputs[2], args[7])
    dtype = None if args[3] is None else args[3].dtype
    return repeat_batch_norm, (operation, dtype, x, weight, bias, *args[6:]), ()


def normalize(x: Tensor, *arguments: Any) -> Tensor:
    """Return `zoo.ops.abn.triton.normalize` of x, or a tensor of its shape on the meta device."""
    if x.is_meta:
        return torch.empty_like(x)
    from zoo.ops.abn import triton  # imported late, since only a GPU needs it

    return triton.normalize(x, *arguments)


def order_of(operation: Operation, x: Tensor, weight: Tensor | None, bias: Tensor | None, outputs: Any) -> str | None:
    """Return the order of operations that gives `normalize` the bits of a training-mode batch norm of x on CUDA.

    The kernel, and hence the order, depends on layout and size, so the outputs of each are compared once. None if no
    order or several orders have these bits, or if `normalize` does not support x.
    """
    device = kernel_device_of(x)
    if device.type != "cuda" or name_for(device) != "triton" or x.dtype not in HALF_OR_FLOAT or not _is_dense(x):
        return None
    if x.is_meta:
        return CENTERED
    key = operation, x.shape, x.stride(), x.dtype, x.data_ptr() % 16, x.device, weight is None, bias is None
    if key not in _orders:
        if torch.cuda.is_current_stream_capturing():  # a comparison would wait for the device
            return None
        _orders[key] = _compared_order(operation, x, weight, bias, outputs)
    return _orders[key]


_orders: dict[Any, str | None] = {}


def _compared_order(
    operation: Operation, x: Tensor, weight: Tensor | None, bias: Tensor | None, outputs: Any
) -> str | None:
    """Return the order that reproduces the outputs of the first and last images; None without a unique one."""
    from zoo.ops.abn.triton import ORDERS

    y, mean, invstd = outputs[:3]
    if x.numel() == 0 or y.stride() != x.stride():
        return None
    number = -(-MIN_COMPARED // x[0].numel())
    parts = [(x[:number], y[:number]), (x[-number:], y[-number:])]
    found = [
        order
        for order in (ORDERS if operation is aten.cudnn_batch_norm.default else ORDERS[:1])
        if all(torch.equal(normalize(part, weight, bias, mean, invstd, order), out) for part, out in parts)
    ]
    return found[0] if len(found) == 1 else None


def repeat_batch_norm(
    operation: Operation,
    dtype: torch.dtype | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *settings: float,
) -> Tensor:
    """Return the first output of a training-mode batch norm with running statistics of this dtype; None: without."""
    scratch = (None, None) if dtype is None else x.new_zeros(2, x.shape[1], dtype=dtype)
    out: Tensor = operation(x, weight, bias, *scratch, True, *settings)[0]
    return out


def has_exact_line(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor) -> bool:
    """Return whether `apply_line` recomputes a training-mode batch norm of x bit for bit from its statistics.

    Meta tensors follow the rule of the device that they stand for, so that plans and peaks are the same.
    """
    is_dense = _is_dense(x) and all(vector is None or vector.is_contiguous() for vector in (weight, bias))
    return kernel_device_of(x).type == "cpu" and mean.dtype == x.dtype and is_dense and line_is_exact(x.dtype)


def _is_dense(x: Tensor) -> bool:
    """Return whether x is contiguous or channels-last. Batch norms have kernels for these layouts."""
    return x.is_contiguous() or (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last))


def line_of(weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return (alpha, beta) with batch_norm(x) = alpha x + beta, rounded as in torch's CPU kernel."""
    alpha = invstd.clone() if weight is None else invstd * weight
    zero = torch.zeros_like(alpha) if bias is None else bias
    return alpha, torch.addcmul(zero, mean, alpha, value=-1)  # a fused multiply-add, as in the kernel


def apply_line(
    x: Tensor, alpha: Tensor, beta: Tensor, shortcut: Tensor | None = None, is_rectified: bool = False
) -> Tensor:
    """Return alpha x + beta per channel, plus the shortcut, followed by ReLU if ``is_rectified``.

    The result has the bits of separate operations. The compiled kernel makes one pass over memory, the fallback one per
    operation.
    """
    if name_for(x.device) == "native":
        fused: Tensor = torch.ops.zoo.line.default(x, alpha, beta, shortcut, is_rectified)
        return fused
    # Batch norm adds beta - mean alpha: a product of +0 leaves the sign of a zero beta.
    mean = torch.zeros_like(alpha).copysign(alpha)
    out: Tensor = aten.native_batch_norm(x, alpha, beta, mean, torch.ones_like(alpha), False, 0.0, 0.0)[0]
    if shortcut is not None:
        out.add_(shortcut)
    return out.relu_() if is_rectified else out


#: Recomputed norms that can add a shortcut and apply ReLU, by their last two arguments.
FUSABLE = (apply_line, normalize)


@cache
def batch_norm_is_exact() -> bool:
    """Return whether the kernel of `batch_norm` has the bits of this build of torch. Tests random inputs once."""
    with DisableTorchDispatch(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for shape in ((3, 16, 5, 7), (2, 8, 3, 3), (1, 24, 30)):
            x = 3 * torch.randn(shape) + 1
            weight, bias, *old = torch.rand(4, shape[1])
            ours, torchs = ([statistic.clone() for statistic in old] for _ in range(2))
            outputs = torch.ops.zoo.batch_norm.default(x, weight, bias, *ours, 0.1, 1e-5)
            expected = aten.native_batch_norm(x, weight, bias, *torchs, True, 0.1, 1e-5)
            if not all(map(torch.equal, (*outputs, *ours), (*expected, *torchs))):
                return False
    return True


@cache
def line_is_exact(dtype: torch.dtype) -> bool:
    """Return whether `apply_line` has the bits of a training-mode batch norm with this build of torch on this CPU.

    The C++ compiler decides whether a multiply-add is fused, so this tests random inputs once. False for dtypes other
    than float32 and float64.
    """
    if dtype not in LINE_DTYPES:
        return False
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weight, bias = torch.randn(2, 37, dtype=dtype)
        maps, rows = (3 * torch.randn(shape, dtype=dtype) + 1 for shape in ((3, 37, 5, 7), (16, 37)))
        for x in (maps, maps.contiguous(memory_format=torch.channels_last), rows):
            y, mean, invstd = aten.native_batch_norm(x, weight, bias, None, None, True, 0.0, 1e-5)
            line = x, *line_of(weight, bias, mean, invstd)
            if not (torch.equal(apply_line(*line), y) and torch.equal(apply_line(*line, x, True), (y + x).relu())):
                return False
    return True
