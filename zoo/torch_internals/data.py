"""torch's private names for data: tensors and their memory, trees, modules, process groups and data loaders."""

from __future__ import annotations

import functools
import heapq
import operator
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import batchnorm, dropout
from torch.nn.modules import module as module_hooks
from torch.nn.modules import utils as module_utils
from torch.utils import _python_dispatch, _pytree
from torch.utils.data._utils import signal_handling

_C: Any = torch._C  # the type stubs of torch versions declare different names
_module_hooks: Any = module_hooks
_workers: Any = signal_handling
_cuda_memory: Any = torch.cuda.memory

#: Returns whether a tensor is of a subclass that wraps other tensors and has no memory of its own, such as DTensor.
is_wrapper = _python_dispatch.is_traceable_wrapper_subclass

#: The name of torch.distributed's all-gather into one tensor. torch 2.11 has only the second name, which 2.13 and 2.14
#: have deprecated.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def launcher_serves_store() -> bool:
    """Return whether torchrun serves the store at MASTER_ADDR:MASTER_PORT. Rank 0 then must not serve it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


#: Returns an integer that identifies a storage during its lifetime. Tensors that share memory have the same integer.
storage_id: Callable[[Any], int] = operator.attrgetter("_cdata")

#: Returns the `storage_id` of a tensor's storage, without creating a Python object for the storage.
memory_id: Callable[[Tensor], int] = _C._storage_address

#: Returns `Tensor.detach` of a tensor. Dispatch modes are not called.
detach: Callable[[Tensor], Tensor] = functools.partial(Tensor._make_subclass, Tensor)


def without_memory(cls: type[Tensor], like: Tensor) -> Any:
    """Return a tensor of a subclass with the shape, strides, dtype and device of a tensor, and without memory."""
    make: Any = Tensor._make_wrapper_subclass
    return make(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device)


class _Unpacked(Tensor):
    """Return value of a hook that makes autograd use ``replacement`` as the saved tensor."""

    replacement: Tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:  # type: ignore[override]
        """Return the replacement. Autograd detaches the hook's return value and calls nothing else."""
        unpacked: _Unpacked = args[0]
        return unpacked.replacement


def unpacked(parameter: Tensor) -> Tensor:
    """Return a saved-tensor hook's value for a parameter with attributes that backward reads and sets.

    Autograd turns the value of a hook into a new tensor without attributes, and loses attributes that backward sets.
    This tensor has the class of the parameter and shares its attributes. Its gradient is not the parameter's.
    """
    replacement = Tensor._make_subclass(type(parameter), parameter, parameter.requires_grad)
    replacement.__dict__ = parameter.__dict__
    found: _Unpacked = Tensor._make_subclass(_Unpacked, parameter)
    found.replacement = replacement
    return found


def counter_of(tensor: Tensor) -> Tensor:
    """Return an empty tensor that shares the version counter of a tensor, but not its memory."""
    counter = detach(tensor)
    counter.data = tensor.new_empty(0)
    return counter


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was modified in place; 0 for an inference tensor, which has no version."""
    return 0 if tensor.is_inference() else tensor._version


#: Returns whether two tensors share a storage, even without overlap.
is_alias_of: Callable[[Tensor, Tensor], bool] = _C._is_alias_of


def geometry_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the properties that distinguish views of the same memory: their elements and how they are read.

    A conjugated view, such as ``x.conj()``, and a negated view, such as ``x.conj().imag``, share the memory of their
    base and differ from it in one bit.
    """
    bits = tensor.is_conj(), tensor.is_neg()
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, *bits


def is_same_view(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same elements of the same memory."""
    if (a.dtype, a.shape, a.layout, a.device) != (b.dtype, b.shape, b.layout, b.device):
        return False
    if a.layout is not torch.strided or is_wrapper(a):
        return True
    return is_alias_of(a, b) and geometry_of(a) == geometry_of(b)


def may_overlap(tensor: Tensor) -> bool:
    """Return whether elements of a tensor may overlap in memory; also True for some non-overlapping strided views."""
    return bool(torch._debug_has_internal_overlap(tensor) != 0)


def has_repeated_elements(tensor: Tensor) -> bool:
    """Return whether elements of a tensor certainly share memory, as in an expanded tensor."""
    return bool(torch._debug_has_internal_overlap(tensor) == 1)


def is_read_only_view(tensor: Tensor) -> bool:
    """Return whether autograd forbids overwriting a view: it was created without grad, or with other views.

    `chunk`, `split` and `unbind` return several views.
    """
    return tensor._is_view() and _C._autograd._get_creation_meta(tensor) != _C._autograd.CreationMeta.DEFAULT


def leaves_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the leaf tensors, such as parameters, that get a gradient in backward from a tensor."""
    nodes: list[Any] = [tensor.grad_fn]
    seen = set(nodes)
    for node in nodes:
        if hasattr(node, "variable"):
            yield node.variable
        elif node is not None:
            new = [each for each, _ in node.next_functions if each not in seen]
            seen.update(new)
            nodes += dict.fromkeys(new)


def has_backward_hooks(tensor: Tensor) -> bool:
    """Return whether a tensor has hooks registered by `Tensor.register_hook`."""
    hooks: Any = tensor._backward_hooks
    return bool(hooks)


def start_allocation_log() -> None:
    """Start logging what this thread allocates and frees on the CPU.

    Uses torch's profiler from before Kineto. Kineto supports one trace per process, and prints.
    """
    internals = _C._profiler
    options = (False, True, False, False, False, internals._ExperimentalConfig())  # the second option reports memory
    _C._autograd._enable_profiler_legacy(internals.ProfilerConfig(internals.ProfilerState.CPU, *options))


def stop_allocation_log() -> list[tuple[str, int]]:
    """Stop logging; return names of operations and `record_function`, and "" with bytes (negative if freed)."""
    threads = _C._autograd._disable_profiler_legacy()
    events = heapq.merge(*threads, key=lambda event: event.start_us())
    kinds = {"push": lambda event: (event.name(), 0), "memory_alloc": lambda event: ("", event.cpu_memory_usage())}
    return [kinds[event.kind()](event) for event in events if event.kind() in kinds]


def record_cuda_history(enabled: str | None) -> None:
    """Clear the history of CUDA's caching allocator, and start ("all") or stop (None) recording it."""
    _cuda_memory._record_memory_history(enabled, context=None, clear_history=True)


def is_cuda_history_recorded() -> bool:
    """Return whether the history of CUDA's caching allocator is being recorded."""
    recorded: bool = _C._cuda_isHistoryEnabled()
    return recorded


class AllocatorReading(NamedTuple):
    """What CUDA's caching allocator has allocated at a moment: bytes, and how many blocks it has allocated or freed."""

    num_bytes: int
    num_changes: int


def read_allocator(device: torch.device) -> AllocatorReading:
    """Read the statistics of CUDA's caching allocator. Each change is an entry of `cuda_history`."""
    statistics = torch.cuda.memory_stats_as_nested_dict(device)
    blocks = statistics["allocation"]["all"]
    return AllocatorReading(statistics["allocated_bytes"]["all"]["current"], blocks["allocated"] + blocks["freed"])


def cuda_history(device: torch.device) -> list[dict[str, Any]]:
    """Return the recorded history of a CUDA device's caching allocator, oldest entry first.

    Entries have an ``action`` ("alloc", "free_requested" and others), an address ``addr`` and the requested ``size``.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    history: list[dict[str, Any]] = _cuda_memory._snapshot()["device_traces"][index]
    return history


def end_workers(iterator: Any, grace_s: float) -> None:
    """Shut down the workers of a DataLoader iterator; kill those still running after ``grace_s`` seconds.

    torch waits for workers without a timeout, and treats a killed worker as an error unless the workers' ids are
    removed first.
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


#: The base class of batch norms and instance norms, with the arguments and buffers of `nn.BatchNorm2d`.
NormBase = batchnorm._NormBase

#: The base class of batch norms, `nn.SyncBatchNorm` included.
BatchNormBase = batchnorm._BatchNorm

#: The base class of `nn.Dropout`, `nn.Dropout2d` and the like.
DropoutBase = dropout._DropoutNd

#: Returns a pair: a number twice, or the two items of a sequence.
pair: Callable[[Any], tuple[Any, Any]] = module_utils._pair


#: Returns the leaves of nested lists, tuples and dicts.
tree_leaves: Callable[[Any], list[Any]] = _pytree.tree_leaves


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors among the leaves of nested lists, tuples and dicts."""
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


#: Returns a copy of nested lists, tuples and dicts with a function applied to each leaf.
tree_map: Callable[[Callable[[Any], Any], Any], Any] = _pytree.tree_map


def has_hooks(module: nn.Module) -> bool:
    """Return whether a forward or backward hook is registered on this module or globally."""
    return (
        _module_hooks._has_any_global_hook()
        or bool(module._forward_hooks)
        or bool(module._forward_pre_hooks)
        or bool(module._backward_hooks)
        or bool(module._backward_pre_hooks)
    )


def has_own_hooks(module: nn.Module) -> bool:
    """Return whether a forward or backward hook is registered on this module, `observer`s excluded."""
    all_hooks: Any = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(all_hooks) and not all(hasattr(hook, "only_observes") for hooks in all_hooks for hook in hooks.values())


def observer(hook: Callable[..., None]) -> Callable[..., None]:
    """Mark a hook as observing only: fused paths may skip the module as if it had no hook.

    The hook does nothing while torch.compile traces, as eager control flow such as `torch.cond` does with its branches.
    """

    def observe(*args: Any) -> None:
        if not torch.compiler.is_compiling():
            hook(*args)

    observe.only_observes = True  # type: ignore[attr-defined]
    return observe


def changed_methods(module: nn.Module) -> list[str]:
    """Return the names of methods that this instance replaces, such as ``forward``."""
    return [
        name
        for name, value in module.__dict__.items()
        # A library that undoes its change leaves the bound method of the class behind.
        if callable(value)
        and (
            getattr(value, "__self__", None) is not module
            or getattr(value, "__func__", None) is not getattr(type(module), name, None)
        )
    ]


def is_plain(module: nn.Module, *classes: type[nn.Module]) -> bool:
    """Return whether a module is of exactly one of ``classes``, and no hook or function changes what a call does.

    Only such a module may be bypassed. The class of a parametrized module is not one of ``classes``.
    """
    return (
        type(module) in classes
        and not _module_hooks._has_any_global_hook()
        and not has_own_hooks(module)
        and not changed_methods(module)
    )


def is_plain_layer(layer: nn.Module, x: Tensor, *classes: type[nn.Module]) -> bool:
    """Return whether an operation on x may read weight and bias of a layer instead of calling it.

    The layer must be plain (`is_plain`), and weight and bias must be its own parameters with values: replicas, pruning
    and weight norm make them attributes, and offloading puts them on the meta device between calls. Takes microseconds.
    """
    return is_plain(layer, *classes) and has_own_parameters(layer, x)


def has_own_parameters(layer: nn.Module, x: Tensor) -> bool:
    """Return whether weight and bias are parameters of the layer, not attributes, and have values if x has."""
    parameters = layer._parameters
    if "weight" not in parameters or "bias" not in parameters:
        return False
    weight = parameters["weight"]
    return weight is None or weight.is_meta == x.is_meta


def is_replica(module: Any) -> bool:
    """Return whether a module is a replica made by `nn.DataParallel`."""
    return getattr(module, "_is_replica", False)


#: Returns the memory format of the outputs that operations compute from this input.
suggest_memory_format: Callable[[Tensor], torch.memory_format] = torch._prims_common.suggest_memory_format
