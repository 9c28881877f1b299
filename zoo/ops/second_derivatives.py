"""Errors for second derivatives of functions that have first derivatives only.

`torch.autograd.function.once_differentiable` raises its error only if a gradient of the outputs requires a gradient
itself. After a sum or a mean it does not, and `torch.autograd.grad` with respect to parameters never reaches the error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def first_derivatives_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of an autograd function so that differentiating its gradients raises RuntimeError.

    With ``create_graph=True`` the gradients become outputs of a node whose inputs are the incoming gradients and all
    tensors that the function has saved, so that every path from a gradient to a parameter or an input raises. The
    values are bit-identical. The function lists parameters that it does not save in ``ctx.parameters``.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return backward(ctx, *grads)
        ctx = _ReadOnce(ctx)
        with torch.no_grad():
            gradients = backward(ctx, *grads)
        returned = gradients if isinstance(gradients, tuple) else (gradients,)
        found = (*grads, *ctx.saved_tensors, *getattr(ctx, "parameters", ()))
        origins = [each for each in found if isinstance(each, Tensor) and each.requires_grad]
        present = [index for index, each in enumerate(returned) if each is not None]
        if not origins or not present:
            return gradients
        marked = _Refusal.apply(len(present), ctx.name(), *(returned[index] for index in present), *origins)
        result = list(returned)
        for index, gradient in zip(present, marked, strict=True):
            result[index] = gradient
        return tuple(result)

    return run


class _ReadOnce:
    """The context of a function; caches its saved tensors, since an enclosing checkpoint returns them only once."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Refusal(torch.autograd.Function):
    """Returns copies of the first tensors in forward; raises the error in backward."""

    @staticmethod
    def forward(num_gradients: int, name: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors[:num_gradients])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.function = inputs[1].removesuffix("Backward").lstrip("_")

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"{ctx.function} has no second derivatives: in-place norms, reversible chains and the pools of zoo compute "
            "first gradients only; build the network with standard norms and memory='plain', or set store=True on the "
            "chain"
        )
