"""Traces a module to find the layer before each norm and all readers of the norms' inputs and outputs."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import operator
import os
from collections import Counter
from typing import Any

import torch
from torch import fx, nn

from zoo.convert._rewriting import IN_PLACE_OPERATORS, LocalTracer, as_traceable, takes_optional_arguments
from zoo.errors import ConversionError
from zoo.layers.invertible import InvertibleNorm
from zoo.layers.norm import ABN
from zoo.layers.reversible import ReversibleSequential
from zoo.torch_internals.data import BatchNormBase, DropoutBase

# Modules whose outputs may be overwritten: they are not saved for backward and are not views.
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LINEAR_MODULES = (*CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS, nn.Linear)  # negated weights negate the output
FRESH_MODULES = (*LINEAR_MODULES, nn.AvgPool2d, nn.AvgPool3d, nn.MaxPool2d, nn.MaxPool3d)
FRESH_FUNCTIONS = (
    nn.functional.conv1d,
    nn.functional.conv2d,
    nn.functional.conv3d,
    nn.functional.conv_transpose1d,
    nn.functional.conv_transpose2d,
    nn.functional.conv_transpose3d,
    nn.functional.linear,
    torch.cat,
    torch.add,
    operator.add,
)
# Modules whose outputs can be the input or a view of it.
MAY_ALIAS_INPUT = (
    *("chunk", "contiguous", "detach", "dropout", "dropout2d", "expand", "expand_as", "flatten", "getitem", "narrow"),
    *("permute", "reshape", "select", "split", "squeeze", "t", "to", "transpose", "type_as", "unbind", "unflatten"),
    *("unsqueeze", "view", "view_as"),
)
# Folders of the frames between a forward method and `_Tracer.create_node`.
TRACING_CODE = tuple(os.path.join(os.path.dirname(file), "") for file in (torch.__file__, __file__))


class _Tracer(LocalTracer):
    """Traces into all modules except torch's own and norms; modules that cannot be traced become leaf calls.

    ``failed`` maps names of modules to the reasons.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failed: dict[str, str] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (ABN, InvertibleNorm, BatchNormBase)) or fx.Tracer.is_leaf_module(
            self, m, module_qualified_name
        )

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if type(m) is nn.Identity and len(args) == 1:
            return args[0]  # the same tensor: overwriting it overwrites the input
        last, stack = next(iter(reversed(self.graph.nodes))), self.module_stack.copy()
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception as error:  # user code called with proxies can raise anything
            self.module_stack = stack
            while (node := next(iter(reversed(self.graph.nodes)))) is not last:
                self.graph.erase_node(node)
            name = self.path_of_module(m)
            self.failed = {other: why for other, why in self.failed.items() if not other.startswith(f"{name}.")}
            self.failed[name] = _reason(error)
            return self.create_proxy("call_module", name, args, kwargs)

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Create a node with ``meta["owner"]``, the module whose forward method makes the call, and its source line."""
        node = super().create_node(kind, target, *args, **kwargs)
        owners = ["", *(path for path, _ in self.module_stack.values())]
        node.meta["owner"] = owners[-2] if kind == "call_module" and owners[-1] == target else owners[-1]
        node.meta["line"] = _calling_line() if kind in ("call_function", "call_method") else ""
        return node


class Trace:
    """The calls of a module's forward pass, traced with torch.fx.

    A submodule whose forward depends on values cannot be traced: ``failed`` has its name and the reason, and its own
    submodules are traced one by one.

    Args:
    - `module`: the module.
    - `in_parts`: if the forward method of ``module`` itself cannot be traced, trace its submodules instead of raising
      ConversionError.
    """

    def __init__(self, module: nn.Module, in_parts: bool = False) -> None:
        self.modules = dict(module.named_modules())
        self.calls: dict[str, list[fx.Node]] = {}
        self.failed: dict[str, str] = {}
        self._part_of: dict[fx.Graph, str] = {}
        parts = [""]
        while parts:
            part = parts.pop()
            if failed := self._trace_part(part):
                if "" in failed and not in_parts:
                    raise ConversionError(
                        f"{type(module).__name__} cannot be traced, so the readers of its norms' inputs are unknown "
                        f"({failed['']}); convert the submodules that can be traced, as partial=True does"
                    )
                self.failed |= failed
                parts += [_join(name, child) for name in failed for child, _ in self.modules[name].named_children()]
        if self.failed:  # an untraced module may call a shared module by another name
            names = Counter(id(part) for _, part in module.named_modules(remove_duplicate=False))
            self.calls = {name: nodes for name, nodes in self.calls.items() if names[id(self.modules[name])] == 1}
        self._num_owners = Counter(
            id(tensor) for part in module.modules() for tensor in part._parameters.values() if tensor is not None
        )

    def _trace_part(self, part: str) -> dict[str, str]:
        """Trace one module and add its calls; return the modules that could not be traced, with reasons."""
        module, tracer = self.modules.get(part), _Tracer()
        if module is None or (part and tracer.is_leaf_module(module, part)):
            return {}  # an alias of another module, or a leaf
        if part and takes_optional_arguments(module):
            return {part: "it takes optional arguments, and its call is unknown"}
        try:
            graph = tracer.trace(as_traceable(module))
        except Exception as error:  # user code called with proxies can raise anything
            return {part: _reason(error)}
        self._part_of[graph] = part
        names = {id(module): name for name, module in self.modules.items()}
        own_names = {name: names[id(child)] for name, child in module.named_modules()}
        for node in graph.nodes:
            if node.op == "call_module":
                node.target = own_names[str(node.target)]
                self.calls.setdefault(node.target, []).append(node)
            node.meta["owner"] = own_names[node.meta["owner"]]
        return {own_names[name]: reason for name, reason in tracer.failed.items()}

    def untraced_reason(self, name: str) -> str | None:
        """Return why the calls of the module ``name`` are unknown; None if no enclosing module failed."""
        around = [other for other in self.failed if other == "" or name.startswith(f"{other}.")]
        if not around:
            return None
        nearest = max(around, key=len)
        return f"{nearest or 'the module itself'} cannot be traced ({self.failed[nearest]})"

    def module_of(self, node: fx.Node) -> nn.Module | None:
        """Return the module that a node calls; None for functions and methods."""
        return self.modules[str(node.target)] if node.op == "call_module" else None

    def num_calls(self, node: fx.Node) -> int:
        """Return how often the module of a node is called; 0 if not all calls are known."""
        return len(self.calls.get(str(node.target), []))

    def producer_of(self, name: str) -> str | None:
        """Return the name of the convolution or linear layer whose output only the norm ``name`` reads.

        Returns None if there is none, if either is called several times, or if the layer shares a parameter.
        """
        nodes = self.calls.get(name, [])
        if len(nodes) != 1 or len(nodes[0].all_input_nodes) != 1:
            return None
        source = nodes[0].all_input_nodes[0]
        layer: Any = self.module_of(source)
        if type(layer) not in LINEAR_MODULES or len(source.users) != 1 or self.num_calls(source) != 1:
            return None
        channels = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
        norm: Any = self.modules[name]
        if channels != norm.num_features:  # a linear layer whose output is (N, C, features), for example
            return None
        tensors = [tensor for key in ("weight", "bias") if (tensor := layer._parameters.get(key)) is not None]
        if layer._parameters.get("weight") is None or any(self._num_owners[id(tensor)] != 1 for tensor in tensors):
            return None
        return str(source.target)

    def input_needed_reason(self, node: fx.Node) -> str | None:
        """Return why a call may not overwrite its input; None if it may."""
        source = node.all_input_nodes[0]
        module = self.module_of(source)
        if not (isinstance(module, FRESH_MODULES) or source.target in FRESH_FUNCTIONS):
            return (
                f"its input comes from {describe_call(source)}, not from a convolution or linear layer, "
                "so others may need it"
            )
        if module is None and isinstance(self.modules[source.meta["owner"]], ReversibleSequential):
            return f"its input is the output of {source.meta['owner']}, which backward inverts"
        others = [describe_call(user) for user in source.users if user is not node]
        if not others:
            return None
        return f"its input, the output of {describe_call(source)}, is also read by {', '.join(others)}"

    def overwriters(self, node: fx.Node) -> list[str]:
        """Return the names of calls that overwrite, or may overwrite, the output of ``node`` or a view of it."""
        names = []
        for user in node.users:
            if user.op == "output":
                if part := self._part_of[user.graph]:
                    names.append(f"unknown readers of the output of {part}")
            elif self._is_opaque(user) or (user.all_input_nodes[:1] == [node] and self._overwrites(user)):
                names.append(describe_call(user))
            elif self._may_be_view(user):
                names += self.overwriters(user)
        return names

    def _overwrites(self, node: fx.Node) -> bool:
        module: Any = self.module_of(node)
        if module is not None:
            return bool(getattr(module, "inplace", False))
        return function_name(node).endswith("_") or node.target in IN_PLACE_OPERATORS or _has_inplace_argument(node)

    def _is_opaque(self, node: fx.Node) -> bool:
        return node.op == "call_module" and node.target in self.failed

    def _may_be_view(self, node: fx.Node) -> bool:
        if (module := self.module_of(node)) is not None:
            return isinstance(module, (nn.Flatten, nn.Unflatten, DropoutBase))
        return function_name(node) in MAY_ALIAS_INPUT


def _calling_line() -> str:
    """Return the source line of the call that is being traced; "" if it is unknown."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not Trace._trace_part.__code__:
        if not frame.f_code.co_filename.startswith(TRACING_CODE):
            return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        frame = frame.f_back
    return ""


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition('. ')[0]}"


def _join(parent: str, child: str) -> str:
    return f"{parent}.{child}" if parent else child


def function_name(node: fx.Node) -> str:
    """Return the name of the method or function that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def describe_call(node: fx.Node) -> str:
    """Return the name of the module that a node calls; for other calls the source line and its location."""
    if node.op == "call_module":
        return str(node.target)
    if not node.meta["line"]:  # an input, or a line of a rewritten forward method
        return node.name
    return f"`{node.meta['line']}`" + (f" in {node.meta['owner']}" if node.meta["owner"] else "")


def _has_inplace_argument(node: fx.Node) -> bool:
    arguments: Any = node.kwargs
    if callable(node.target):
        with contextlib.suppress(TypeError, ValueError):  # a function without a signature
            arguments = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
    return arguments.get("inplace") is True
