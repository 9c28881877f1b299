"""torch's private names about torch.compile, and about the graphs that it captures.

The compiler takes a second to import, and is imported only by the functions that need it.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn

Function = TypeVar("Function", bound=Callable[..., Any])
_C: Any = torch._C  # the type stubs of torch versions declare different names
_numbers = itertools.count()

#: Decorator that excludes a function, and everything it calls, from torch.compile. `torch.compiler.disable` does the
#: same, but imports the compiler immediately instead of at the first call.
disable_compiler = torch._disable_dynamo


def never_compile(function: Function) -> Function:
    """Let torch.compile compile neither calls of a function nor what it calls. A trace may still inline the function.

    Unlike `disable_compiler` it adds nothing to a call.
    """
    compiler = _C._dynamo.eval_frame
    strategy = compiler._FrameExecStrategy(compiler._FrameAction.SKIP, compiler._FrameAction.SKIP)
    compiler.set_code_exec_strategy(function.__code__, strategy)
    return function


def run_while_compiling(function: Function) -> Function:
    """Decorate a function so that torch.compile calls it at trace time and treats the result as a constant.

    `torch.compiler.assume_constant_result` does the same, but imports the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module was compiled by `torch.compile(module)` or `module.compile()`; ignores submodules."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def has_compiled_part(module: nn.Module) -> bool:
    """Return whether a module or one of its submodules was compiled; takes a third of the time of `modules()`."""
    parts = [module]
    for part in parts:
        if is_compiled(part):
            return True
        parts += [each for each in part._modules.values() if each is not None]
    return False


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside the wrapper of `torch.compile(module)`, or the module itself without a wrapper."""
    return getattr(module, "_orig_mod", module)


def lookup_backend(name: str) -> Any:
    """Return the torch.compile backend of this name: a function of a graph, its inputs and options."""
    from torch._dynamo import lookup_backend

    return lookup_backend(name)


def activation_memory_budget(budget: float) -> AbstractContextManager[Any]:
    """Return a context in which compiled graphs save at most this fraction (0 to 1) of their activations."""
    from torch._functorch import config

    return config.patch(activation_memory_budget=budget)


def inductor_partitioner(partition: Callable[..., tuple[Any, Any]], *sources: str, key: str = "") -> Any:
    """Return a value for Inductor's option ``custom_partitioner_fn`` that calls ``partition``.

    ``partition`` gets the joint graph, its inputs and options, after Inductor has replaced random operations by its
    own. A hash of the files ``sources``, and ``key``, become part of the cache key.
    """
    from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: Any, joint_inputs: Any, **options: Any) -> tuple[Any, Any]:
            return partition(gm, joint_inputs, **options)

        def uuid(self) -> Any:
            return get_hash_for_files(sources, key)

        def __reduce__(self) -> Any:  # for cache keys
            return functools.partial(inductor_partitioner, key=key), (partition, *sources)

    return Partitioner()


def recompile_limit(limit: int, accumulated: int) -> AbstractContextManager[Any]:
    """Return a context that sets torch.compile's recompilation limits: per function, and ``accumulated``."""
    from torch._dynamo import config

    return config.patch(recompile_limit=limit, accumulated_recompile_limit=accumulated)


#: The class of operators such as `torch.ops.aten.add.Tensor`.
OperatorOverload: Any = torch._ops.OpOverload

#: The operator for `Tensor.to` that always copies: (x, dtype=...) -> a copy.
CAST = torch.ops.aten._to_copy.default

#: Batch norms of functionalized graphs: (x, weight, bias, running mean, running var, training, momentum, eps) -> (out,
#: mean, invstd, new running mean, new running var).
BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default

#: The same without running statistics: (x, weight, bias, training, momentum, eps) -> (out, mean, invstd).
BATCH_NORM_OF_BATCH = torch.ops.aten._native_batch_norm_legit.no_stats

#: The same in evaluation mode: (x, weight, bias, running mean, running var, momentum, eps) -> (out, mean, invstd).
BATCH_NORM_OF_EVALUATION = torch.ops.aten._native_batch_norm_legit_no_training.default


def chooses_cudnn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    eps: float,
) -> bool:
    """Return whether `F.batch_norm` calls cuDNN for these arguments."""
    if weight is None or bias is None:
        return False
    if training and running_mean is None and running_var is None:
        running_mean = running_var = weight  # torch asks only whether there are two, but does not take None
    if running_mean is None or running_var is None:
        return False
    chosen = _C._select_batch_norm_backend(x, weight, bias, running_mean, running_var, training, eps)
    return bool(chosen == _C._BatchNormBackend.Cudnn)


def cudnn_reserve_bytes(x: Tensor, training: bool) -> int:
    """Return the size of the reserve that cuDNN's batch norm of an input saves for backward."""
    return int(_C._get_cudnn_batch_norm_reserve_space_size(x, training))


#: The entries of a node's ``meta`` by which torch's partitioners and compilers recognize a node of backward.
BACKWARD_TAG = {"partitioner_tag": "is_backward", "autograd_backward": True}


def is_forward_node(node: Any) -> bool:
    """Return whether a node of a joint graph was traced in forward."""
    return bool(node.meta.get("partitioner_tag") == "is_forward")


def is_tangent_node(node: Any) -> bool:
    """Return whether a node of a joint graph is an input that holds the gradient of an output of forward."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def overwritten_inputs(joint: Any) -> set[Any]:
    """Return the inputs of a joint graph that torch overwrites after forward with one of its outputs."""
    descriptions = joint.output_node().meta.get("desc", ())
    overwritten = {each.mutated_input for each in descriptions if hasattr(each, "mutated_input")}
    return {node for node in joint.find_nodes(op="placeholder") if node.meta.get("desc") in overwritten}


def is_random(operator: object) -> bool:
    """Return whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def default_partition(joint: Any, joint_inputs: Any, **options: Any) -> tuple[Any, Any]:
    """Split a joint graph after its last forward node; forward returns what backward nodes read of it.

    torch takes a node without users for a tensor, and copies all of forward that can be computed from what is saved to
    backward. Random operations that nothing reads get a user here, and do not run again in backward.
    """
    from torch._functorch.partitioners import default_partition

    for node in joint.graph.nodes:
        if is_random(node.target) and not node.users and isinstance(node.meta.get("val"), (tuple, list)):
            with joint.graph.inserting_after(node):
                first = joint.graph.call_function(operator.getitem, (node, 0))
            first.meta = {**node.meta, "val": node.meta["val"][0]}
    forward, backward = default_partition(joint, joint_inputs, **options)
    for node in reversed(backward.graph.nodes):
        if is_forward_node(node) and node.op == "call_function" and not node.users:
            backward.graph.erase_node(node)
    backward.recompile()
    return forward, backward


def size_hint(size: Any) -> Any:
    """Return a number; for a symbolic one its value in the traced example, or 1 if that is unknown."""
    if isinstance(size, (torch.SymInt, torch.SymFloat)):
        return size.node.hint if size.node.has_hint() else 1
    return size


def aot_backend(
    run: Callable[..., Any], partition: Callable[..., tuple[Any, Any]], correct: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a backend of torch.compile that partitions joint graphs and hands all graphs to ``run(graph, inputs)``.

    Graphs call the operations of eager training, and backward is traced without autocast, as eager training runs it.
    Random operations whose results nothing reads remain; torch asks Inductor's setting whether they have to.
    Backward may run several times.
    While a graph is traced, ``correct(operation, args, kwargs, outputs)`` returns what is taken for the fake outputs.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config
    from torch._functorch._aot_autograd import graph_compile
    from torch._inductor import config as inductor_config

    compile_graph = aot_autograd(
        fw_compiler=run,
        bw_compiler=run,
        inference_compiler=run,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )

    def backend(graph: Any, inputs: Any) -> Any:
        with (
            config.patch(backward_pass_autocast="off"),
            inductor_config.patch(fallback_random=True),
            # Otherwise backward graphs may overwrite saved tensors, and after a backward pass without ``retain_graph``
            # torch refuses ``retain_graph`` from then on.
            patch.object(graph_compile, "collect_bw_donated_buffer_idxs", lambda *_: []),
            _without_decompositions(),
            _traced_by(correct),
        ):
            return compile_graph(graph, inputs)

    return backend


def _traced_by(correct: Callable[..., Any]) -> AbstractContextManager[Any]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    trace = FakeTensorMode.dispatch

    def dispatch(self: Any, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return correct(operation, args, kwargs or {}, trace(self, operation, types, args, kwargs or {}))

    return patch.object(FakeTensorMode, "dispatch", dispatch)


@contextmanager
def _without_decompositions() -> Iterator[None]:
    """Return a context in which AOTAutograd traces operations that it would otherwise decompose in Python.

    These decompositions, of dropout and interpolation for example, round differently from the operations themselves.
    Those of batch norms remain: they make the updates of the running statistics visible.
    """
    keys = (_C.DispatchKey.Autograd, _C.DispatchKey.CompositeImplicitAutograd)
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if "batch_norm" not in name]
    operators = [
        getattr(p, name) for p in packets if isinstance(p, torch._ops.OpOverloadPacket) for name in p.overloads()
    ]
    removed = [(each, key, each.py_kernels.pop(key)) for each in operators for key in keys if key in each.py_kernels]
    for each, _, _ in removed:
        each._dispatch_cache.clear()
    try:
        yield
    finally:
        for each, key, kernel in removed:
            each.py_kernels[key] = kernel
            each._dispatch_cache.clear()


def is_compiled_node(node: Any) -> bool:
    """Return whether a node of autograd runs the backward graph of a graph that AOTAutograd has compiled."""
    return type(node).__name__ == "CompiledFunctionBackward"


_OPERATOR_CALL = re.compile(r"\btorch\.ops\.(\w+\.\w+\.\w+)\(")


def boxed(graph: Any) -> Callable[[list[Any]], Any]:
    """Return a function that runs a graph module on a list of inputs, and empties the list to free each after use.

    It calls operators without looking up their names each time, which is a large part of the time of small kernels.
    """
    from torch.fx.graph import _BoxedCodeGen

    graph.graph.set_codegen(_BoxedCodeGen())
    code = graph.graph.python_code("self")
    names = {name: operator.attrgetter(name)(torch.ops)._op for name in _OPERATOR_CALL.findall(code.src)}
    scope = {**code.globals, **{name.replace(".", "_"): call for name, call in names.items()}}
    exec(_OPERATOR_CALL.sub(lambda call: call[1].replace(".", "_") + "(", code.src), scope)
    forward = scope["forward"]

    def run(args: list[Any]) -> Any:
        return forward(graph, args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class Uncompiled(Exception):
    """torch.compile runs the code as it is: it is turned off, or a dispatch mode is active."""


def compile_whole(backend: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function (function, *args, **kwargs) that runs the one graph that torch.compile captures of a call.

    Nothing has run if it raises an error for which `failed_to_compile` is true. The function is of another package than
    torch, since torch 2.11 skips the frames of `nn.Sequential`, for example, if no other frame is around them. It has a
    code object of its own, by which Dynamo counts recompilations, and a name of its own, by which Dynamo remembers the
    shapes of inputs that changed: another function's would make the shapes of this one symbolic.
    """

    def run(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            raise Uncompiled
        return function(*args, **kwargs)

    run.__code__ = run.__code__.replace(co_name=f"run_{next(_numbers)}")
    return torch.compile(run, backend=backend, fullgraph=True)


def failed_to_compile(error: Exception) -> bool:
    """Return whether torch.compile raised an error instead of running a graph, and not the graph itself."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return isinstance(error, (Uncompiled, FailOnRecompileLimitHit, TorchDynamoException))


def is_passing(error: Exception) -> bool:
    """Return whether other calls may be compiled although torch.compile raised an error for this one."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return isinstance(error, (Uncompiled, FailOnRecompileLimitHit))


def reason_of(error: Exception) -> str:
    """Return in one line why torch.compile cannot capture a call as one graph, with the line of code if it is known."""
    cause = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    details = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    places = [line for line in lines if line.startswith('File "')]
    name = [] if cause is error else [type(cause).__name__]
    return ": ".join([*name, *lines[:1], *details[:1]])[:300] + "".join(f" ({place})" for place in places[-1:])


def graph_break(graph: Any) -> str | None:
    """Return why torch.compile ended a graph of Dynamo before the end of the code; None if it did not."""
    reason = graph.compile_subgraph_reason
    if not reason.graph_break:
        return None
    lines = [line.strip() for line in reason.reason.splitlines() if line.strip()]
    places = [f"{each.filename}, line {each.lineno}" for each in reason.user_stack]
    return ", ".join([*lines[:1], *places[-1:]])


def restarts_tracing(error: BaseException) -> bool:
    """Return whether a backend raised an error for Dynamo, which then traces again."""
    from torch._dynamo.exc import RestartAnalysis

    return isinstance(error, RestartAnalysis)
