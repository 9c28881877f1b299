"""Captured lean training: torch.compile captures graphs, which run as eager kernels and save what `zoo.lean` saves.

A captured graph runs without a dispatch mode and without hooks for saved tensors, and has the bits of eager `zoo.lean`.
"""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import Parameter

from zoo import torch_internals
from zoo.errors import ConfigError
from zoo.ops.abn import native
from zoo.ops.abn.backend import kernels_for
from zoo.remat import cudnn_norm
from zoo.remat.autocast import Casts
from zoo.remat.budget import Budget
from zoo.remat.joint_graph import partition
from zoo.remat.layouts import with_real_strides
from zoo.remat.nodes import Node, are_alike, is_node
from zoo.remat.operations import FASTER, IN_PLACE, LINE_DTYPES, batch_norm_is_exact, line_is_exact
from zoo.remat.planning import plan
from zoo.remat.rematerializer import Rematerializer
from zoo.torch_internals import OperatorOverload, aot_backend, boxed, inductor_partitioner, restarts_tracing, schema_of

logger = logging.getLogger("zoo")

COMMUTATIVE = {torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor}


class NotCaptured(UserWarning):
    """A graph cannot be captured, so that it runs in eager `zoo.lean`."""


def backend(
    graph: fx.GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph of Dynamo for `torch.compile(model, backend="zoo_lean")`.

    Forward and backward run the kernels of eager training, and have its bits. Forward saves what `zoo.lean` would save.
    A graph that AOTAutograd cannot trace runs in eager `zoo.lean`, with one `NotCaptured` warning.

    Args:
    - `options`: of torch.compile; ``{"budget": 0.4}`` is the budget of `zoo.lean`. A limit holds for each graph, from
      the first step on. One in bytes limits the inputs, outputs and tensors of a graph. It does not include the
      state of an optimizer and the scratch memory of operations.
    """
    budget = Budget.parse((options or {}).get("budget"))
    for dtype in LINE_DTYPES:
        line_is_exact(dtype)  # now, as it cannot be measured while torch traces
    if kernels_for(torch.empty(0)) is native:
        batch_norm_is_exact()
    try:
        parameters = [isinstance(each, Parameter) for each in inputs]
        casts = Casts(graph, inputs)
        rule = partial(partition, budget=budget, casts=casts, parameters=parameters)
        call = aot_backend(_run_eagerly, rule, with_real_strides)(cudnn_norm.with_kept_norms(graph), inputs)
        return casts.linked(call)
    except ConfigError:  # an impossible budget
        raise
    except Exception as error:  # whatever AOTAutograd or the partitioner cannot handle
        if restarts_tracing(error):
            raise
        warnings.warn(
            f"a graph of {len(graph.graph.nodes)} operations cannot be captured and runs in eager zoo.lean "
            f"({type(error).__name__}: {str(error).partition(chr(10))[0][:200]})",
            NotCaptured,
            stacklevel=2,
        )
        logger.debug("the graph cannot be captured", exc_info=True)
        return partial(_run_rematerialized, graph, budget)


def inductor_options(budget: float | int | str | None = None) -> dict[str, Any]:
    """Return ``options`` for torch.compile, with which Inductor's graphs save what `zoo.lean` would save.

    ``torch.compile(model, options=zoo.remat.inductor_options())`` fuses recomputation into backward's kernels.
    Results equal those of other compiled training to rounding. Random numbers are drawn once. Without a GPU, Inductor's
    layout optimization is off: it would hold a copy of each convolution's weights from forward to backward.

    Args:
    - `budget`: the budget of `zoo.lean`; a limit holds for each graph, see `zoo.remat.capture.backend`.
    """
    rule = partial(partition, budget=Budget.parse(budget), is_eager=False)
    sources = map(str, [*Path(__file__).parent.glob("*.py"), torch_internals.__file__])
    options: dict[str, Any] = {"custom_partitioner_fn": inductor_partitioner(rule, *sources, key=repr(budget))}
    return options if torch.cuda.is_available() else {**options, "layout_optimization": False}


def _run_rematerialized(graph: fx.GraphModule, budget: Budget, *args: Any) -> Any:
    parameters = [arg for arg in args if isinstance(arg, Parameter)]
    rematerializer = partial(Rematerializer, parameters=[*parameters, *graph.parameters(), *graph.buffers()])
    if budget.peak_bytes is not None:
        plan(budget, graph, rematerializer, graph, args, {})
    with rematerializer(budget):
        return graph(*args)


def _run_eagerly(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return a function that runs the operations of a graph one by one."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.bernoulli.p):
        node.target = _draw_mask
    write_in_place(graph)
    for operation, faster in FASTER.items():
        for node in graph.graph.find_nodes(op="call_function", target=operation):
            node.target = faster
    return boxed(graph)


def _draw_mask(x: Tensor, p: float) -> Tensor:
    """Return a mask in the layout of x, as the in-place operation of eager training does."""
    return torch.empty_like(x).bernoulli_(p)


def write_in_place(graph: fx.GraphModule) -> None:
    """Let elementwise operations overwrite an input that nothing reads any more.

    AOTAutograd has replaced the in-place operations of the network by functional ones, and autograd accumulates
    gradients in place. The results are bit-identical.
    """
    for node in graph.graph.nodes:
        if node.target not in IN_PLACE or node.kwargs.get("alpha", 1) != 1:
            continue
        candidates = node.args[:2] if node.target in COMMUTATIVE else node.args[:1]
        for index, source in enumerate(candidates):
            if is_node(source) and _may_overwrite(source, node):
                if index == 1:
                    node.args = (node.args[1], node.args[0], *node.args[2:])
                node.target = IN_PLACE[node.target]
                break


def _may_overwrite(source: Node, node: Node) -> bool:
    """Return whether ``node`` is all that reads a tensor, which shares its memory with no other and is alike."""
    is_read_once = list(source.users) == [node] and sum(arg is source for arg in node.args) == 1
    return is_read_once and are_alike(source, node) and _is_fresh(source)


def _is_fresh(node: Node) -> bool:
    """Return whether the memory of an output belongs to no other tensor."""
    maker = node.args[0] if node.target is operator.getitem else node
    if not is_node(maker) or not isinstance(maker.target, OperatorOverload):
        return False
    schema = schema_of(maker.target)
    if maker.target in IN_PLACE.values():
        return True  # overwrites a fresh tensor
    if "unsafe" in schema.name:  # as in _unsafe_view: a view, which its schema does not say
        return False
    return not schema.is_mutable and all(each.alias_info is None for each in schema.returns)
