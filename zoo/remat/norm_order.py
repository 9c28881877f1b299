"""The order in which cuDNN's batch norm rounds, which decides whether backward may recompute it in one pass.

cuDNN's training-mode norm takes its statistics again when it is recomputed: two passes over x, and one each for the sum
and the ReLU after it. `zoo.ops.norm_triton.normalize` takes one pass from the saved statistics. cuDNN does not say how
it rounds, so that `order_of` tries the orders on random inputs.

`ENABLED` is False, because no GPU has shown yet that an order has cuDNN's bits.

Tested by tests/remat/test_norm_order.py and tests/gpu/test_norm_order.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.torch_internals.dispatch import DisableTorchDispatch

aten = torch.ops.aten
ENABLED = False
_orders: dict[Any, int | None] = {}


def order_of(x: Tensor) -> int | None:
    """Return the position in `ORDERS` of an order with the bits of cuDNN's norm; None if there is none, or not enabled.

    It is looked for once per shape, strides, dtype and device of x, for which cuDNN may choose other kernels, and not
    while a CUDA graph is recorded.
    """
    if not ENABLED or not all(type(each) is int for each in (*x.shape, *x.stride())):
        return None
    key = x.shape, x.stride(), x.dtype, x.device
    if key not in _orders:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        _orders[key] = _find_order(*key)
    return _orders[key]


def normalize(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, *rest: Any) -> Tensor:
    """Return what `zoo.ops.norm_triton.normalize` does, which needs Triton."""
    from zoo.ops import norm_triton

    return norm_triton.normalize(x, weight, bias, mean, invstd, *rest)


def _find_order(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> int | None:
    from zoo.ops.norm_triton import ORDERS

    devices = [device] if device.type == "cuda" else []
    with DisableTorchDispatch(), torch.no_grad(), torch.random.fork_rng(devices):
        torch.manual_seed(0)
        x, shortcut = (torch.empty_strided(shape, stride, dtype=dtype, device=device).normal_() for _ in range(2))
        weight, bias = torch.randn(2, shape[1], device=device)
        x.mul_(3).add_(1)
        y, mean, invstd, _ = aten.cudnn_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
        fused = (y + shortcut).relu_()
        for order in range(len(ORDERS)):
            vectors = weight, bias, mean, invstd, order
            if torch.equal(normalize(x, *vectors), y) and torch.equal(normalize(x, *vectors, shortcut, True), fused):
                return order
    return None
