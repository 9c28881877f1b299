"""Batch norms fused with the activations that follow them, in forward, recomputation and backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from zoo.ops.abn import native
from zoo.ops.abn.backend import kernels_for
from zoo.ops.context import is_eager
from zoo.remat.operations import Operation

#: Functions that compute an activation -> its name.
ACTIVATIONS: dict[Any, str] = {
    F.relu: "relu", torch.relu: "relu", torch.relu_: "relu", Tensor.relu: "relu", Tensor.relu_: "relu",
    F.silu: "silu", F.hardswish: "hardswish",
}  # fmt: skip
OVERWRITING = (torch.relu_, Tensor.relu_)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Note = Callable[[Tensor, Operation, tuple[Any, ...]], None]

# Weights of the norms that an activation followed immediately the last time.
_followed = WeakIdKeyDictionary()


class Norm(NamedTuple):
    """A batch norm: its output y, the version of y, the arguments of `native.norm_act`, and whether y was computed."""

    y: weakref.ref[Tensor]
    version: int
    arguments: tuple[Any, ...]
    is_written: bool

    def holds(self, y: Tensor) -> bool:
        """Return whether y is the output of this norm, unmodified."""
        return self.y() is y and y._version == self.version


class FusedNorms(TorchFunctionMode):
    """A context in which training-mode batch norms are fused with the activations that directly follow them.

    Outputs, gradients and running statistics equal torch's to rounding. Autograd saves the input of the norm and
    per-channel vectors, and nothing for the activation. Where no compiled kernel applies, torch's own functions run.
    Double backward is not supported.

    An activation is fused with a norm if it is the next call of torch, so that nothing has read the output y of the
    norm. If that was the case the last time, the norm defers the computation of y until something else needs it.

    Args:
    - `note`: called with each output, the function that recomputes it, and its arguments.
    - `is_active`: returns whether norms may be fused now.
    - `always_writes`: compute y even if an activation is expected to follow.
    """

    def __init__(self, note: Note, is_active: Callable[[], bool], always_writes: bool = False) -> None:
        super().__init__()
        self._note, self._is_active, self._always_writes = note, is_active, always_writes
        self._last: Norm | None = None

    def __exit__(self, *error: Any) -> None:
        """Leave the context; compute a deferred output."""
        self.write()
        super().__exit__(*error)

    def write(self) -> None:
        """Compute the deferred output of the last norm, if it is still alive."""
        norm, self._last = self._last, None
        y = None if norm is None or norm.is_written else norm.y()
        if norm is not None and y is not None:
            _followed.pop(norm.arguments[1], None)
            with torch.no_grad():
                native.norm_act_into(y.detach(), *norm.arguments)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, or a fused kernel instead."""
        kwargs = kwargs or {}
        norm = self._last
        if norm is not None and function in ACTIVATIONS and args and norm.holds(args[0]):
            self._last = None
            inplace = function in OVERWRITING or kwargs.get("inplace", args[1] if len(args) > 1 else False)
            return self._activated(norm, args[0], inplace, ACTIVATIONS[function])
        self.write()
        return (self._norm if function is F.batch_norm else function)(*args, **kwargs)

    def _norm(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not (training and self._is_active() and can_fuse(x, weight, bias)):
            return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
        with torch.no_grad():
            if running_mean is None or running_var is None:
                mean, var = native.statistics(x)
            else:
                mean, var = native.track_statistics(x, running_mean, running_var, momentum)
        arguments = (x, weight, bias, mean, var, eps, "identity")
        is_written = self._always_writes or weight is None or weight not in _followed
        y: Tensor = ActivatedNorm.apply(None, is_written, *arguments)
        self._note(y, native.norm_act, arguments)
        self._last = Norm(weakref.ref(y), y._version, arguments, is_written)
        return y

    def _activated(self, norm: Norm, y: Tensor, inplace: bool, activation: str) -> Tensor:
        weight = norm.arguments[1]
        if weight is not None:
            _followed[weight] = None
        arguments = (*norm.arguments[:-1], activation)
        z: Tensor = ActivatedNorm.apply(y if inplace else None, True, *arguments)
        self._note(z, native.norm_act, arguments)
        if not inplace:  # y may still be read
            self._last = norm
        return z


def can_fuse(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Return whether the compiled kernels support this norm and a gradient is required."""
    tensors = [tensor for tensor in (x, weight, bias) if tensor is not None]
    return (
        kernels_for(x) is native
        and torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in tensors)
        and all(tensor.dtype in DTYPES for tensor in tensors)
        and x.ndim >= 2
        and x.numel() > x.shape[1]  # torch raises an error for a single value per channel
        and is_eager()
    )


class ActivatedNorm(torch.autograd.Function):
    """z = f(weight (x - mean) / sqrt(var + eps) + bias) for the mean and variance of x, of shape (N, C, ...).

    Saves x and the per-channel vectors. If ``into`` is given, z is written into it. If ``is_written`` is False, z is
    left uninitialized, for the caller to compute.
    """

    @staticmethod
    def forward(
        ctx: Any,
        into: Tensor | None,
        is_written: bool,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        eps: float,
        activation: str,
    ) -> Tensor:
        """Return z."""
        ctx.save_for_backward(x, weight, bias, mean, var)
        ctx.scalars = eps, activation
        ctx.set_materialize_grads(False)
        if not is_written:
            return native.new_like(x)
        if into is None:
            return native.norm_act(x, weight, bias, mean, var, eps, activation)
        ctx.mark_dirty(into)
        native.norm_act_into(into, x, weight, bias, mean, var, eps, activation)
        return into

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias; None if z itself got no gradient, as its activation has it."""
        if dz is None:
            return (None,) * 9
        x, weight, bias, mean, var = ctx.saved_tensors
        dx, dweight, dbias = native.norm_act_backward(x, dz, weight, bias, mean, var, *ctx.scalars)
        of_weight = None if weight is None else dweight.to(weight.dtype)
        of_bias = None if bias is None else dbias.to(bias.dtype)
        return None, None, dx, of_weight, of_bias, *[None] * 4
