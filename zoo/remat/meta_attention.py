"""Attention on the meta device, as another device computes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.torch_internals.data import tree_leaves, tree_map
from zoo.torch_internals.dispatch import TorchDispatchMode, fake_tensor_mode, scoped_library, without_dispatch_modes


def kernel_device() -> torch.device:
    """Return the device whose attention is counted on the meta device: CUDA's if there is one, otherwise the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def meta_attention() -> Iterator[None]:
    """Return a context in which attention of meta tensors runs the operations that it runs on `kernel_device`.

    `F.scaled_dot_product_attention` chooses between fused kernels and the computation of all scores, by device, shapes
    and dtype. torch has no fused kernel for meta tensors, whose scores would take memory that no device needs.
    """

    def attend(*args: Any, **kwargs: Any) -> Any:
        return _repeat(_trace((args, kwargs)), (args, kwargs))

    with scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", attend, "AutogradMeta")
        yield


class _Trace(TorchDispatchMode):
    """While active, logs operations.

    Args:
    - `inputs`: the arguments of the function that runs them.
    """

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        self.inputs = inputs
        self.output: Any = None
        self.calls: list[tuple[Any, Any, Any]] = []  # operation, arguments, outputs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **kwargs or {})
        if func.namespace != "prim":  # queries such as for a tensor's device
            self.calls.append((func, (args, kwargs or {}), out))
        return out


def _trace(call: tuple[Any, Any]) -> _Trace:
    """Return the operations of attention with these arguments, for tensors without memory on `kernel_device`."""
    device = kernel_device()
    hooks = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach)  # in place of those around it
    with without_dispatch_modes(), hooks, fake_tensor_mode(), torch.autocast(device.type, enabled=False):
        args, kwargs = tree_map(lambda each: _on(device, each) if _is_meta(each) else each, call)
        with _Trace((args, kwargs)) as trace:
            trace.output = F.scaled_dot_product_attention(*args, **kwargs)
    return trace


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    other = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return other.requires_grad_(tensor.requires_grad)


def _repeat(trace: _Trace, call: tuple[Any, Any]) -> Any:
    """Return the output of the traced operations for the meta tensors of the call."""
    known: dict[int, Any] = {}

    def match(traced: Any, found: Any) -> None:
        for key, value in zip(tree_leaves(traced), tree_leaves(found), strict=True):
            if isinstance(key, Tensor):
                known[id(key)] = value

    def translate(value: Any) -> Any:
        return torch.device("meta") if isinstance(value, torch.device) else known.get(id(value), value)

    match(trace.inputs, call)
    for operation, inputs, outputs in trace.calls:
        args, kwargs = tree_map(translate, inputs)
        match(outputs, operation(*args, **kwargs))
    return known[id(trace.output)]


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta
