"""The rules of recomputation: cheap, deterministic operations without side effects.

Outputs of other operations are saved, as in plain training. A missing rule costs memory, never exactness.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from zoo.remat._cost import CONVOLUTION
from zoo.remat._exact_norms import max_pool_with_indices
from zoo.remat._operations import BATCH_NORMS, Operation, aten, is_pointwise, overloads
from zoo.torch_internals.dispatch import schema_of

# Operations that torch does not tag as pointwise. `rule_of` adds those that it does.
OTHERS = (
    "roll", "flip", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "avg_pool2d", "avg_pool3d",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_softmax", "_log_softmax", "_safe_softmax", "glu", "mean", "sum",
    "amax", "amin", "var_mean", "std_mean", "linalg_vector_norm", "native_layer_norm", "native_group_norm",
    "max_pool2d_with_indices", "max_pool3d_with_indices", "log_sigmoid_forward", "hardswish", "_prelu_kernel",
    "elu_backward", "hardswish_backward", "hardtanh_backward", "leaky_relu_backward", "softplus_backward",
    "_softmax_backward_data", "_log_softmax_backward_data",
)  # fmt: skip
# Operations with outputs that may be larger than their inputs.
ENLARGING = (
    "cat", "stack", "clone", "_to_copy", "constant_pad_nd", "reflection_pad2d", "replication_pad2d", "im2col",
    "upsample_bilinear2d", "upsample_bicubic2d", "upsample_linear1d", "upsample_trilinear3d", "upsample_nearest1d",
    "upsample_nearest2d", "upsample_nearest3d", "index", "index_select", "gather", "embedding", "repeat",
)  # fmt: skip
VIEWS = (
    "view", "_unsafe_view", "_reshape_alias", "t", "transpose", "permute", "slice", "select", "unsqueeze", "squeeze",
    "expand", "alias", "detach", "unbind", "split", "split_with_sizes", "unfold", "diagonal",
)  # fmt: skip
#: Operations that return the elements of their input, copied or not.
COPIES = {aten.clone.default, aten.detach.default, aten.alias.default}


class Rule(NamedTuple):
    """How to recompute an operation.

    Args:
    - `repeat`: the functional variant of the operation.
    - `is_view`: whether the output is a view of the first input.
    - `overwrites`: whether the operation itself writes into its first input.
    """

    repeat: Operation
    is_view: bool
    overwrites: bool


def _rules() -> dict[Operation, Rule]:
    rules = {}
    for name in (*OTHERS, *ENLARGING, *VIEWS):
        is_view = name in VIEWS
        for operation in overloads(name):
            if not schema_of(operation).is_mutable:
                rules[operation] = Rule(operation, is_view, overwrites=False)
        for operation in () if is_view else overloads(f"{name}_"):
            if (repeat := _functional(operation)) is not None:
                rules[operation] = Rule(repeat, is_view=False, overwrites=True)
    return rules


def rule_of(operation: Operation) -> Rule | None:
    """Return the rule of an operation; None if it is not recomputed."""
    if operation not in RULES and is_pointwise(operation):
        repeat = _functional(operation) if schema_of(operation).is_mutable else operation
        if repeat is not None:
            RULES[operation] = Rule(repeat, is_view=False, overwrites=repeat is not operation)
    return RULES.get(operation)


@cache
def in_place_of(operation: Operation) -> Operation | None:
    """Return the in-place variant of a pointwise operation; None for other operations."""
    if operation is not HARDSWISH and not is_pointwise(operation):
        return None
    return _with_signature(f"{schema_of(operation).name.removeprefix('aten::')}_", operation)


def _functional(operation: Operation) -> Operation | None:
    """Return the functional variant of an in-place operation; None without one, and for operations with ``out``."""
    name = schema_of(operation).name.removeprefix("aten::")
    found = _with_signature(name.removesuffix("_"), operation) if name.endswith("_") else None
    return None if found is None or schema_of(found).is_mutable else found


def _with_signature(name: str, operation: Operation) -> Operation | None:
    """Return the overload with this name and the arguments of an operation: pow.Tensor_Scalar for pow_.Scalar."""
    return next((overload for overload in overloads(name) if _signature(overload) == _signature(operation)), None)


def _signature(operation: Operation) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in schema_of(operation).arguments]


#: Operation of a `TorchDispatchMode` -> its rule. `rule_of` adds rules of pointwise operations.
RULES = _rules() | {aten.max_pool2d_with_indices.default: Rule(max_pool_with_indices, is_view=False, overwrites=False)}
ENLARGES = {operation for name in ENLARGING for operation in overloads(name)}
(UNSAFE_VIEW,) = (overload for overload in overloads("_unsafe_view") if not schema_of(overload).is_mutable)
ADD, RELU, HARDSWISH = aten.add.Tensor, aten.relu.default, aten.hardswish.default
#: Operations that save their input, although backward reads only its shape and strides.
POOLINGS = ("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d",
            "_adaptive_avg_pool3d")  # fmt: skip
READS_SHAPE = {operation for name in POOLINGS for operation in overloads(name)}
POOL_BACKWARDS = {operation for name in POOLINGS for operation in overloads(f"{name}_backward")}


def unread_input(operation: Operation, args: tuple[Any, ...]) -> Tensor | None:
    """Return the input that autograd saves although backward does not read its elements; None without such an input.

    Convolutions and evaluation-mode batch norms save their input for the gradient of the weight, even if the weight is
    frozen.
    """
    if operation is CONVOLUTION:
        is_frozen = not args[1].requires_grad
    elif operation in BATCH_NORMS:
        is_frozen = not args[5] and (args[1] is None or not args[1].requires_grad)
    else:
        is_frozen = operation in READS_SHAPE
    return args[0] if is_frozen and args[0].requires_grad else None


def reads_only_shape(operation: Operation, args: tuple[Any, ...]) -> bool:
    """Return whether a backward operation reads only the shape and strides of ``args[1]``, an input of forward."""
    if operation is aten.convolution_backward.default:
        return not args[10][1]
    if operation is aten.native_batch_norm_backward.default:
        return not args[7] and not args[9][1]
    return operation in POOL_BACKWARDS


#: Operations that draw a mask of 0 and 1 -> index of the mask among their outputs; None if it is the only output.
MASKS = {aten.bernoulli_.float: None, aten.native_dropout.default: 1}
