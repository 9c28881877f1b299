"""Finds operations of a graph that return other strides than torch has traced."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from zoo.torch_internals import (
    DisableTorchDispatch,
    OperatorOverload,
    schema_of,
    size_hint,
    skip_autograd_and_autocast,
    tree_leaves,
)


class _Layout(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def is_contiguous(self) -> bool:
        expected = torch.empty(self.shape, device="meta").stride()
        return _strides_that_matter(self.shape, self.strides) == _strides_that_matter(self.shape, expected)

    def zeros(self) -> Tensor:
        length = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        zeros = torch.zeros(length, dtype=self.dtype, device=self.device)
        return zeros.as_strided(self.shape, self.strides)


def check_layouts(graph: fx.GraphModule) -> None:
    """Raise NotImplementedError if an operation of a graph returns other strides than torch has traced.

    Eager training then copies where the graph has a view, or calls other kernels, which round differently. Operations
    with a noncontiguous input are called on zeros, once for each layout of the inputs.
    """
    called = set()
    for node in graph.graph.nodes:
        if node.op == "call_function" and _chooses_strides(node.target):
            inputs = [layout for each in node.all_input_nodes if isinstance(layout := _traced(each), _Layout)]
            call = str((node.target, *map_arg((node.args, node.kwargs), _traced)))
            if call not in called and not all(layout.is_contiguous for layout in inputs):
                called.add(call)
                _check(node)


def _check(node: Any) -> None:
    try:
        with DisableTorchDispatch(), skip_autograd_and_autocast():
            args, kwargs = map_arg((node.args, node.kwargs), lambda each: _zeros_of(_traced(each)))
            outputs = node.target(*args, **kwargs)
    except (RuntimeError, ValueError, IndexError):  # zeros are no valid input
        return
    for traced, output in zip(_tensors(node.meta["val"]), _tensors(outputs), strict=False):
        before, after = _layout_of(traced), _layout_of(output)
        if _strides_that_matter(*before[:2]) != _strides_that_matter(*after[:2]):
            raise NotImplementedError(
                f"torch traces {node.target} with the strides {before.strides} of an output that has {after.strides}"
            )


def _chooses_strides(operation: Any) -> bool:
    """Return whether an operation is deterministic and returns new tensors, other than elementwise ones."""
    if not isinstance(operation, OperatorOverload) or schema_of(operation).is_mutable:
        return False
    if {torch.Tag.pointwise, torch.Tag.nondeterministic_seeded} & set(operation.tags):
        return False
    return all(each.alias_info is None for each in schema_of(operation).returns)


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _traced(node: Any) -> Any:
    """Return the traced layout of a tensor, or the number that a node stands for."""
    value = node.meta.get("val")
    return _layout_of(value) if isinstance(value, Tensor) else size_hint(value)


def _layout_of(tensor: Tensor) -> _Layout:
    shape, strides = tuple(map(size_hint, tensor.shape)), tuple(map(size_hint, tensor.stride()))
    return _Layout(shape, strides, tensor.dtype, tensor.device)


def _zeros_of(value: Any) -> Any:
    return value.zeros() if isinstance(value, _Layout) else value


def _strides_that_matter(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    return [stride for size, stride in zip(shape, strides, strict=True) if size > 1 and 0 not in shape]
