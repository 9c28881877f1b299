"""Tracks the contents of the tensors of a forward pass, and the memory that stays alive until backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from zoo.remat._follow import Follower
from zoo.remat._recipes import Recipe, Store, TrackedTensor
from zoo.remat._record import GraphRecorder
from zoo.remat._step_log import note_created
from zoo.torch_internals.data import geometry_of, is_wrapper, memory_id
from zoo.torch_internals.dispatch import DisableTorchDispatch, kernel_flags

StorageRef = Callable[[], torch.UntypedStorage | None]
Observer = GraphRecorder | Follower

SMALLEST_BYTES = 2**12  # smaller tensors are saved: recomputing them is not worth the time
COPIED_BYTES = 2**16  # smaller inputs of recipes without a gradient are copied, as they may soon be freed


class SavedMemory(set[int]):
    """The addresses of storages that stay alive until backward: saved ones and permanent ones.

    ``bytes`` is the total size of the saved ones.

    Args:
    - `parameters`: traverses the network and returns its parameters and buffers.
    """

    def __init__(self, parameters: Callable[[], Sequence[Tensor]]) -> None:
        super().__init__()
        self._parameters = parameters
        self.bytes = 0
        # address -> storage of the parameters and buffers that were looked up
        self._permanent: dict[int, torch.UntypedStorage] = {}
        self._has_all_permanent = False
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add_saved(self, tensor: Tensor) -> None:
        """Add the memory of a tensor until it is freed."""
        address = memory_id(tensor)
        if address not in self:
            self._alive[address] = weakref.ref(tensor.untyped_storage(), lambda _: self._forget(address))
            self.bytes += tensor.untyped_storage().nbytes()
            self.add(address)

    def close(self) -> None:
        """Forget all addresses."""
        self._alive.clear()
        self.clear()

    def _forget(self, address: int) -> None:
        self.discard(address)
        self._alive.pop(address, None)

    def add_permanent(self, tensor: Tensor) -> None:
        """Add memory that stays alive anyway."""
        address = memory_id(tensor)
        self._permanent[address] = tensor.untyped_storage()
        self.add(address)

    def add_all_permanent(self) -> None:
        """Add the memory of all parameters and buffers. The first call traverses the network."""
        if not self._has_all_permanent:
            self._has_all_permanent = True
            for tensor in self._parameters():
                self.add_permanent(tensor)

    def is_permanent(self, tensor: Tensor) -> bool:
        """Return whether the memory of a tensor belongs to a parameter or buffer."""
        self.add_all_permanent()
        return memory_id(tensor) in self._permanent


class Tracker:
    """The contents of the tensors of a forward pass. ``clock`` counts the writes into them.

    Args:
    - `saved`: the memory that stays alive until backward.
    - `smallest_bytes`: size from which a tensor is large. None: `SMALLEST_BYTES`.
    """

    def __init__(self, saved: SavedMemory, smallest_bytes: int | None) -> None:
        self._saved = saved
        self.smallest_bytes = SMALLEST_BYTES if smallest_bytes is None else smallest_bytes
        self._copied_bytes = COPIED_BYTES if smallest_bytes is None else smallest_bytes
        # id of a tensor -> (weak reference to it, its version, a weak reference to its storage, its contents)
        self.known: dict[int, tuple[Callable[[], Tensor | None], int, StorageRef, TrackedTensor]] = {}
        # id of a storage -> its contents by version and `geometry_of`. None until a new object appears for the same
        # elements: subclasses of Tensor wrap the outputs of operations, and autograd wraps what it unpacks
        self._by_memory: dict[int, dict[tuple[Any, ...], tuple[StorageRef, TrackedTensor]]] | None = None
        # address of a storage -> clock of the last write into it, and a weak reference to it
        self._writes: dict[int, tuple[int, StorageRef]] = {}
        self.clock = 0
        self._stores: dict[tuple[Any, ...], Store] = {}  # by `kernel_flags`, which may change during forward
        self.observer: Observer | None = None  # told of newly tracked tensors

    def close(self) -> None:
        """Forget all tensors, and break the cycles of the weak references to them."""
        self.known.clear()
        self._by_memory = self.observer = None

    def is_large(self, out: Any) -> bool:
        """Return whether an output is strided and large enough to recompute.

        Of several outputs, the first is the largest.
        """
        if not isinstance(out, Tensor):
            return len(out) > 0 and self.is_large(out[0])
        if out.layout is not torch.strided:
            return False
        return out.nbytes >= self.smallest_bytes

    def note(self, tensor: Tensor, recipe: Recipe | None, index: int, version: int) -> TrackedTensor:
        """Track a tensor that is output ``index`` of a recipe; return its contents."""
        tracked = TrackedTensor(recipe, index, tensor, version, self._store(), self.clock)
        self._know(tensor, version, tracked)
        if self.observer is not None:
            self.observer.note(tracked, tensor)
        return tracked

    def _store(self) -> Store:
        """Return the store of tensors computed with the current settings."""
        flags = kernel_flags()
        if flags not in self._stores:
            self._stores[flags] = Store(flags)
        return self._stores[flags]

    def _know(self, tensor: Tensor, version: int, tracked: TrackedTensor) -> None:
        """Record the contents of a tensor until it is freed."""
        key, memory = id(tensor), tracked.memory
        if tracked.live() is not tensor:  # a copy
            memory = weakref.ref(tensor.untyped_storage())
        live = weakref.ref(tensor, partial(self.known.pop, key))
        self.known[key] = live, version, memory, tracked
        if self._by_memory is not None:
            self._note_memory(tensor, version, tracked)

    def note_copy(self, copy: Tensor, tracked: TrackedTensor) -> None:
        """Record that a copy of a tensor has the same contents."""
        self._know(copy, copy._version, tracked)

    def note_unpacked(self, tensor: Tensor, recipe: Recipe) -> None:
        """Record the contents of a tensor that autograd returns as a new object."""
        if self._by_memory is None:
            self._by_memory = {}
        self.note(tensor, recipe, 0, tensor._version)

    def note_writes(self, tensors: Sequence[Tensor]) -> None:
        """Record a write into the memory of these tensors."""
        self.clock += 1
        for tensor in tensors:
            self._writes[memory_id(tensor)] = self.clock, weakref.ref(tensor.untyped_storage())
            if self.observer is not None:
                self.observer.note_write(tensor)

    def find(self, tensor: Tensor) -> TrackedTensor | None:
        """Return the current contents of a tensor; None if they are not tracked."""
        known = self.known.get(id(tensor))
        if known is None:
            is_exact = self._by_memory is None and (type(tensor) is Tensor or type(tensor) is Parameter)
            return None if is_exact else self._find_by_memory(tensor)
        live, version, memory, tracked = known
        storage = tensor.untyped_storage()
        if (
            live() is not tensor
            or version != tensor._version
            or self.was_written(tensor, tracked)
            or memory() is not storage  # `tensor.data = other` changes no version
            or (not storage.resizable() and is_computed(tensor, tracked))
        ):
            return None
        return tracked

    def _note_memory(self, tensor: Tensor, version: int, tracked: TrackedTensor) -> None:
        assert self._by_memory is not None
        address = memory_id(tensor)
        forget = partial(self._by_memory.pop, address)
        contents = self._by_memory.setdefault(address, {})
        contents[(version, *geometry_of(tensor))] = weakref.ref(tensor.untyped_storage(), forget), tracked

    def _find_by_memory(self, tensor: Tensor) -> TrackedTensor | None:
        """Return the current contents of an alias of a tracked tensor; None for any other tensor."""
        if not is_trackable(tensor):
            return None
        if self._by_memory is None:
            self._by_memory = {}
            for live, version, _, tracked in self.known.values():
                if (original := live()) is not None:
                    self._note_memory(original, version, tracked)
        found = self._by_memory.get(memory_id(tensor), {}).get((tensor._version, *geometry_of(tensor)))
        if found is None:
            return None
        memory, tracked = found
        storage = tensor.untyped_storage()
        if memory() is not storage or self.was_written(tensor, tracked):
            return None
        if not storage.resizable() and is_computed(tensor, tracked):
            return None
        if tracked.live() is None:
            tracked.live = weakref.ref(tensor)
        self._know(tensor, tensor._version, tracked)
        return tracked

    def was_written(self, tensor: Tensor, tracked: TrackedTensor) -> bool:
        """Return whether a tensor's memory was written after ``tracked``, even if the version does not tell."""
        if not self._writes:
            return False
        written = self._writes.get(memory_id(tensor))
        return written is not None and written[0] > tracked.clock

    def has_writes(self, tensor: Tensor) -> bool:
        """Return whether this forward pass has written into a tensor's memory."""
        written = self._writes.get(memory_id(tensor))
        return written is not None and written[1]() is tensor.untyped_storage()  # otherwise the address was reused

    def is_modified(self, tensor: Tensor, tracked: TrackedTensor) -> bool:
        """Return whether a tensor has another version or other memory than ``tracked``, or its memory was written."""
        has_moved = tracked.saved_tensor is None and tracked.memory() is not tensor.untyped_storage()
        return has_moved or tensor._version != tracked.version or self.was_written(tensor, tracked)

    def tracked_args(self, args: Sequence[Any]) -> list[Any] | None:
        """Return arguments with tracked tensors in place of tensors, also in lists; None if one is not trackable."""
        found = []
        for arg in args:
            if isinstance(arg, Tensor):
                arg = self.find(arg) or self._note_external(arg)
                if arg is None:
                    return None
            elif isinstance(arg, (list, tuple)) and arg and (arg[0] is None or isinstance(arg[0], Tensor)):
                arg = self.tracked_args(arg)
                if arg is None:
                    return None
            found.append(arg)
        return found

    def _note_external(self, tensor: Tensor) -> TrackedTensor | None:
        """Track a tensor that no recorded operation has computed; return None if it is not trackable."""
        if not is_trackable(tensor):
            return None
        is_small = tensor.nbytes < (self.smallest_bytes if tensor.requires_grad else self._copied_bytes)
        if is_parameter(tensor):
            self._saved.add_permanent(tensor)
        elif is_small:
            copy = copy_of(tensor)  # its memory may be freed or reused before backward
            tracked = TrackedTensor(None, 0, copy, copy._version, self._store(), self.clock)
            tracked.live = lambda: copy
            self.note_copy(tensor, tracked)
            return tracked
        elif not tensor.requires_grad and not isinstance(self.observer, Follower):  # it may be a buffer
            self._saved.add_all_permanent()
        tracked = self.note(tensor, None, 0, tensor._version)
        if is_small:
            tracked.live = lambda: tensor  # the parameter may exist for this call alone
        return tracked


def is_computed(tensor: Tensor, tracked: TrackedTensor) -> bool:
    """Return whether recipes compute a tensor with the contents ``tracked``, rather than use it as an input.

    This is wrong if other code can write the memory of the tensor, as after `Tensor.numpy`.
    """
    return tracked.recipe is not None or tracked.live() is not tensor


def is_trackable(tensor: Tensor) -> bool:
    """Return whether a tensor is strided, owns its memory and has a version counter.

    False for sparse, nested and lazy tensors, wrapper subclasses, and inference tensors, even if their ``data`` was
    replaced.
    """
    return (
        (type(tensor) is Tensor or type(tensor) is Parameter or not (is_lazy(tensor) or is_wrapper(tensor)))
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and _has_version(tensor)
    )


def _has_version(tensor: Tensor) -> bool:
    try:
        return tensor._version >= 0
    except RuntimeError:
        return False


def is_parameter(tensor: Tensor) -> bool:
    """Return ``isinstance(tensor, Parameter)``, but faster."""
    return type(tensor) is Parameter or (type(tensor) is not Tensor and isinstance(tensor, Parameter))


def copy_of(tensor: Tensor) -> Tensor:
    """Return a detached copy with the same strides, in memory of its own."""
    with DisableTorchDispatch(), torch.no_grad():
        once = tensor  # copy_ refuses to write into expanded dimensions
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1:
                once = once.narrow(dim, 0, 1)
        copy = torch.empty_strided(once.shape, once.stride(), dtype=tensor.dtype, device=tensor.device)
        return note_created(copy.copy_(once).expand(tensor.shape))
