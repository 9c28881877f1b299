"""Traces a module to find the convolution before each norm, and what else reads the inputs and outputs of norms."""

from __future__ import annotations

import operator
from collections import Counter
from functools import partialmethod
from typing import Any

from torch import fx, nn

from zoo.errors import ConversionError
from zoo.layers.invertible import InvertibleNorm
from zoo.layers.norm import ABN

# The output of these may be overwritten: they do not keep it for backward, and it is not a view of another tensor.
FRESH_MODULES = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.Linear)
FRESH_FUNCTIONS = (nn.functional.conv2d, nn.functional.linear)
IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv)


class _Proxy(fx.Proxy):
    """A proxy that records ``x += y`` and ``x = x + y`` as different operations, which torch.fx does not."""

    def _in_place(self, operation: Any, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operation, (self, other), {})

    __iadd__ = partialmethod(_in_place, operator.iadd)
    __isub__ = partialmethod(_in_place, operator.isub)
    __imul__ = partialmethod(_in_place, operator.imul)
    __itruediv__ = partialmethod(_in_place, operator.itruediv)


class _Tracer(fx.Tracer):
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (ABN, InvertibleNorm)) or super().is_leaf_module(m, module_qualified_name)


class Trace:
    """The calls that one forward pass of a module makes, traced with torch.fx without running it.

    Raises ConversionError if the forward pass depends on values and cannot be traced.
    """

    def __init__(self, module: nn.Module) -> None:
        try:
            graph = _Tracer().trace(module)
        except Exception as error:  # forward is the user's code, here called with proxies: it can raise anything
            raise ConversionError(
                f"{type(module).__name__} cannot be traced, so nothing is known about who needs its norms' inputs "
                f"({type(error).__name__}: {error}); convert the parts of it that can be traced"
            ) from error
        self.modules = dict(module.named_modules())
        self.calls: dict[str, list[fx.Node]] = {}
        for node in graph.nodes:
            if node.op == "call_module":
                self.calls.setdefault(node.target, []).append(node)
        self._num_owners = Counter(
            id(tensor) for part in module.modules() for tensor in part._parameters.values() if tensor is not None
        )

    def module_of(self, node: fx.Node) -> nn.Module | None:
        """Return the module that a node calls; None if it calls none."""
        return self.modules[str(node.target)] if node.op == "call_module" else None

    def convolution_before(self, name: str) -> str | None:
        """Return the name of the Conv2d that the norm ``name`` directly follows and that feeds nothing else.

        None where there is none, or where one of the two is called several times or shares its weight.
        """
        nodes = self.calls.get(name, [])
        if len(nodes) != 1 or len(nodes[0].all_input_nodes) != 1:
            return None
        source = nodes[0].all_input_nodes[0]
        conv = self.module_of(source)
        if type(conv) is not nn.Conv2d or len(source.users) != 1 or len(self.calls[str(source.target)]) != 1:
            return None
        tensors = [
            tensor for tensor in (conv._parameters.get("weight"), conv._parameters.get("bias")) if tensor is not None
        ]
        if conv._parameters.get("weight") is None or any(self._num_owners[id(tensor)] != 1 for tensor in tensors):
            return None
        return str(source.target)

    def why_input_is_needed(self, node: fx.Node) -> str | None:
        """Return why the input of a call may not be overwritten; None if it may."""
        source = node.all_input_nodes[0]
        module = self.module_of(source)
        if not (isinstance(module, FRESH_MODULES) or source.target in FRESH_FUNCTIONS):
            return f"its input comes from {_name(source)} and not from a convolution, so that others may need it"
        others = [_name(user) for user in source.users if user is not node]
        return f"its input, the output of {_name(source)}, is also read by {', '.join(others)}" if others else None

    def overwriters(self, node: fx.Node) -> list[str]:
        """Return the names of the calls that overwrite the output of ``node``."""
        return [_name(user) for user in node.users if self._overwrites(user) and user.all_input_nodes[:1] == [node]]

    def _overwrites(self, node: fx.Node) -> bool:
        module: Any = self.module_of(node)
        if module is not None:
            return bool(getattr(module, "inplace", False))
        return function_name(node).endswith("_") or node.target in IN_PLACE or node.kwargs.get("inplace") is True


def function_name(node: fx.Node) -> str:
    """Return the name of the method or function that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else node.name
