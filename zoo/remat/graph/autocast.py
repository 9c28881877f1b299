"""Autocast in captured graphs: parameters are cast once for all uses, as in eager training.

Eager autocast caches the casts of parameters until its outermost context ends, and the gradients of all uses are summed
in the lower precision. AOTAutograd traces a cast for each use, and sums in float32. `Casts` adds up the uses in a graph
and in several calls of graphs as eager autocast does.

Tested by tests/remat/test_capture.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx

from zoo.remat.graph.nodes import Node, insert_in_backward, is_node
from zoo.remat.rules import ADD
from zoo.torch_internals.compiler import CAST, is_tangent_node

_LINKS = "zoo.links"  # key in the metadata of the cast that stands for a context of autocast


class Casts:
    """The inputs of a graph that eager autocast casts once for all uses: leaves that require gradients.

    Args:
    - `graph`: of Dynamo. The context of autocast begins in the graph, or before it if autocast is enabled now.
    - `inputs`: its inputs.

    ``is_cached`` tells for each input whether it is one.
    """

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> None:
        tensors = [each for each in inputs if isinstance(each, Tensor)]
        before = {each.device.type for each in tensors if torch.is_autocast_enabled(each.device.type)}
        is_cache_enabled = torch.is_autocast_cache_enabled()
        self._contexts = list(_contexts(graph)) if not before else [before] * is_cache_enabled
        self._begins_before = bool(before)
        cached = set().union(*self._contexts)
        self.is_cached = [
            isinstance(each, Tensor) and each.device.type in cached and each.is_leaf and each.requires_grad
            for each in inputs
        ]
        self._cast: list[int] = []  # inputs that nothing reads but casts

    def share(self, graph: Any, num_fwd_outputs: int) -> None:
        """Sum the gradients of an input that a joint graph casts several times before they are cast.

        Raises NotImplementedError if an input may be cast in several contexts of autocast.
        """
        outputs = graph.output_node().args[0]
        assert isinstance(outputs, (list, tuple))
        inputs = [node for node in graph.nodes if node.op == "placeholder" and not is_tangent_node(node)]
        gradients = outputs[num_fwd_outputs:]
        if len(inputs) != len(self.is_cached) or len(gradients) != len(inputs):
            return
        for index, (node, gradient) in enumerate(zip(inputs, gradients, strict=True)):
            casts = [user for user in node.users if user.target is CAST]
            if self.is_cached[index] and casts and is_node(gradient):
                if len(casts) == len(node.users):
                    self._cast.append(index)
                if len(casts) > 1:
                    if len(self._contexts) > 1:
                        raise NotImplementedError("a parameter may be cast in several contexts of autocast")
                    _share(graph, node, gradient)

    def linked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls a compiled graph, whose casts its calls in a context of autocast share."""
        if not (self._begins_before and self._cast):
            return call

        def call_linked(*args: Any) -> Any:
            if not torch.is_grad_enabled():
                return call(*args)
            linked = list(args)
            for index, tensor in zip(self._cast, _link([args[index] for index in self._cast]), strict=True):
                linked[index] = tensor
            return call(*linked)

        return call_linked


def _contexts(graph: fx.GraphModule) -> Iterator[set[str]]:
    """Yield the types of devices of each outermost context of autocast in a graph of Dynamo that caches casts."""
    depth, device_types = 0, set[str]()
    for node in graph.graph.nodes:
        name = getattr(node.target, "__name__", "")
        if name == "_enter_autocast":
            device_type, _, is_enabled, caches = node.args
            device_types |= {device_type} if is_enabled and caches is not False else set()
            depth += 1
        elif name == "_exit_autocast":
            depth -= 1
            if depth == 0 and device_types:
                yield device_types
                device_types = set()


def _share(graph: Any, node: Node, gradient: Node) -> None:
    terms = list(_terms(gradient))
    low = [term.args[0] for term in terms if term.target is CAST]
    if len(terms) - len(low) > 1 or len({term.meta["val"].dtype for term in low}) != 1:
        return
    with graph.inserting_before(graph.output_node()):
        total = low[0]
        for term in low[1:]:
            total = insert_in_backward(graph, ADD, (total, term), {}, term.meta["val"])
        total = insert_in_backward(graph, CAST, (total,), {"dtype": node.meta["val"].dtype}, node.meta["val"])
        for term in terms:
            if term.target is not CAST:
                total = insert_in_backward(graph, ADD, (total, term), {}, node.meta["val"])
    graph.output_node().replace_input_with(gradient, total)


def _terms(node: Node) -> Iterator[Node]:
    """Yield the terms of a sum, in the order in which they are added."""
    if node.target is ADD and not node.kwargs and len(node.users) == 1:
        for term in node.args:
            yield from _terms(term) if is_node(term) else ()
    else:
        yield node


class _Link(torch.autograd.Function):
    """Returns aliases of tensors. Backward rounds the gradients of several calls to the precision of autocast.

    Each call reads the aliases of the call before it, so that the gradients are rounded after each addition. A later
    call in the same context of autocast sets ``state.is_read_again``.
    """

    @staticmethod
    def forward(ctx: Any, state: SimpleNamespace, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.state, ctx.dtype = state, torch.get_autocast_dtype(tensors[0].device.type)
        ctx.set_materialize_grads(False)
        return tuple(each.detach() for each in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if not ctx.state.is_read_again:
            return None, *gradients
        return None, *(None if each is None else each.to(ctx.dtype).to(each.dtype) for each in gradients)


def _link(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return aliases of parameters for a call: of the aliases of the last call in this context of autocast, if any."""
    known = _links_of_context(parameters[0].device)
    sources = []
    for parameter in parameters:
        version, alias, state = known.get(id(parameter), (None, parameter, None))
        if version != parameter._version:  # new, or changed by an optimizer
            alias, state = parameter, None
        if state is not None:
            state.is_read_again = True
        sources.append(alias)
    state = SimpleNamespace(is_read_again=False)
    aliases: list[Tensor] = list(_Link.apply(state, *sources))
    known.update({id(each): (each._version, alias, state) for each, alias in zip(parameters, aliases, strict=True)})
    return aliases


def _links_of_context(device: torch.device) -> dict[int, tuple[int, Tensor, SimpleNamespace]]:
    """Return a dict that lives as long as the outermost context of autocast.

    It belongs to the cast of a leaf of zoo, which autocast holds in its cache until then.
    """
    leaf = _leaf_on(device)
    product: Any = torch.mm(leaf, leaf).grad_fn
    cast = product.next_functions[0][0]
    links: dict[int, tuple[int, Tensor, SimpleNamespace]] = cast.metadata.setdefault(_LINKS, {})
    return links


@cache
def _leaf_on(device: torch.device) -> Tensor:
    return torch.zeros(1, 1, device=device, requires_grad=True)
