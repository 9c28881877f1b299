"""Operations of torch: their schemas, and calls of them within a dispatch mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from zoo.torch_internals.dispatch import (
    OperatorOverload,
    autocast_of_caller,
    has_kernel,
    resolve_views,
    schema_of,
)

aten = torch.ops.aten
Operation = Any  # torch._ops.OpOverload, or a function of this package


def overloads(name: str) -> Iterator[Operation]:
    """Yield the overloads of an operation of torch."""
    packet = getattr(aten, name, None)  # not every operation has an in-place variant
    for overload in packet.overloads() if packet is not None else ():
        yield getattr(packet, overload)


def is_pointwise(operation: Operation) -> bool:
    """Return whether torch's tags describe an operation as elementwise and deterministic."""
    if not isinstance(operation, OperatorOverload) or operation.namespace != "aten":
        return False
    is_deterministic = torch.Tag.nondeterministic_seeded not in operation.tags
    returns_tensors = all(str(out.type) == "Tensor" for out in schema_of(operation).returns)  # False for `equal`
    return torch.Tag.pointwise in operation.tags and is_deterministic and returns_tensors


#: Operations whose kernels call matrix products. Autocast casts the arguments of these.
CASTS_INSIDE = {
    operation for name in ("_trilinear", "affine_grid_generator", "linalg_polar") for operation in overloads(name)
}


def call_in_mode(operation: Operation, *args: Any, **kwargs: Any) -> Any:
    """Call an operation within `__torch_dispatch__`; return the result that it has without a dispatch mode.

    This matters for kernels that call other operations: autocast must cast the arguments of these, and they must be
    able to read conjugated views of complex arguments. Kernels of custom operators call other operations. In inference
    mode, kernels of composite operations do so too. Otherwise torch decomposes a composite operation before it calls
    `__torch_dispatch__`.
    """
    reads_views = any(isinstance(arg, Tensor) and arg.is_complex() for arg in args)
    may_call = torch.is_inference_mode_enabled() or operation.namespace not in ("aten", "prim", "prims")
    casts = operation in CASTS_INSIDE or (may_call and isinstance(operation, OperatorOverload))
    if not reads_views and not casts:
        return operation(*args, **kwargs)
    with (
        resolve_views() if reads_views else nullcontext(),
        autocast_of_caller(operation.name()) if casts else nullcontext(),
    ):
        return operation(*args, **kwargs)


def first_tensor(out: Any) -> Any:
    """Return the first of several outputs, or the only output."""
    return out[0] if isinstance(out, (tuple, list)) and out else out


def call_with_keywords(operation: Operation, names: Sequence[str], *args: Any, **kwargs: Any) -> Any:
    """Call an operation, with the first of ``args`` as the keyword arguments ``names``; return its result."""
    return operation(*args[len(names) :], **dict(zip(names, args, strict=False)), **kwargs)


def written_arguments(operation: Operation) -> tuple[tuple[int, str], ...]:
    """Return the positions and names of the arguments that an operation mutates."""
    if operation in BATCH_NORMS:  # their schemas do not declare that they update running statistics
        return (3, "running_mean"), (4, "running_var")
    if not schema_of(operation).is_mutable:
        return ()
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema_of(operation).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def writes_inside(operation: Operation) -> bool:
    """Return whether version counters are incremented inside the kernel of an operation, not around it."""
    if operation.namespace in ("aten", "prim") and not schema_of(operation).is_mutable:
        return False
    return not has_kernel(operation.name(), "ADInplaceOrView")


#: The batch norms of torch.
BATCH_NORMS = {aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default}


def first_output(operation: Operation, *args: Any) -> Tensor:
    """Return the first output of an operation."""
    out: Tensor = operation(*args)[0]
    return out
