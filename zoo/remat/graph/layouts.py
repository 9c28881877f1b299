"""Corrects the strides that torch predicts for outputs while it traces a graph.

Tested by tests/remat/test_capture.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from zoo.torch_internals.compiler import OperatorOverload, is_random, size_hint
from zoo.torch_internals.data import tensors_of, tree_leaves, tree_map
from zoo.torch_internals.dispatch import DisableTorchDispatch, schema_of, skip_autograd_and_autocast


@dataclass(frozen=True)
class _Layout:
    """What a kernel chooses the strides of its outputs by. Symbolic sizes have the values of the traced example."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def is_contiguous(self) -> bool:
        expected = torch.empty(self.shape, device="meta").stride()
        return _are_equal(self.shape, self.strides, expected)

    def zeros(self) -> Tensor:
        length = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return torch.zeros(length, dtype=self.dtype, device=self.device).as_strided(self.shape, self.strides)


def with_real_strides(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
    """Return the fake outputs of an operation with the strides that its kernel chooses.

    Eager training views, copies and calls kernels by the strides, and so must a traced graph. torch predicts some
    wrongly if an input is noncontiguous. Such an operation is called on zeros, once for each layout of its inputs.

    Raises NotImplementedError if torch is wrong about an output of symbolic size.
    """
    inputs = tensors_of((args, kwargs))
    if not _chooses_strides(operation) or any(each.layout is not torch.strided or each.is_meta for each in inputs):
        return outputs
    arguments = tree_map(_layout_of, (args, kwargs))
    if all(each.is_contiguous for each in tree_leaves(arguments) if isinstance(each, _Layout)):
        return outputs
    call = str((operation, arguments))
    if call not in _real_strides:
        _real_strides[call] = _strides_on_zeros(operation, *arguments)
    strides = iter(_real_strides[call])
    return tree_map(lambda output: _corrected(operation, output, next(strides, None)), outputs)


#: Calls -> the strides of their outputs; () for operations that cannot be called on zeros.
_real_strides: dict[str, tuple[Any, ...]] = {}


@cache
def _chooses_strides(operation: Any) -> bool:
    """Return whether an operation is deterministic, has no side effects and returns new tensors."""
    if not isinstance(operation, OperatorOverload) or schema_of(operation).is_mutable:
        return False
    return not is_random(operation) and all(each.alias_info is None for each in schema_of(operation).returns)


def _strides_on_zeros(operation: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    try:
        with DisableTorchDispatch(), skip_autograd_and_autocast():
            args, kwargs = tree_map(lambda each: each.zeros() if isinstance(each, _Layout) else each, (args, kwargs))
            outputs = operation(*args, **kwargs)
    except (RuntimeError, ValueError, IndexError):
        return ()
    return tuple(each.stride() if isinstance(each, Tensor) else None for each in tree_leaves(outputs))


def _corrected(operation: Any, output: Any, strides: tuple[int, ...] | None) -> Any:
    if strides is None or not isinstance(output, Tensor):
        return output
    predicted = _layout_of(output)
    if _are_equal(predicted.shape, predicted.strides, strides):
        return output
    if not all(type(each) is int for each in (*output.shape, *output.stride())):
        raise NotImplementedError(f"{operation} returns the strides {strides}, of which torch predicts others")
    return output.new_empty_strided(predicted.shape, strides)


def _layout_of(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return size_hint(value)
    shape, strides = tuple(map(size_hint, value.shape)), tuple(map(size_hint, value.stride()))
    return _Layout(shape, strides, value.dtype, value.device)


def _are_equal(shape: tuple[int, ...], strides: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return 0 in shape or all(size == 1 or a == b for size, a, b in zip(shape, strides, others, strict=False))
