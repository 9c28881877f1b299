"""torch's private names about torch.compile, and about the joint graphs of AOTAutograd.

Importing the compiler takes a second, so only the functions that need it import it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn

Function = TypeVar("Function", bound=Callable[..., Any])
_C: Any = torch._C  # the type stubs of torch versions declare different names

#: Decorator that excludes a function, and everything it calls, from torch.compile. `torch.compiler.disable` does the
#: same, but imports the compiler immediately instead of at the first call.
disable_compiler = torch._disable_dynamo


def never_compile(function: Function) -> Function:
    """Exclude a function and its callees from torch.compile. A trace may still inline the function.

    Unlike `disable_compiler`, it adds no overhead to a call.
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
    """Return whether a module or one of its submodules was compiled. Three times as fast as `modules()`."""
    parts = [module]
    for part in parts:
        if is_compiled(part):
            return True
        parts += [each for each in part._modules.values() if each is not None]
    return False


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside the wrapper of `torch.compile(module)`; a module without wrapper is returned itself."""
    return getattr(module, "_orig_mod", module)


def lookup_backend(name: str) -> Any:
    """Return the torch.compile backend of this name: a function of a graph, its inputs and options."""
    from torch._dynamo import lookup_backend

    return lookup_backend(name)


def activation_memory_budget(budget: float) -> AbstractContextManager[Any]:
    """Limits compiled graphs to saving this fraction (0 to 1) of their activations within the block."""
    from torch._functorch import config

    return config.patch(activation_memory_budget=budget)


def inductor_partitioner(partition: Callable[..., tuple[Any, Any]], *sources: str, key: str = "") -> Any:
    """Return a value for Inductor's option ``custom_partitioner_fn`` that calls ``partition``.

    ``partition`` gets the joint graph, its inputs and options, after Inductor has replaced random operations by its
    own. ``key`` and a hash of the files ``sources`` become part of the cache key.
    """
    from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: Any, joint_inputs: Any, **options: Any) -> tuple[Any, Any]:
            return partition(gm, joint_inputs, **options)

        def uuid(self) -> Any:
            return get_hash_for_files(sources, key)

        def __reduce__(self) -> Any:  # pickled into cache keys
            return functools.partial(inductor_partitioner, key=key), (partition, *sources)

    return Partitioner()


def recompile_limit(limit: int, accumulated: int) -> AbstractContextManager[Any]:
    """Sets torch.compile's recompilation limits, per function and ``accumulated``, within the block."""
    from torch._dynamo import config

    return config.patch(recompile_limit=limit, accumulated_recompile_limit=accumulated)


#: Entries of a node's ``meta`` by which torch's partitioners and compilers recognize nodes of backward.
BACKWARD_TAG = {"partitioner_tag": "is_backward", "autograd_backward": True}


def is_forward_node(node: Any) -> bool:
    """Return whether a node of a joint graph was traced in forward."""
    return bool(node.meta.get("partitioner_tag") == "is_forward")


def is_tangent_node(node: Any) -> bool:
    """Return whether a node of a joint graph is an input with the gradient of an output of forward."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def overwritten_inputs(joint: Any) -> set[Any]:
    """Return the inputs of a joint graph that torch overwrites with an output after forward."""
    descriptions = joint.output_node().meta.get("desc", ())
    overwritten = {each.mutated_input for each in descriptions if hasattr(each, "mutated_input")}
    return {node for node in joint.find_nodes(op="placeholder") if node.meta.get("desc") in overwritten}


def is_random(operator: object) -> bool:
    """Return whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def default_partition(joint: Any, joint_inputs: Any, **options: Any) -> tuple[Any, Any]:
    """Split a joint graph after its last forward node; forward returns the values that backward nodes read.

    torch treats a node without users as a tensor, and copies to backward all forward nodes that can be computed from
    saved tensors. Random operations without users get a user here, so that they do not run again in backward.
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
    """Return a number itself; for a symbolic number its value in the traced example, or 1 if unknown."""
    if isinstance(size, (torch.SymInt, torch.SymFloat)):
        return size.node.hint if size.node.has_hint() else 1
    return size
