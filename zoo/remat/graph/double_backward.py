"""Double backward of captured graphs, which AOTAutograd refuses: the graph runs again, operation by operation.

If autograd records the backward of a graph (``create_graph=True``), its gradients come from a second forward pass
through the graph of Dynamo, which autograd records as well.

Tested by tests/remat/test_capture.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter

from zoo.errors import ConfigError
from zoo.remat.graph.cudnn_norm import CUDNN_BATCH_NORM
from zoo.remat.graph.nodes import Node
from zoo.torch_internals.compiler import BATCH_NORM, is_compiled_node, is_random, is_tangent_node
from zoo.torch_internals.data import set_versions

aten = torch.ops.aten


class Repetition:
    """What running a graph of Dynamo a second time takes.

    Args:
    - `graph`: the graph. Autocast is in the state in which it will run.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        self._graph = graph
        self._autocast = [
            (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)) for device in ("cpu", "cuda")
        ]
        self._is_random = False
        self._is_statistic: list[bool] = []
        self._of_norms: list[int] = []

    def inspect(self, joint: fx.Graph) -> None:
        """Find random operations and statistics in the joint graph that AOTAutograd has traced of the graph."""
        nodes: list[Node] = list(joint.nodes)
        self._is_random = any(is_random(node.target) for node in nodes)
        inputs = [node for node in nodes if node.op == "placeholder" and not is_tangent_node(node)]
        self._is_statistic = [_is_statistic(node) for node in inputs]

    def inspect_saved(self, forward: fx.Graph) -> None:
        """Find the running statistics of norms that the forward graph updates and does not save for backward."""
        (saved,) = forward.output_node().args
        assert isinstance(saved, (list, tuple))
        inputs: list[Node] = list(forward.find_nodes(op="placeholder"))
        self._of_norms = [
            index
            for index, node in enumerate(inputs)
            if self._is_statistic[index] and _is_of_norm(node) and node not in saved
        ]

    def differentiable(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function like ``run``, which runs the compiled graph, but with double backward."""

        def call(*args: Any) -> Any:
            if not torch.is_grad_enabled():
                return run(*args)
            versions = [_version_of(each) for each in args]
            outputs = run(*args)
            if self._of_norms:
                # Norms of eager training, which may have saved their statistics for backward, do not count this write.
                set_versions([args[index] for index in self._of_norms], [versions[index] for index in self._of_norms])
            found = {node for each in outputs if isinstance(each, Tensor) and is_compiled_node(node := _node_of(each))}
            if len(found) > 1:  # an output may be an input, which has a history of its own
                found -= {each.grad_fn for each in args if isinstance(each, Tensor)}
            for node in found:
                numbers = [
                    each.output_nr if isinstance(each, Tensor) and each.grad_fn is node else None for each in outputs
                ]
                # What is no parameter is not kept alive longer than by plain training.
                inputs = [
                    each if isinstance(each, Parameter) or not isinstance(each, Tensor) else weakref.ref(each)
                    for each in args
                ]
                self._register(node, inputs, versions, numbers)
            return outputs

        return call

    def _register(self, node: Any, inputs: list[Any], versions: list[int], numbers: list[int | None]) -> None:
        """Let a node of autograd return gradients that can be differentiated, where autograd asks for these."""
        live: Any = weakref.ref(node)

        def replace(gradients: Sequence[Any], given: Sequence[Any]) -> Any:
            try:
                return self._gradients(live(), inputs, versions, numbers, given)
            except _Impossible as error:
                tensors = [each for each in gradients if each is not None]
                refused = iter(_Refusal.apply(str(error), *tensors))
                return tuple(None if each is None else next(refused) for each in gradients)

        def prepare(given: Sequence[Any]) -> None:
            if torch.is_grad_enabled():  # a hook that is registered earlier would keep what is given alive
                current: Any = live()
                handle: Any = current.register_hook(lambda *args: (handle.remove(), replace(*args))[1])

        node.register_prehook(prepare)

    def _gradients(
        self, node: Any, inputs: list[Any], versions: list[int], numbers: list[int | None], given: Sequence[Any]
    ) -> tuple[Tensor | None, ...]:
        if self._is_random:
            raise _Impossible("it draws random numbers")
        if len(self._is_statistic) != len(inputs):
            raise _Impossible("torch has changed its inputs")
        args = [each() if isinstance(each, weakref.ref) else each for each in inputs]
        for index, (arg, version) in enumerate(zip(args, versions, strict=True)):
            if arg is None and inputs[index] is not None:
                raise _Impossible("one of its inputs was freed")
            if isinstance(arg, Tensor) and self._is_statistic[index]:
                args[index] = arg.clone()
            elif _version_of(arg) != version:
                raise _Impossible("one of its inputs was overwritten")
        with ExitStack() as contexts:
            for device, dtype, is_enabled in self._autocast:
                contexts.enter_context(torch.autocast(device, dtype, is_enabled))
            outputs = self._graph(*args)
        pairs = [
            (outputs[index], given[n]) for index, n in enumerate(numbers) if n is not None and given[n] is not None
        ]
        if len(pairs) < sum(each is not None for each in given):
            raise _Impossible("its outputs share memory")
        sources = [each for each in args if isinstance(each, Tensor) and each.requires_grad]
        ends, starts = zip(*pairs, strict=True)
        new = torch.autograd.grad(ends, sources, starts, create_graph=True, allow_unused=True)
        gradients = dict(zip(map(get_gradient_edge, sources), new, strict=True))
        edges = [
            None if function is None else GradientEdge(function, number) for function, number in node.next_functions
        ]
        if any(edge is not None and edge not in gradients for edge in edges):
            raise _Impossible("torch has changed its inputs")
        return tuple(None if edge is None else gradients[edge] for edge in edges)


def _version_of(arg: Any) -> int:
    """Return the version of a tensor; 0 for an inference tensor, which has none, and for other arguments."""
    return arg._version if isinstance(arg, Tensor) and not arg.is_inference() else 0


def _node_of(output: Tensor) -> Any:
    """Return the node of autograd that has computed an output, or what an output is a view of."""
    node = output.grad_fn
    if node is None or is_compiled_node(node) or not node.next_functions:
        return node
    return node.next_functions[0][0]


class _Impossible(Exception):
    """Why a graph cannot run a second time."""


class _Refusal(torch.autograd.Function):
    """Returns gradients whose own gradients do not exist."""

    @staticmethod
    def forward(ctx: Any, reason: str, *gradients: Tensor) -> tuple[Tensor, ...]:
        ctx.reason = reason
        return tuple(each.detach() for each in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ConfigError(
            f"double backward is not possible for a captured graph: {ctx.reason}",
            "zoo.lean(capture=True)",
            "pass capture=False",
        )


def _is_statistic(place: Node) -> bool:
    """Return whether an input matters for its own new value alone, as the running statistics of a batch norm do."""
    written = {user for user in place.users if user.target is aten.copy_.default and user.args[0] is place}
    return bool(written) and all(
        user in written
        or _is_of_norm_at(place, user)
        or all(each.target is aten.copy_.default and each.args[0] is place for each in user.users)
        for user in place.users
    )


def _is_of_norm(place: Node) -> bool:
    return any(_is_of_norm_at(place, user) for user in place.users)


def _is_of_norm_at(place: Node, norm: Node) -> bool:
    """Return whether an input is a running statistic of a training-mode batch norm."""
    return norm.target in (BATCH_NORM, CUDNN_BATCH_NORM) and norm.args[5] and place not in norm.args[:3]
