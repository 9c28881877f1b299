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
from torch.autograd.graph import increment_version

from zoo.ops.abn.reference import Form, accumulate_dtype

ACTIVATIONS = {"leaky_relu": 0, "elu": 1, "identity": 2}  # the order of csrc/numbers.h


FORM = "Tensor? weight, Tensor? bias, float eps, int activation, float activation_param"
GRADIENTS = f"Tensor z, Tensor dz, Tensor var, Tensor? mean_dy, Tensor? mean_dy_xhat, {FORM}"
SCHEMAS = (
    "abn_statistics(Tensor x) -> (Tensor, Tensor)",
    "abn_track_statistics(Tensor x, Tensor(a!) running_mean, Tensor(b!) running_var, float momentum)"
    " -> (Tensor, Tensor)",
    f"abn_apply(Tensor x, Tensor mean, Tensor var, {FORM}, Tensor? shortcut) -> Tensor",
    f"abn_apply_(Tensor(a!) x, Tensor mean, Tensor var, {FORM}, Tensor? shortcut) -> ()",
    f"abn_backward_reduce(Tensor z, Tensor dz, {FORM}, Tensor? shortcut) -> (Tensor, Tensor)",
    f"abn_backward_apply({GRADIENTS}) -> Tensor",
    f"abn_backward_apply_shortcut({GRADIENTS}, Tensor shortcut) -> (Tensor, Tensor)",
    f"abn_backward(Tensor z, Tensor dz, Tensor var, bool batch, {FORM}) -> (Tensor, Tensor, Tensor)",
    # Overwrites dz with dx: only for a caller that owns dz.
    f"abn_backward_apply_({GRADIENTS.replace('Tensor dz', 'Tensor(a!) dz')}) -> ()",
)
# Layouts are followed, not prescribed: otherwise torch.compile copies every convolution's output to a contiguous one.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)

_library = torch.library.Library("zoo", "FRAGMENT")
for _schema in SCHEMAS:
    _library.define(_schema, tags=TAGS)


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
    except (OSError, RuntimeError) as error:
        return f"could not be loaded: {error}"
    names = [schema.partition("(")[0] for schema in SCHEMAS]
    if not all(torch._C._dispatch_has_kernel_for_dispatch_key(f"zoo::{name}", "CPU") for name in names):
        return "built from older sources; install again with pip install --no-build-isolation"
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


def backward(z: Tensor, dz: Tensor, var: Tensor, batch: bool, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """Return dL/dx, dL/dweight and dL/dbias in one call, the latter two in the accumulation dtype.

    For statistics of this process: those of x (``batch``), or such as do not depend on x; and without a shortcut.
    """
    return torch.ops.zoo.abn_backward.default(z, dz, var, batch, *_settings(form))


def track_statistics(x: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float) -> tuple[Tensor, Tensor]:
    """Return `statistics` and move the running ones in place by ``momentum`` towards them, the variance unbiased."""
    found = torch.ops.zoo.abn_track_statistics.default(x, running_mean, running_var, momentum)
    increment_version((running_mean, running_var))  # the operator does not tell autograd
    return found


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
    register("zoo::abn_backward", lambda z, *_: (_new_like(z), *_new_vectors(z)))
    register("zoo::abn_track_statistics", lambda x, *_: _new_vectors(x))


if _reason is None:
    _register_shapes()
