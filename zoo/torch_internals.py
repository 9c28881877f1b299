"""All private names of torch that this package uses, each with the behavior that it relies on; and names that changed.

`tests/test_torch_internals.py` tests each behavior by itself, so that a torch that changes one breaks a test that names
it, and asserts that no other file uses a private name of torch. Most names are plain aliases, which cost nothing at run
time. Nothing here imports the compiler, which takes a second, before a function that needs it is called.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.modules import batchnorm, dropout
from torch.nn.modules import module as module_hooks
from torch.nn.modules import utils as module_utils
from torch.utils import _python_dispatch, _pytree
from torch.utils.data._utils import signal_handling

Function = TypeVar("Function", bound=Callable[..., Any])

# Type stubs declare different names in different versions of torch. Through Any every version passes the type check.
_C: Any = torch._C
_module_hooks: Any = module_hooks
_checkpoint: Any = torch.utils.checkpoint
_workers: Any = signal_handling

# Dispatch

#: A base class whose `__torch_dispatch__` is called for each operation, while it is active, below autograd.
TorchDispatchMode = _python_dispatch.TorchDispatchMode

#: Returns the active dispatch modes, the innermost last.
dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack

#: Returns how many dispatch modes are active in this thread.
num_dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack

#: Returns how many modes with `__torch_function__` are active in this thread.
num_function_modes: Callable[[], int] = _C._len_torch_function_stack

#: A context in which operations call no dispatch mode and no `__torch_dispatch__`.
DisableTorchDispatch: Callable[[], AbstractContextManager[None]] = _C._DisableTorchDispatch

#: Returns whether a transform of `torch.func`, such as grad or vmap, is active.
are_transforms_active: Callable[[], bool] = _C._are_functorch_transforms_active

#: Returns whether the operator "namespace::name" has a kernel for a dispatch key, such as "CPU".
has_kernel: Callable[[str, str], bool] = _C._dispatch_has_kernel_for_dispatch_key

#: Returns a context within `__torch_dispatch__` in which the operations that a kernel calls count their writes. Without
#: it only the operator itself does, if it has a kernel for the key "ADInplaceOrView".
count_writes: Callable[[], AbstractContextManager[None]] = functools.partial(
    _C._SetExcludeDispatchKeyGuard, _C.DispatchKey.ADInplaceOrView, False
)

#: Returns whether a tensor is of a subclass that wraps other tensors and has no memory of its own, as DTensor.
is_wrapper = _python_dispatch.is_traceable_wrapper_subclass

#: Returns the schema of an operator overload: its name, `is_mutable`, and arguments with name, type and alias_info.
schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")


def _above_kernels() -> Any:
    names = ("AutogradFunctionality", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA")
    keys = _C.DispatchKeySet(_C.DispatchKey.AutogradOther)
    for name in names:
        keys = keys.add(getattr(_C.DispatchKey, name))
    return keys


#: Returns a context in which operations on CPU and CUDA tensors neither record for autograd nor cast: their kernels get
#: the arguments as given. Writes are counted, by a tensor and its views together. Dispatch modes are still called.
skip_autograd_and_autocast: Callable[[], AbstractContextManager[None]] = functools.partial(
    _C._ExcludeDispatchKeyGuard, _above_kernels()
)

#: The dispatch modes of selective checkpoints, in forward and in recomputation. In a version of torch without these
#: names every dispatch mode counts as one, to be safe.
SELECTIVE_CHECKPOINT_MODES: tuple[type[TorchDispatchMode], ...] = tuple(
    getattr(_checkpoint, name, TorchDispatchMode) for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
)

# Collectives

#: The name of the function in torch.distributed that gathers one tensor of each rank into one tensor. torch 2.11 has
#: only the second name; 2.13 and 2.14 warn about it.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"

# Autograd and memory

#: Returns the innermost pair of hooks for saved tensors, or None. The argument is `ignore_is_tracing`: False returns
#: None while AOTAutograd traces, True returns the hooks there, too.
top_saved_tensors_hooks: Callable[[bool], tuple[Callable[..., Any], Callable[..., Any]] | None] = (
    _C._autograd._top_saved_tensors_default_hooks
)


def before_hooks_are_disabled(context: Callable[[], AbstractContextManager[None]]) -> None:
    """Enter ``context()`` around every `torch.autograd.graph.disable_saved_tensors_hooks` from now on.

    Transforms of `torch.func` look this function up at each call, and refuse to run while there are hooks for saved
    tensors. There is no public way to be told of a transform.
    """
    disable = torch.autograd.graph.disable_saved_tensors_hooks

    @functools.wraps(disable)
    @contextmanager
    def disable_saved_tensors_hooks(error_message: str) -> Iterator[None]:
        with context(), disable(error_message):
            yield

    torch.autograd.graph.disable_saved_tensors_hooks = disable_saved_tensors_hooks


#: Returns a number that identifies a storage while the storage lives. Tensors share it if they share their memory.
storage_id: Callable[[Any], int] = operator.attrgetter("_cdata")

#: Returns whether two tensors share a storage; they need not overlap in it.
is_alias_of: Callable[[Tensor, Tensor], bool] = _C._is_alias_of


def may_overlap(tensor: Tensor) -> bool:
    """Return whether several elements of a tensor may lie in one place; True for a part of a tensor with gaps, too."""
    return bool(torch._debug_has_internal_overlap(tensor) != 0)


def has_backward_hooks(tensor: Tensor) -> bool:
    """Return whether `Tensor.register_hook` has added a hook to the tensor that was not removed."""
    hooks: Any = tensor._backward_hooks
    return bool(hooks)


def is_allocation(event: Any) -> bool:
    """Return whether an event of the profiler's tree is memory that an allocator gave out or took back.

    Its ``extra_fields`` then have ``ptr``, ``alloc_size`` (in bytes; negative for a free) and ``device``.
    """
    return event.tag == _C._profiler._EventType.Allocation


# Data


def end_workers(iterator: Any, grace_s: float) -> None:
    """End the worker processes of the iterator of a DataLoader, and kill those that have not ended after ``grace_s``.

    torch asks workers to end, and waits without a limit. It takes a worker that is killed for an error, unless it is
    told to forget them before.
    """
    _workers._remove_worker_pids(id(iterator))
    iterator._worker_pids_set = False
    killer = threading.Timer(grace_s, lambda: [worker.kill() for worker in iterator._workers])
    killer.daemon = True
    killer.start()
    try:
        iterator._shutdown_workers()
    finally:
        killer.cancel()


# Modules

#: The base class of batch norms and instance norms, with the arguments and buffers of `nn.BatchNorm2d`.
NormBase = batchnorm._NormBase

#: The base class of batch norms, `nn.SyncBatchNorm` included.
BatchNormBase = batchnorm._BatchNorm

#: The base class of `nn.Dropout`, `nn.Dropout2d` and the like.
DropoutBase = dropout._DropoutNd

#: Returns a tuple of two: a number twice, or the two items of a sequence.
pair: Callable[[Any], tuple[Any, Any]] = module_utils._pair

#: Returns the leaves of nested lists, tuples and dicts.
tree_leaves: Callable[[Any], list[Any]] = _pytree.tree_leaves


def forward_hooks(module: nn.Module) -> Mapping[int, Callable[..., Any]]:
    """Return the forward hooks of a module itself, in the order in which they are called."""
    return module._forward_hooks


def has_hooks(module: nn.Module) -> bool:
    """Return whether a hook, of this module or of all modules, observes its inputs, outputs or gradients."""
    return (
        _module_hooks._has_any_global_hook()
        or bool(module._forward_hooks)
        or bool(module._forward_pre_hooks)
        or bool(module._backward_hooks)
        or bool(module._backward_pre_hooks)
    )


def is_replica(module: Any) -> bool:
    """Return whether a module is a copy that `nn.DataParallel` made for one device."""
    return getattr(module, "_is_replica", False)


# Compiler

#: Decorates a function that torch.compile must trace neither itself nor in what it calls. `torch.compiler.disable` does
#: the same, but imports the compiler at once; this one does so when the function is first called.
disable_compiler = torch._disable_dynamo


def run_while_compiling(function: Function) -> Function:
    """Mark a function that torch.compile calls while it traces, instead of tracing it; returns the function.

    `torch.compiler.assume_constant_result` does the same, but imports the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module itself was compiled, by `torch.compile(module)` or by `module.compile()`."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile(module)` wraps; a module without this wrapper is returned itself."""
    return getattr(module, "_orig_mod", module)


def lookup_backend(name: str) -> Any:
    """Return the backend of torch.compile with this name: a function of a graph, its inputs and further options."""
    from torch._dynamo import lookup_backend

    return lookup_backend(name)


def list_mode_options(mode: str) -> dict[str, Any]:
    """Return the options of a mode of torch.compile, which the backend "inductor" takes as `config_patches`."""
    from torch._inductor import list_mode_options

    return list_mode_options(mode)


def activation_memory_budget(budget: float) -> AbstractContextManager[Any]:
    """Return a context in which a compiled graph keeps at most this share (0 to 1) of its activations for backward."""
    from torch._functorch import config

    return config.patch(activation_memory_budget=budget)


def current_activation_memory_budget() -> float:
    """Return the share of its activations that a compiled graph may keep for backward here."""
    from torch._functorch import config

    return float(config.activation_memory_budget)


def partition_by_min_cut(graph: Any, joint_inputs: Any, **options: Any) -> tuple[Any, Any]:
    """Return the forward and the backward graph of torch's partitioner for the joint graph; nodes keep their names.

    It recomputes no node of the forward pass with `CheckpointPolicy.MUST_SAVE` in ``meta["recompute"]``, at any budget
    above 0. At 0 it saves the inputs and recomputes everything.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graphs: tuple[Any, Any] = min_cut_rematerialization_partition(graph, joint_inputs, **options)
    return graphs


def inductor_partitioner(partition: Callable[..., tuple[Any, Any]], source: str) -> Any:
    """Return a value for Inductor's option ``custom_partitioner_fn`` that calls ``partition`` for its own partitioner.

    It is called after Inductor has replaced random operations by its own, with the joint graph, its inputs and options.
    A hash of the file ``source`` is part of the key of torch's caches.
    """
    from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: Any, joint_inputs: Any, **options: Any) -> tuple[Any, Any]:
            return partition(gm, joint_inputs, **options)

        def uuid(self) -> Any:
            return get_hash_for_files((source,))

    return Partitioner()


def is_higher_order(operator: object) -> bool:
    """Return whether the target of a graph's node is an operator that calls graphs, such as cond."""
    from torch._ops import HigherOrderOperator

    return isinstance(operator, HigherOrderOperator)


def recompile_limit(limit: int, accumulated: int) -> AbstractContextManager[Any]:
    """Return a context in which torch.compile compiles each function up to ``limit`` times, ``accumulated`` in all."""
    from torch._dynamo import config

    return config.patch(recompile_limit=limit, accumulated_recompile_limit=accumulated)
