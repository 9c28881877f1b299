"""Loads the library compiled from csrc/, and defines the schemas and fake kernels of its operators.

The operators compute on the CPU. zoo/ops/abn/native.py, zoo/ops/pooling.py, zoo/ops/grid.py, zoo/ops/resample.py and
zoo/remat/_exact_norms.py call them.
"""

from __future__ import annotations

from importlib.machinery import PathFinder
from pathlib import Path

import torch
from torch import Tensor

from zoo.ops.operators import TAGS, new_vectors
from zoo.torch_internals.dispatch import has_kernel

SETTINGS = "Tensor? weight, Tensor? bias, float eps, int activation, float activation_param"
GRADIENTS = f"Tensor z, Tensor dz, Tensor var, Tensor? mean_dy, Tensor? mean_dy_xhat, {SETTINGS}"
WINDOW = "int[] size, int[] stride, int[] padding, int[] dilation"
SCHEMAS = (
    "abn_statistics(Tensor x) -> (Tensor, Tensor)",
    "abn_track_statistics(Tensor x, Tensor(a!) running_mean, Tensor(b!) running_var, float momentum)"
    " -> (Tensor, Tensor)",
    f"abn_apply(Tensor x, Tensor mean, Tensor var, {SETTINGS}, Tensor? shortcut) -> Tensor",
    f"abn_apply_(Tensor(a!) x, Tensor mean, Tensor var, {SETTINGS}, Tensor? shortcut) -> ()",
    f"abn_backward_reduce(Tensor z, Tensor dz, {SETTINGS}, Tensor? shortcut) -> (Tensor, Tensor)",
    f"abn_backward_apply({GRADIENTS}) -> Tensor",
    f"abn_backward_apply_shortcut({GRADIENTS}, Tensor shortcut) -> (Tensor, Tensor)",
    f"abn_backward(Tensor z, Tensor dz, Tensor var, bool batch, {SETTINGS}) -> (Tensor, Tensor, Tensor)",
    "line(Tensor x, Tensor alpha, Tensor beta, Tensor? shortcut, bool rectified) -> Tensor",
    "batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var,"
    " float momentum, float eps) -> (Tensor, Tensor, Tensor)",
    f"max_pool2d_into(Tensor(a!) z, Tensor(b!) place, Tensor x, {WINDOW}) -> ()",
    f"max_pool2d_backward_into(Tensor(a!) dx, Tensor dz, Tensor place, {WINDOW}) -> ()",
    "grid_sum_into(Tensor(a!) out, Tensor(b!) summary, Tensor x, Tensor r, float scale, bool subtracts) -> ()",
    "resize_into(Tensor(a!) out, Tensor image, int height, int width, float left, float top, float right, float bottom,"
    " int first_row, int first_column, bool vertical_first) -> ()",
)
_library = torch.library.Library("zoo", "FRAGMENT")
for _schema in SCHEMAS:
    _library.define(_schema, tags=TAGS)


def _load() -> str | None:
    """Load the compiled operators; return why they are unavailable, or None if they are loaded."""
    library = PathFinder.find_spec("_native", [str(Path(__file__).parent)])
    if library is None or library.origin is None:
        return (
            "not built: torch or a C++ compiler was missing at installation; install both, then run "
            "pip install --no-build-isolation on the source again"
        )
    try:
        torch.ops.load_library(library.origin)
    except (OSError, RuntimeError) as error:
        return f"could not be loaded: {error}"
    names = [schema.partition("(")[0] for schema in SCHEMAS]
    if not all(has_kernel(f"zoo::{name}", "CPU") for name in names):
        return "built from older sources; reinstall with pip install --no-build-isolation"
    return None


_reason = _load()


def unavailable_reason() -> str | None:
    """Return why the operators are unavailable, or None if they are available."""
    return _reason


def new_like(x: Tensor) -> Tensor:
    """Return an uninitialized tensor with the shape of x and the layout that the operators return."""
    native = x.is_contiguous() or x.movedim(1, -1).is_contiguous()
    return torch.empty_like(x) if native else torch.empty_like(x, memory_format=torch.contiguous_format)


if _reason is None:  # the fake kernels, for torch.compile and meta tensors
    _register = torch.library.register_fake
    _register("zoo::abn_statistics", new_vectors)
    _register("zoo::abn_apply", lambda x, *_: new_like(x))
    _register("zoo::abn_apply_", lambda *_: None)
    _register("zoo::abn_backward_reduce", lambda z, *_: new_vectors(z))
    _register("zoo::abn_backward_apply", lambda z, *_: new_like(z))
    _register("zoo::abn_backward_apply_shortcut", lambda z, *_: (new_like(z), new_like(z)))
    _register("zoo::abn_backward", lambda z, *_: (new_like(z), *new_vectors(z)))
    _register("zoo::abn_track_statistics", lambda x, *_: new_vectors(x))
    _register("zoo::line", lambda x, *_: new_like(x))
    _register("zoo::batch_norm", lambda x, *_: (torch.empty_like(x), *new_vectors(x)))
    _register("zoo::max_pool2d_into", lambda *_: None)
    _register("zoo::max_pool2d_backward_into", lambda *_: None)
    _register("zoo::grid_sum_into", lambda *_: None)
    _register("zoo::resize_into", lambda *_: None)
