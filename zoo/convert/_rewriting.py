"""Rewrites the forward method of a module to remove activations that its norms take over."""

from __future__ import annotations

import contextlib
import copy
import dis
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator
from functools import partialmethod
from typing import Any

from torch import fx, nn

IN_PLACE_OPERATORS = (operator.iadd, operator.isub, operator.imul, operator.itruediv)
# Syntax in a forward method that a traced graph would not reproduce.
NOT_TRACED_NAMES = frozenset({"isinstance", "hasattr", "type", "is_tensor", "is_grad_enabled"})
NOT_TRACED_OPERATIONS = frozenset({"STORE_ATTR", "STORE_GLOBAL"})


class _Proxy(fx.Proxy):
    """Proxy that distinguishes ``x += y`` from ``x = x + y``, unlike torch.fx."""

    def _in_place(self, operation: Any, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operation, (self, other), {})

    __iadd__ = partialmethod(_in_place, operator.iadd)
    __isub__ = partialmethod(_in_place, operator.isub)
    __imul__ = partialmethod(_in_place, operator.imul)
    __itruediv__ = partialmethod(_in_place, operator.itruediv)


class LocalTracer(fx.Tracer):
    """Traces one forward method; all submodules are leaves."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


class Rewritten:
    """A torch.fx graph that replaces ``owner.forward``.

    The module keeps its class, its submodules and their names; copies and pickles share the graph.

    Args:
    - `owner`: the module.
    - `graph`: the traced calls, with the names of the submodules in ``owner``.
    """

    def __init__(self, owner: nn.Module, graph: fx.Graph) -> None:
        self.owner, self.graph = owner, graph
        self.function = _compiled(graph)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph with the submodules of the owner; return its output."""
        return self.function(self.owner, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, without the function compiled from the graph."""
        return {"owner": self.owner, "graph": self.graph}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state and compile the function."""
        self.__init__(**state)  # type: ignore[misc]


def _compiled(graph: fx.Graph) -> Callable[..., Any]:
    """Compile the graph to a function of the module and its inputs."""
    code = graph.python_code("self")
    namespace = dict(code.globals)
    exec(code.src, namespace)
    function: Callable[..., Any] = namespace["forward"]
    return function


def as_traceable(module: nn.Module) -> nn.Module:
    """Return a copy whose class has the rewritten forward, so that torch.fx finds it; the module if not rewritten."""
    forward = vars(module).get("forward")
    if not isinstance(forward, Rewritten):
        return module
    copied = copy.copy(module)
    copied.__class__ = type(type(module).__name__, (type(module),), {"forward": forward.function})
    return copied


def takes_optional_arguments(module: nn.Module) -> bool:
    """Return whether the forward method has optional arguments."""
    parameters = inspect.signature(module.forward).parameters.values()
    return any(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


@contextlib.contextmanager
def set_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Sets the mode of all submodules, including frozen ones, and restores each mode on exit."""
    modes = {part: part.training for part in module.modules()}
    try:
        for part in modes:
            part.training = training
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def trace_forward(module: nn.Module) -> fx.Graph | str:
    """Return the graph of the forward method of ``module``, or the reason why a graph would not be equivalent."""
    if not isinstance(vars(module).get("forward"), Rewritten):
        if takes_optional_arguments(module):
            return "takes optional arguments"
        operations = {(each.opname, each.argval) for each in dis.get_instructions(inspect.unwrap(type(module).forward))}
        if any(name in NOT_TRACED_OPERATIONS for name, _ in operations):
            return "sets attributes"
        if names := sorted(NOT_TRACED_NAMES & {value for _, value in operations if isinstance(value, str)}):
            return f"calls {', '.join(names)}"
    graphs = []
    for training in (False, True):
        try:
            with set_mode(module, training):
                graphs.append(LocalTracer().trace(as_traceable(module)))
        except Exception as error:  # user code called with proxies can raise anything
            return f"cannot be traced by itself ({type(error).__name__}: {error})"
    in_evaluation, in_training = (graph.python_code("self").src for graph in graphs)
    return graphs[1] if in_evaluation == in_training else "differs between evaluation and training"


def activation_behind(module: nn.Module, graph: fx.Graph, norm: str) -> fx.Node | None:
    """Return the only call that reads the output of the submodule ``norm``; None if there are several or none."""
    nodes = [node for node in graph.nodes if node.op == "call_module" and node.target == norm]
    while len(nodes) == 1 and len(nodes[0].users) == 1:
        nodes = list(nodes[0].users)
        if nodes[0].op != "call_module" or type(module.get_submodule(str(nodes[0].target))) is not nn.Identity:
            return nodes[0]
    return None


def drop_activations(module: nn.Module, norms: Iterable[str]) -> None:
    """Rewrite the forward method of ``module`` without the activation after each of ``norms`` (`activation_behind`)."""
    graph = trace_forward(module)
    assert isinstance(graph, fx.Graph)
    for norm in norms:
        activation = activation_behind(module, graph, norm)
        assert activation is not None
        activation.replace_all_uses_with(activation.all_input_nodes[0])
        graph.erase_node(activation)
    graph.lint()
    module.forward = Rewritten(module, graph)
