"""Saves less for layers with frozen weights.

Autograd saves the input of a frozen convolution, but backward reads only its shape. It saves the output of a ReLU, but
backward reads only the signs. The decision about a ReLU is made once no other operation can save its output. Any other
operation that saves either tensor, such as a checkpoint or a custom function, reads its elements.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zoo.remat._bits import rectified_of, signs_of
from zoo.remat._deciding import Decider
from zoo.remat._recipes import SavedHandle, TrackedTensor, detached, unmodified, unpack
from zoo.remat._tracking import Tracker, is_trackable
from zoo.torch_internals.data import is_alias_of
from zoo.torch_internals.dispatch import DisableTorchDispatch, skip_autograd_and_autocast


class FrozenLayers:
    """Pending decisions about tensors that frozen layers save.

    ``is_seen`` is True once the pass has run a frozen layer. Until then, no decision is deferred.
    """

    def __init__(self, tracker: Tracker, decider: Decider) -> None:
        self._tracker, self._decider = tracker, decider
        self.is_seen = False
        self._relu_output: Any = None  # weak reference to the output of the latest operation, if that was a ReLU
        self.deferred: list[DeferredHandle] = []  # handles of tensors that the next operation saves
        self._rectified: list[tuple[DeferredHandle, TrackedTensor]] = []  # handles of outputs of ReLUs

    def pack(self, tensor: Tensor) -> Any:
        """Return the object that autograd holds until the decision about a tensor; None if it can be made now."""
        is_relu_output = self._relu_output is not None and self._relu_output() is tensor
        self._relu_output = None  # a ReLU saves its output once; the next operation that saves it reads its elements
        if not (is_trackable(tensor) and tensor.requires_grad and self._tracker.is_large(tensor)):
            return None
        tracked = self._tracker.find(tensor) or self._tracker.note(tensor, None, 0, tensor._version)
        if tracked.readers > 0 or tracked.saved_tensor is not None:
            return None
        self._settle_rectified()
        if is_relu_output:
            return self._pack_rectified(tracked, tensor)
        self.deferred.append(DeferredHandle(tensor))
        return self.deferred[-1]

    def note_relu(self, out: Tensor | None) -> None:
        """Record the output of the latest operation if that was a ReLU; None otherwise."""
        self._relu_output = None if out is None else weakref.ref(out)

    def settle(self, unread: Tensor | None = None) -> None:
        """Decide about the tensors that the next operation saved. Its backward does not read ``unread``."""
        deferred, self.deferred = self.deferred, []
        # Only the last handle of this input belongs to the operation.
        last = max((index for index, handle in enumerate(deferred) if handle.tensor is unread), default=None)
        for index, handle in enumerate(deferred):
            tensor = handle.tensor
            assert tensor is not None, "a handle is settled once"
            if handle.has_moved:
                handle.settle()
            elif index == last:
                handle.settle(partial(torch.empty_strided, **_empty_arguments_of(tensor)))
            else:
                handle.settle(partial(unpack, self._decider.pack(tensor)))

    def finish(self) -> None:
        """Make all pending decisions at the end of forward."""
        self.settle()
        self._settle_rectified(is_over=True)

    def _pack_rectified(self, tracked: TrackedTensor, tensor: Tensor) -> Any:
        """Return the object that a ReLU holds in place of its output. Its backward reads only the signs."""
        if self._decider.save_recipe_if_smaller(tracked, tensor, tensor.numel() // 8):
            return SavedHandle(tracked)
        with DisableTorchDispatch(), torch.no_grad():
            handle = DeferredHandle(detached(tensor))  # so that the output itself is freed with its last reference
        self._rectified.append((handle, tracked))
        return handle

    def _settle_rectified(self, is_over: bool = False) -> None:
        """Decide about outputs of ReLUs that another operation saved, or that no operation can save any more."""
        undecided = []
        for handle, tracked in self._rectified:
            tensor = handle.tensor
            if tensor is None or tensor._version != handle.version or self._tracker.was_written(tensor, tracked):
                continue  # backward raises an error
            if tracked.saved_tensor is not None or tracked.readers > 0:
                handle.settle(SavedHandle(tracked).unpack)
            elif is_over or tracked.live() is None:
                with DisableTorchDispatch(), torch.no_grad():
                    bits = signs_of(tensor)
                handle.settle(partial(_rectified_of, bits, **_empty_arguments_of(tensor)))
            else:
                undecided.append((handle, tracked))
        self._rectified = undecided


class DeferredHandle:
    """The object that autograd holds in place of a saved tensor until the decision about it is made.

    Args:
    - `tensor`: the saved tensor. None after `settle`.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self._saved: Tensor | None = detached(tensor)  # keeps its memory if `tensor.data` is set
        self.version = tensor._version

    @property
    def has_moved(self) -> bool:
        """Whether the ``data`` of the tensor was replaced."""
        return self.tensor is not None and self._saved is not None and not is_alias_of(self.tensor, self._saved)

    def settle(self, read: Callable[[], Tensor] | None = None) -> None:
        """Return the result of ``read`` to backward from now on; without it, return the saved tensor."""
        if read is None:
            assert self._saved is not None, "a handle is settled once"
            read = partial(unmodified, self._saved, self.version)
        self.tensor, self._saved, self._read = None, None, read

    def unpack(self) -> Tensor:
        """Return the tensor for backward. Raises RecipeError if it was overwritten or cannot be recomputed."""
        return self._read() if self._saved is None else unmodified(self._saved, self.version)


def _empty_arguments_of(tensor: Tensor) -> dict[str, Any]:
    """Return the arguments of `torch.empty_strided` for a tensor like this one."""
    return {"size": tensor.shape, "stride": tensor.stride(), "dtype": tensor.dtype, "device": tensor.device}


def _rectified_of(bits: Tensor, size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor that is 0 where the output of a ReLU was 0, otherwise 1."""
    with skip_autograd_and_autocast(), torch.no_grad():
        return rectified_of(bits, size, stride, dtype, device)
