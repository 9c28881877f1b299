"""torch's private names for dispatch and autograd: modes, operators, saved-tensor hooks."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch._higher_order_ops import utils as control_flow
from torch.utils import _python_dispatch

_C: Any = torch._C  # the type stubs of torch versions declare different names
_checkpoint: Any = torch.utils.checkpoint
_control_flow: Any = control_flow

#: A base class whose `__torch_dispatch__` is called below autograd for each operation while the mode is active.
TorchDispatchMode = _python_dispatch.TorchDispatchMode


class EagerDispatchMode(TorchDispatchMode):
    """A dispatch mode without torch's slow wrapper that hides `__torch_dispatch__` from torch.compile.

    torch.compile compiles nothing while the mode is active; `never_compile` hides `__torch_dispatch__` itself.
    """

    #: Higher-order operators, such as `torch.cond`, call `__torch_dispatch__` too.
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


#: Returns the active dispatch modes, the innermost last.
dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack

#: Returns the number of active dispatch modes in this thread.
num_dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack

#: Context manager that disables the active dispatch modes; modes may be entered inside it.
without_dispatch_modes: Callable[[], AbstractContextManager[Any]] = _python_dispatch._disable_current_modes

#: Context manager that disables dispatch modes and `__torch_dispatch__`.
DisableTorchDispatch: Callable[[], AbstractContextManager[None]] = _C._DisableTorchDispatch

#: Returns the number of the next autograd node in this thread. It does not change while a node saves tensors.
next_node_number: Callable[[], int] = _C._autograd._get_sequence_nr

#: Returns whether a transform of `torch.func`, such as grad or vmap, is active.
are_transforms_active: Callable[[], bool] = _C._are_functorch_transforms_active

#: Returns whether the operator "namespace::name" has a kernel for a dispatch key, such as "CPU".
has_kernel: Callable[[str, str], bool] = _C._dispatch_has_kernel_for_dispatch_key

#: Returns a context, for use within `__torch_dispatch__`, in which all operations increment the versions of the tensors
#: that they write. Without it only the outer operator does, if it has a kernel for the key "ADInplaceOrView".
count_writes: Callable[[], AbstractContextManager[None]] = functools.partial(
    _C._SetExcludeDispatchKeyGuard, _C.DispatchKey.ADInplaceOrView, False
)


@contextmanager
def resolve_views() -> Iterator[None]:
    """Lets kernels read conjugated and negated views within `__torch_dispatch__`.

    Otherwise, views that a kernel creates of its arguments, such as `x.mH`, would have the elements of the arguments.
    """
    with (
        _C._SetExcludeDispatchKeyGuard(_C.DispatchKey.Conjugate, False),
        _C._SetExcludeDispatchKeyGuard(_C.DispatchKey.Negative, False),
    ):
        yield


@contextmanager
def autocast_of_caller(name: str) -> Iterator[None]:
    """Within `__torch_dispatch__`, enables autocast as it is inside the kernel of the operator "namespace::name".

    Autocast then casts the arguments of the operations that the kernel calls, unless it has a rule for the operator
    itself.
    """
    with _C._RestorePythonTLSSnapshot():
        keys = [key for device, key in AUTOCAST_KEYS.items() if torch.is_autocast_enabled(device)]
    with ExitStack() as contexts:
        for key in keys:
            if not has_kernel(name, key.name):
                contexts.enter_context(_C._SetExcludeDispatchKeyGuard(key, False))
        yield


#: Autocast's dispatch keys by device type.
AUTOCAST_KEYS = {"cpu": _C.DispatchKey.AutocastCPU, "cuda": _C.DispatchKey.AutocastCUDA}

#: Returns a context with a `torch.library.Library` whose registrations end with the context.
scoped_library: Callable[[str, str], AbstractContextManager[Any]] = torch.library._scoped_library

#: The class of operators that call functions, such as `torch.cond`. They have no schema.
HigherOrderOperator: Any = torch._ops.HigherOrderOperator

OperatorOverload: Any = torch._ops.OpOverload  #: the class of an operator such as `torch.ops.aten.add.Tensor`

#: Returns the schema of an operator overload: its name, `is_mutable`, and arguments with name, type and alias_info.
schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")


def _above_kernels() -> Any:
    names = ("AutogradFunctionality", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA")
    keys = _C.DispatchKeySet(_C.DispatchKey.AutogradOther)
    for name in names:
        keys = keys.add(getattr(_C.DispatchKey, name))
    return keys


#: Returns a context in which operations on CPU and CUDA tensors skip autograd and autocast: their kernels get the
#: arguments unchanged. Tensors and their views still share a version counter. Dispatch modes are still called.
skip_autograd_and_autocast: Callable[[], AbstractContextManager[None]] = functools.partial(
    _C._ExcludeDispatchKeyGuard, _above_kernels()
)


def kernel_flags() -> tuple[Any, ...]:
    """Return the settings, besides its arguments, that determine the bits of an operation's result.

    These are oneDNN, deterministic algorithms and whether they warn, and the default dtype (for quotients of integers).
    """
    return (
        _C._get_mkldnn_enabled(),
        _C._get_deterministic_algorithms(),
        _C._get_deterministic_algorithms_warn_only(),
        torch.get_default_dtype(),
    )


def call_with_flags(flags: tuple[Any, ...], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function with settings that `kernel_flags` returned; return its result."""
    before = kernel_flags()
    if before == flags:
        return function(*args, **kwargs)
    _set_kernel_flags(*flags)
    try:
        return function(*args, **kwargs)
    finally:
        _set_kernel_flags(*before)


def _set_kernel_flags(is_mkldnn: bool, is_deterministic: bool, warns: bool, dtype: torch.dtype) -> None:
    _C._set_mkldnn_enabled(is_mkldnn)
    _C._set_deterministic_algorithms(is_deterministic, warn_only=warns)
    torch.set_default_dtype(dtype)


#: The dispatch modes of selective checkpoints, in forward and in recomputation. In versions of torch without these
#: names, conservatively, any dispatch mode.
SELECTIVE_CHECKPOINT_MODES: tuple[type[TorchDispatchMode], ...] = tuple(
    getattr(_checkpoint, name, TorchDispatchMode) for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
)


def fake_tensor_mode() -> AbstractContextManager[Any]:
    """Creates new tensors without memory that are dispatched like tensors of their device.

    The device need not exist unless an operation reads its properties.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


#: Returns the innermost pair of saved-tensor hooks, or None. The argument is `ignore_is_tracing`: with False it returns
#: None while AOTAutograd traces, with True the hooks.
top_saved_tensors_hooks: Callable[[bool], tuple[Callable[..., Any], Callable[..., Any]] | None] = (
    _C._autograd._top_saved_tensors_default_hooks
)


def before_hooks_are_disabled(context: Callable[[], AbstractContextManager[None]]) -> None:
    """Patch `torch.autograd.graph.disable_saved_tensors_hooks` to enter ``context()`` around each call.

    Transforms of `torch.func` call this function and raise an error while saved-tensor hooks are active. torch has no
    public callback for the start of a transform.
    """
    disable = torch.autograd.graph.disable_saved_tensors_hooks

    @functools.wraps(disable)
    @contextmanager
    def disable_saved_tensors_hooks(error_message: str) -> Iterator[None]:
        with context(), disable(error_message):
            yield

    torch.autograd.graph.disable_saved_tensors_hooks = disable_saved_tensors_hooks


def around_control_flow(context: Callable[[], AbstractContextManager[None]]) -> None:
    """Patch `setup_compilation_env` of torch to enter ``context()``.

    `torch.cond`, `while_loop` and similar operators compile their branches inside this context, also in eager mode.
    This fails while a dispatch mode is active.
    """
    set_up = _control_flow.setup_compilation_env

    @contextmanager
    def setup_compilation_env() -> Iterator[Any]:
        with context(), set_up() as backend:
            yield backend

    _control_flow.setup_compilation_env = setup_compilation_env


#: Returns the number of the backward pass that runs in this thread, or `NO_BACKWARD`.
current_backward: Callable[[], int] = _C._current_graph_task_id
NO_BACKWARD = -1


def in_custom_backward() -> bool:
    """Return whether the backward of a `torch.autograd.Function` runs in this thread."""
    return isinstance(_C._current_autograd_node(), torch.autograd.function.BackwardCFunction)


#: Calls a function without arguments at the end of the backward pass that runs in this thread.
call_after_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback

#: Pushes a dispatch mode. The autograd engine pops it when it restores the thread state after a node.
push_mode: Callable[[TorchDispatchMode], None] = _python_dispatch._push_mode


def is_profiling() -> bool:
    """Return whether a profiler is active in this thread."""
    return bool(_C._autograd._profiler_enabled())
