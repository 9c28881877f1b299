"""The kernels of reference.py for the CPU, compiled from csrc/: same functions, same results within rounding.

Contiguous and channels_last tensors are read as they are.  A tensor of any other layout is copied to a contiguous one
first; `apply_` copies the result back, and the others return contiguous tensors for it.  ``dz`` and ``shortcut`` are
copied where their layout is not that of z.  Results repeat bit for bit with the same number of threads.
"""

from __future__ import annotations

from importlib.machinery import PathFinder
from pathlib import Path

import torch
from torch import Tensor

from zoo.ops.abn.reference import Form, accumulate_dtype

ACTIVATIONS = {"leaky_relu": 0, "elu": 1, "identity": 2}  # the order of csrc/numbers.h


def _load() -> str | None:
    """Load the compiled operators; return why they cannot be had, or None."""
    library = PathFinder.find_spec("_native", [str(Path(__file__).parent)])
    if library is None or library.origin is None:
        return (
            "not built: at installation there was no torch or no C++ compiler; with both, run "
            "pip install --no-build-isolation on the source again"
        )
    try:
        torch.ops.load_library(library.origin)
    except OSError as error:
        return f"could not be loaded: {error}"
    return None


_reason = _load()


def why_not() -> str | None:
    """Return why these kernels cannot be used, or None where they can."""
    return _reason


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance per channel, shape (C,); zeros for a tensor without elements."""
    return torch.ops.zoo.abn_statistics.default(x)


def apply(x: Tensor, mean: Tensor, var: Tensor, form: Form, shortcut: Tensor | None = None) -> Tensor:
    """Return z in a new tensor of the dtype of x."""
    return torch.ops.zoo.abn_apply.default(x, mean, var, *_settings(form), shortcut)


def apply_(x: Tensor, mean: Tensor, var: Tensor, form: Form, shortcut: Tensor | None = None) -> None:
    """Overwrite x with z."""
    torch.ops.zoo.abn_apply_.default(x, mean, var, *_settings(form), shortcut)


def backward_reduce(z: Tensor, dz: Tensor, form: Form, shortcut: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return sum(dy) and sum(dy x_hat) per channel, shape (C,), in the accumulation dtype."""
    return torch.ops.zoo.abn_backward_reduce.default(z, dz, *_settings(form), shortcut)


def backward_apply(
    z: Tensor,
    dz: Tensor,
    var: Tensor,
    means: tuple[Tensor, Tensor] | None,
    form: Form,
    shortcut: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return dL/dx and, with a shortcut, dL/dshortcut, both in new tensors; ``means`` is that of reference.py."""
    mean_dy, mean_dy_xhat = (None, None) if means is None else means
    given = (z, dz, var, mean_dy, mean_dy_xhat, *_settings(form))
    if shortcut is None:
        return torch.ops.zoo.abn_backward_apply.default(*given), None
    return torch.ops.zoo.abn_backward_apply_shortcut.default(*given, shortcut)


def _settings(form: Form) -> tuple[Tensor | None, Tensor | None, float, int, float]:
    return form.weight, form.bias, form.eps, ACTIVATIONS[form.activation], form.activation_param


def _new_like(x: Tensor) -> Tensor:
    """Return an empty tensor with the layout that the operators give to a result of the shape of x."""
    native = x.is_contiguous() or x.movedim(1, -1).is_contiguous()
    return torch.empty_like(x) if native else torch.empty_like(x, memory_format=torch.contiguous_format)


def _new_vectors(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = (x.new_empty(x.shape[1], dtype=accumulate_dtype(x.dtype)) for _ in range(2))
    return first, second


def _register_shapes() -> None:
    """Tell torch.compile and meta tensors what the operators return."""
    register = torch.library.register_fake
    register("zoo::abn_statistics", _new_vectors)
    register("zoo::abn_apply", lambda x, *_: _new_like(x))
    register("zoo::abn_apply_", lambda *_: None)
    register("zoo::abn_backward_reduce", lambda z, *_: _new_vectors(z))
    register("zoo::abn_backward_apply", lambda z, *_: _new_like(z))
    register("zoo::abn_backward_apply_shortcut", lambda z, *_: (_new_like(z), _new_like(z)))
    register("zoo::abn_backward_apply_", lambda *_: None)


if _reason is None:
    _register_shapes()
