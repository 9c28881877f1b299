"""The operations that may be repeated: cheap, deterministic, and without effects.

An operation that is not listed here is never repeated: what it returns is kept where autograd saves it, as without
recipes. So a missing row costs memory and never exactness.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.ops.abn import native
from zoo.ops.abn.backend import kernels_for
from zoo.torch_internals import DisableTorchDispatch, has_kernel, schema_of

aten = torch.ops.aten
Operation = Any  # torch._ops.OpOverload, or a function of this package

# Each element of the output depends on one element of each input, and the output has the dtype of the first input.
SAME_DTYPE = (
    "relu", "silu", "gelu", "hardswish", "hardsigmoid", "sigmoid", "leaky_relu", "elu", "celu", "mish", "tanh",
    "hardtanh", "softplus", "threshold", "neg", "abs", "sqrt", "rsqrt", "exp", "reciprocal", "clamp", "clamp_min",
    "clamp_max",
)  # fmt: skip
# Elementwise too, with a dtype that follows from all inputs.
PROMOTED = (
    "add", "sub", "rsub", "mul", "div", "pow", "addcmul", "addcdiv", "lerp", "maximum", "minimum", "where", "eq", "ne",
    "gt", "ge", "lt", "le", "masked_fill", "logical_not", "bitwise_not",
)  # fmt: skip
OTHERS = (
    "clone", "_to_copy", "cat", "stack", "roll", "flip", "constant_pad_nd", "reflection_pad2d", "replication_pad2d",
    "im2col", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
    "upsample_bilinear2d", "upsample_nearest2d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d", "mean", "sum", "amax", "amin", "var_mean", "std_mean", "linalg_vector_norm",
    "native_layer_norm", "native_group_norm", "max_pool2d_with_indices", "max_pool3d_with_indices",
    "log_sigmoid_forward",
)  # fmt: skip
VIEWS = (
    "view", "_unsafe_view", "_reshape_alias", "t", "transpose", "permute", "slice", "select", "unsqueeze", "squeeze",
    "expand", "alias", "detach", "unbind", "split", "split_with_sizes", "unfold", "diagonal",
)  # fmt: skip
#: Return the values of their first input, in a tensor of their own or not.
COPIES = {aten.clone.default, aten.detach.default, aten.alias.default}


class Rule(NamedTuple):
    """How an operation is repeated.

    Args:
    - `repeat`: the operation that computes the same and overwrites nothing.
    - `is_view`: whether its output shares the memory of its first input.
    - `overwrites`: whether the operation itself writes its output over its first input.
    """

    repeat: Operation
    is_view: bool
    overwrites: bool


def _overloads(name: str) -> Iterator[Operation]:
    packet = getattr(aten, name, None)  # not every version of torch has all of them
    for overload in packet.overloads() if packet is not None else ():
        yield getattr(packet, overload)


def _rules() -> dict[Operation, Rule]:
    rules = {}
    for name in (*SAME_DTYPE, *PROMOTED, *OTHERS, *VIEWS):
        is_view = name in VIEWS
        for operation in _overloads(name):
            if not schema_of(operation).is_mutable:
                rules[operation] = Rule(operation, is_view, overwrites=False)
        for operation in () if is_view else _overloads(f"{name}_"):
            # Of the same arguments, and not of the same name: pow_.Scalar is pow.Tensor_Scalar.
            for repeat in _overloads(name):
                if not schema_of(repeat).is_mutable and _signature(repeat) == _signature(operation):
                    rules[operation] = Rule(repeat, is_view=False, overwrites=True)
    return rules


def _signature(operation: Operation) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in schema_of(operation).arguments]


#: Rules by the operations as a `TorchDispatchMode` sees them.
RULES = _rules()

#: Of operations that keep dtype and shape of their first input: the same, written over it.
IN_PLACE = {
    rule.repeat: operation
    for operation, rule in RULES.items()
    if rule.overwrites
    and schema_of(rule.repeat).name.removeprefix("aten::") in (*SAME_DTYPE, "add", "sub", "mul", "div")
}

LINE_DTYPES = (torch.float32, torch.float64)  # of `apply_line`
CONCATENATE = aten.cat.default
ADD, RELU = aten.add.Tensor, aten.relu.default
CONVOLUTION = aten.convolution.default
#: Matrix products, and the position of the operand whose last dimension is summed over.
PRODUCTS = {aten.addmm.default: 1, aten.mm.default: 0, aten.bmm.default: 0, aten.linear.default: 0}


def flops_of(operation: Operation, args: tuple[Any, ...], out: Tensor) -> float | None:
    """Return the floating-point operations of a convolution or matrix product; None for all other operations.

    Products that are sparse or empty count as others.
    """
    if not isinstance(out, Tensor) or out.layout is not torch.strided or out.nbytes == 0:
        return None
    if operation is CONVOLUTION:
        x, weight, is_transposed = args[0], args[1], args[6]
        return 2.0 * (x if is_transposed else out).numel() * weight[0].numel()
    if operation in PRODUCTS:
        return 2.0 * out.numel() * args[PRODUCTS[operation]].shape[-1]
    return None


@cache
def written_arguments(operation: Operation) -> tuple[tuple[int, str], ...]:
    """Return positions and names of the arguments that an operation overwrites; empty for one that is functional."""
    if operation in BATCH_NORMS:  # which move running statistics, though their schemas do not say so
        return (3, "running_mean"), (4, "running_var")
    if not schema_of(operation).is_mutable:
        return ()
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema_of(operation).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def writes_inside(operation: Operation) -> bool:
    """Return whether the operations that a kernel calls, and not the operation itself, count its writes as versions."""
    if operation.namespace in ("aten", "prim") and not schema_of(operation).is_mutable:
        return False
    return not has_kernel(operation.name(), "ADInplaceOrView")


# -------------------------------------------------------------------------------------------------------- dropout
#: Draw masks, whose elements are 0 or 1, and the position of the mask among the outputs; None: the output is the mask.
MASKS = {aten.bernoulli_.float: None, aten.native_dropout.default: 1}


def bits_of(mask: Tensor) -> Tensor:
    """Return a mask as bits, uint8 of an eighth of its length: bit k of them is the k-th eighth of the mask."""
    eighths = torch.zeros(8, -(-mask.numel() // 8), dtype=torch.uint8, device=mask.device)
    eighths.view(-1)[: mask.numel()] = mask.reshape(-1)
    bits = eighths[0].clone()
    for k in range(1, 8):
        bits |= eighths[k] << k
    return bits


def mask_of(bits: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the mask that has these bits."""
    eighths = (bits >> torch.arange(8, dtype=torch.uint8, device=bits.device)[:, None]) & 1
    return eighths.view(-1)[: shape.numel()].to(dtype).view(shape)


# ---------------------------------------------------------------------------------------------------- batch norms
BATCH_NORMS = {
    getattr(aten, name).default
    for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
    if hasattr(aten, name)
}


def recipe_of_batch_norm(
    operation: Operation, args: tuple[Any, ...], outputs: Any
) -> tuple[Operation, tuple[Any, ...]]:
    """Return a function and its arguments that give the first output of a batch norm again, bit for bit.

    The arguments have the tensors themselves. Running statistics are neither read, where the norm took those of the
    batch, nor moved. In training on the CPU, the norm is repeated as the linear function that its saved mean and
    inverse deviation make of it, which takes one pass over x in place of three.
    """
    x, weight, bias, _, _, is_training = args[:6]
    if not is_training:
        return first_output, (operation, *args)
    is_dense = _is_dense(x) and all(each is None or each.is_contiguous() for each in (weight, bias))
    if x.device.type == "cpu" and outputs[1].dtype == x.dtype and is_dense and line_is_exact(x.dtype):
        return apply_line, (x, *line_of(weight, bias, outputs[1], outputs[2]), None, False)
    return first_output, (operation, x, weight, bias, None, None, True, *args[6:])


def _is_dense(x: Tensor) -> bool:
    """Return whether a map is laid out in one of the ways for which batch norms have a kernel of their own."""
    return x.is_contiguous() or (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last))


def first_output(operation: Operation, *args: Any) -> Tensor:
    """Return the first of an operation's outputs."""
    out: Tensor = operation(*args)[0]
    return out


def line_of(weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return (alpha, beta) with batch_norm(x) = alpha x + beta, rounded as the kernel on the CPU rounds them."""
    alpha = invstd.clone() if weight is None else invstd * weight
    zero = torch.zeros_like(alpha) if bias is None else bias
    return alpha, torch.addcmul(zero, mean, alpha, value=-1)  # a fused multiply-add, as in the kernel


def line_of_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor] | None:
    """Return (alpha, beta) of a norm with this mean and variance, to rounding; None where `apply_line` cannot do it."""
    vectors = [each for each in (weight, bias, mean) if each is not None]
    if not _is_dense(x) or x.dtype not in LINE_DTYPES or any(each.dtype != x.dtype for each in vectors):
        return None
    with DisableTorchDispatch(), torch.no_grad():
        return line_of(weight, bias, mean, torch.rsqrt(var + eps))


def apply_line(
    x: Tensor, alpha: Tensor, beta: Tensor, shortcut: Tensor | None = None, is_rectified: bool = False
) -> Tensor:
    """Return alpha x + beta for each channel, plus the shortcut, with ReLU if it is rectified: the bits of each step.

    The compiled kernel takes one pass over memory. Plain torch, without it, takes one for each step.
    """
    if kernels_for(x) is native:
        fused: Tensor = torch.ops.zoo.line.default(x, alpha, beta, shortcut, is_rectified)
        return fused
    zero, one = _constants(len(alpha), alpha.dtype)
    out: Tensor = aten.native_batch_norm(x, alpha, beta, zero, one, False, 0.0, 0.0)[0]
    if shortcut is not None:
        out.add_(shortcut)
    return out.relu_() if is_rectified else out


@cache
def _constants(length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.zeros(length, dtype=dtype), torch.ones(length, dtype=dtype)


@cache
def line_is_exact(dtype: torch.dtype) -> bool:
    """Return whether `apply_line` gives the bits of a batch norm in training with this version of torch and CPU.

    Whether the kernels round a product before they add to it is the compiler's choice. It is tried once, on values that
    tell the difference. Lines are of float32 and float64 only.
    """
    if dtype not in LINE_DTYPES:
        return False
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weight, bias = torch.randn(2, 37, dtype=dtype)
        for shape in ((3, 37, 5, 7), (16, 37)):
            contiguous = 3 * torch.randn(shape, dtype=dtype) + 1
            layouts = [contiguous]
            if len(shape) == 4:
                layouts.append(contiguous.contiguous(memory_format=torch.channels_last))
            for x in layouts:
                y, mean, invstd = aten.native_batch_norm(x, weight, bias, None, None, True, 0.0, 1e-5)
                line = x, *line_of(weight, bias, mean, invstd)
                if not (torch.equal(apply_line(*line), y) and torch.equal(apply_line(*line, x, True), (y + x).relu())):
                    return False
    return True
