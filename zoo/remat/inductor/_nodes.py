"""Properties of nodes in graphs that AOTAutograd traces: tensors, views, symbolic sizes.

``meta["val"]`` of a node is an example of its value.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from zoo.remat._cost import flops_of
from zoo.remat._rules import rule_of
from zoo.torch_internals.compiler import size_hint

aten = torch.ops.aten
Node = Any  # torch.fx.Node, whose type stubs differ between versions of torch


def is_node(value: object) -> bool:
    """Return whether an argument is a node."""
    return isinstance(value, fx.Node)


def is_computed(node: Node) -> bool:
    """Return whether a node is an operation, and not an input, an output or an attribute."""
    return node.op == "call_function"


def is_tensor(node: Node) -> bool:
    """Return whether the value of a node is a tensor, not a tuple of tensors."""
    return isinstance(node.meta.get("val"), Tensor)


def is_symbol(node: Node) -> bool:
    """Return whether a node is a symbolic size."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def are_alike(a: Node, b: Node) -> bool:
    """Return whether two nodes are tensors of the same dtype, shape and strides."""
    first, second = a.meta.get("val"), b.meta.get("val")
    return (
        isinstance(first, Tensor)
        and isinstance(second, Tensor)
        and (first.dtype, first.shape, first.stride()) == (second.dtype, second.shape, second.stride())
    )


def is_view(node: Node) -> bool:
    """Return whether a node is an alias or view of its first input, possibly one of several, as in unbind."""
    if node.target is operator.getitem:
        return is_computed(node.args[0]) and is_view(node.args[0])
    rule = rule_of(node.target)
    return (rule is not None and rule.is_view) or node.target is aten.as_strided.default


def base_of(node: Node) -> Node:
    """Return the node that owns the memory of a node."""
    while is_computed(node) and is_view(node):
        node = node.all_input_nodes[0]
    return node


def inputs_of(node: Node) -> list[Node]:
    """Return the inputs of the operation that computes a node. The node may be one of several outputs."""
    inputs: list[Node] = (node.args[0] if node.target is operator.getitem else node).all_input_nodes
    return inputs


def bytes_of(node: Node) -> int:
    """Return the bytes of all tensors in the value of a node. Symbolic sizes count as in the traced example."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return sum(size_hint(item.numel()) * item.dtype.itemsize for item in values if isinstance(item, Tensor))


def flops_of_node(node: Node) -> float | None:
    """Return the FLOP of a convolution, matrix product or attention without dropout; None for other operations."""
    flops = flops_of(node.target, map_arg(node.args, lambda arg: arg.meta["val"]), node.meta["val"])
    return None if flops is None else float(size_hint(flops))
