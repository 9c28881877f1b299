"""Captured lean training: torch.compile captures graphs, which run as eager kernels and save what `zoo.lean` saves.

A captured graph runs without a dispatch mode and without hooks for saved tensors, and has the bits of eager `zoo.lean`.

Tested by tests/remat/test_capture.py.
"""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import Parameter

from zoo.errors import ConfigError
from zoo.ops.abn.backend import name_for
from zoo.remat.budget import Budget
from zoo.remat.eager.rematerializer import Rematerializer
from zoo.remat.graph import cudnn_norm
from zoo.remat.graph.autocast import Casts
from zoo.remat.graph.double_backward import Repetition
from zoo.remat.graph.joint_graph import partition
from zoo.remat.graph.layouts import with_real_strides
from zoo.remat.graph.nodes import Node, are_alike, is_node
from zoo.remat.rules import FASTER, IN_PLACE, LINE_DTYPES, batch_norm_is_exact, line_is_exact
from zoo.torch_internals import compiler
from zoo.torch_internals.compiler import (
    OperatorOverload,
    aot_backend,
    boxed,
    compile_whole,
    failed_to_compile,
    graph_break,
    inductor_partitioner,
    is_passing,
    reason_of,
    restarts_tracing,
)
from zoo.torch_internals.dispatch import schema_of

logger = logging.getLogger("zoo")

aten = torch.ops.aten
TRANSPOSE = aten.t.default
COMMUTATIVE = {aten.add.Tensor, aten.mul.Tensor}


class NotCaptured(UserWarning):
    """A module or a graph cannot be captured, so that it runs in eager `zoo.lean`."""


class CapturedForward:
    """The graphs of a module's forward, one for each kind of input. A copy, or an unpickled one, has none.

    A graph holds the whole forward. If torch.compile cannot capture it as one graph, because it calls ``Tensor.item``,
    for example, all of it runs in eager `zoo.lean`: several graphs would hold what crosses their boundaries, and sum
    the gradients of a parameter that they share in another order than plain training.
    """

    def __init__(self) -> None:
        self._run: Callable[..., Any] | None = None
        self.is_given_up = False  #: whether forward cannot be captured

    def __reduce__(self) -> Any:
        return CapturedForward, ()

    def discard(self) -> None:
        """Forget the graphs, so that the next call captures one with the present price of its budget."""
        self._run = None

    def __call__(self, forward: Callable[..., Any], args: Any, kwargs: Any, budget: Budget, eager: Any) -> Any:
        """Return ``forward(*args, **kwargs)``, by a graph or by ``eager``, which takes the same arguments.

        Gives up with a `NotCaptured` warning if ``eager`` succeeds where torch.compile fails. Nothing is given up if
        torch.compile is turned off or has captured too many graphs for other inputs.
        """
        if self._run is None:
            self._run = compile_whole(partial(_compile, budget=budget))
        try:
            return self._run(forward, *args, **kwargs)
        except Exception as error:
            if not failed_to_compile(error):
                raise
            reason = None if is_passing(error) else reason_of(error)
        out = eager(*args, **kwargs)  # raises the error of plain training, if there is one
        if reason is not None:
            remedy = "zoo.lean(part, capture=True) captures a part of it"
            self.give_up(forward, f"it cannot be captured as one graph: {reason}; {remedy}")
        return out

    def give_up(self, forward: Callable[..., Any], reason: str) -> None:
        """Let all further calls run in eager `zoo.lean`, with a `NotCaptured` warning."""
        self.is_given_up = True
        name = type(getattr(forward, "__self__", forward)).__name__
        warnings.warn(f"{name} runs in eager zoo.lean, as {reason}", NotCaptured, stacklevel=6)


def backend(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo for `torch.compile(model, backend="zoo_lean")`.

    Forward and backward run the kernels of eager training, and have its bits. Forward saves what `zoo.lean` would save.
    A graph that AOTAutograd cannot trace runs in eager `zoo.lean`, with one `NotCaptured` warning. What torch.compile
    does not capture runs as in plain training; a graph that ends for this reason warns too.

    Args:
    - `options`: of torch.compile; ``{"budget": 0.4}`` is the budget of `zoo.lean`. A fraction holds for each graph,
      from the first step on. For a limit in bytes, use ``zoo.lean(model, "8GB", capture=True)``.
    - `mode`: of torch.compile.

    Raises ConfigError for another option, a mode, an invalid budget, or one in bytes.
    """
    place = 'torch.compile(backend="zoo_lean")'
    if mode is not None:
        raise ConfigError(f"mode={mode!r} is one of Inductor's modes", place, "leave it out")
    for name in options or {}:
        if name != "budget":
            raise ConfigError(f"option {name!r} is unknown", place, 'the only option is "budget"')
    budget = Budget.parse((options or {}).get("budget"))
    budget.check_planned(place)
    breaks = graph_break(graph)
    if breaks is not None:
        warnings.warn(
            f"torch.compile breaks the graph ({breaks}); what it does not capture runs in plain training; "
            "zoo.lean(model, capture=True) runs such a network in eager zoo.lean",
            NotCaptured,
            stacklevel=2,
        )
    try:
        return _compile(graph, inputs, budget=budget)
    except Exception as error:  # everything that AOTAutograd or the partitioner cannot handle
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


def _compile(graph: fx.GraphModule, inputs: Sequence[Any], *, budget: Budget) -> Callable[..., Any]:
    """Return a function that runs a graph of Dynamo with the kernels of eager training, and saves what lean saves."""
    for dtype in LINE_DTYPES:
        line_is_exact(dtype)  # now, as it cannot be measured while torch traces
    if name_for(torch.device("cpu")) == "native":
        batch_norm_is_exact()
    repetition = Repetition(graph)

    def rule(joint: fx.GraphModule, *args: Any, **options: Any) -> Any:
        repetition.inspect(joint.graph)
        leave_out_statistics(joint.graph)
        forward, backward = partition(joint, *args, budget=budget, casts=casts, parameters=parameters, **options)
        repetition.inspect_saved(forward.graph)
        return forward, backward

    parameters = [isinstance(each, Parameter) for each in inputs]
    casts = Casts(graph, inputs)
    compiled = aot_backend(_run_eagerly, rule, with_real_strides)(cudnn_norm.with_kept_norms(graph), inputs)
    return casts.linked(repetition.differentiable(compiled))


def leave_out_statistics(joint: fx.Graph) -> None:
    """Let the backward of training-mode batch norms not read running statistics, which it does not need.

    Saved for backward, they would forbid another call of the norm before backward.
    """
    for node in joint.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        if node.args[7]:
            node.args = (*node.args[:3], None, None, *node.args[5:])


def inductor_options(budget: float | int | str | None = None) -> dict[str, Any]:
    """Return ``options`` for torch.compile, with which Inductor's graphs save what `zoo.lean` would save.

    ``torch.compile(model, options=zoo.remat.inductor_options())`` fuses recomputation into backward's kernels.
    Results equal other compiled training to rounding. Random numbers are drawn once. Without a GPU, Inductor's
    layout optimization is off: it would hold a copy of each convolution's weights from forward to backward.

    Args:
    - `budget`: the budget of `zoo.lean`, but no limit in bytes; a fraction holds for each graph.
    """
    limit = Budget.parse(budget)
    limit.check_planned("zoo.remat.inductor_options")
    rule = partial(partition, budget=limit, is_eager=False)
    sources = map(str, [*Path(__file__).parents[1].rglob("*.py"), *Path(compiler.__file__).parent.glob("*.py")])
    options: dict[str, Any] = {"custom_partitioner_fn": inductor_partitioner(rule, *sources, key=repr(budget))}
    return options if torch.cuda.is_available() else {**options, "layout_optimization": False}


def _run_rematerialized(graph: fx.GraphModule, budget: Budget, *args: Any) -> Any:
    inputs = [arg for arg in args if isinstance(arg, Parameter)]
    with Rematerializer(budget, parameters=[*inputs, *graph.parameters(), *graph.buffers()]):
        return graph(*args)


def _run_eagerly(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return a function that runs the operations of a graph one by one."""
    for node in graph.graph.find_nodes(op="call_function", target=aten.bernoulli.p):
        node.target = _draw_mask
    cancel_transposes(graph)
    write_in_place(graph)
    for operation, faster in FASTER.items():
        for node in graph.graph.find_nodes(op="call_function", target=operation):
            node.target = faster
    return boxed(graph)


def _draw_mask(x: Tensor, p: float) -> Tensor:
    """Return a mask in the layout of x, as the in-place operation of eager training does."""
    return torch.empty_like(x).bernoulli_(p)


def cancel_transposes(graph: fx.GraphModule) -> None:
    """Read a matrix itself where a graph reads the transpose of its transpose, as each linear layer does twice."""
    for node in graph.graph.find_nodes(op="call_function", target=TRANSPOSE):
        (transpose,) = node.args
        if transpose.target is TRANSPOSE and _may_replace(transpose.args[0], transpose, node):
            node.replace_all_uses_with(transpose.args[0])
            graph.graph.erase_node(node)
            if not transpose.users:
                graph.graph.erase_node(transpose)


def _may_replace(matrix: Node, transpose: Node, again: Node) -> bool:
    """Return whether the transpose of a transpose may be replaced: by a new tensor, if it is an output of the graph."""
    is_returned = any(user.op == "output" for user in again.users)
    return not is_returned or (len(matrix.users) == len(transpose.users) == 1 and _is_fresh(matrix))


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
