"""Lets attention on the meta device run the operations of another device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from zoo.torch_internals.data import tree_map
from zoo.torch_internals.dispatch import fake_tensor_mode, scoped_library, without_dispatch_modes


def kernel_device() -> torch.device:
    """Return the device whose kernels the meta device counts: CUDA if available, otherwise the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def kernel_device_of(x: Tensor) -> torch.device:
    """Return the device of a tensor; `kernel_device` for the meta device."""
    return kernel_device() if x.is_meta else x.device


@contextmanager
def meta_attention() -> Iterator[None]:
    """Runs attention of meta tensors with the operations of `kernel_device`.

    `F.scaled_dot_product_attention` chooses between fused kernels and the computation of all scores, by device, shapes
    and dtype. torch has no fused kernel for meta tensors: it would create all scores, while fused kernels store none.
    """

    def attend(*args: Any, **kwargs: Any) -> Any:
        return _operations_of(args, kwargs).run(args, kwargs)

    with scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", attend, "AutogradMeta")
        yield


def _operations_of(args: Any, kwargs: Any) -> fx.Interpreter:
    """Trace attention with these arguments on `kernel_device`; return an interpreter for meta tensors."""
    device = kernel_device()
    hooks = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach)  # hides outer hooks
    with without_dispatch_modes(), hooks, fake_tensor_mode(), torch.autocast(device.type, enabled=False):
        on_device = tree_map(lambda each: _on(device, each) if _is_meta(each) else each, (args, kwargs))
        traced = make_fx(lambda args, kwargs: F.scaled_dot_product_attention(*args, **kwargs))(*on_device)
    for node in traced.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("meta")}
    return fx.Interpreter(traced, garbage_collect_values=False)


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    other = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return other.requires_grad_(tensor.requires_grad)


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta
