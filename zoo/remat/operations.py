"""The rules: cheap, deterministic operations without side effects, which backward may recompute.

The output of an operation that is not listed is saved, as in plain training. A missing entry costs memory, never
exactness.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.ops.abn import native
from zoo.ops.abn.backend import kernels_for
from zoo.torch_internals import DisableTorchDispatch, has_kernel, schema_of

aten = torch.ops.aten
Operation = Any  # torch._ops.OpOverload, or a function of this package

# Elementwise operations whose output has the dtype of the first input.
SAME_DTYPE = (
    "relu", "silu", "gelu", "hardswish", "hardsigmoid", "sigmoid", "leaky_relu", "elu", "celu", "mish", "tanh",
    "hardtanh", "softplus", "threshold", "neg", "abs", "sqrt", "rsqrt", "exp", "reciprocal", "clamp", "clamp_min",
    "clamp_max",
)  # fmt: skip
# Elementwise operations with type promotion.
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
#: Operations that return the elements of their input, copied or not.
COPIES = {aten.clone.default, aten.detach.default, aten.alias.default}


class Rule(NamedTuple):
    """How an operation is recomputed.

    Args:
    - `repeat`: the functional variant of the operation.
    - `is_view`: whether the output is a view of the first input.
    - `overwrites`: whether the operation itself writes into its first input.
    """

    repeat: Operation
    is_view: bool
    overwrites: bool


def _overloads(name: str) -> Iterator[Operation]:
    packet = getattr(aten, name, None)  # some versions of torch lack some of them
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
            # Match overloads by their arguments, as names differ: pow_.Scalar is pow.Tensor_Scalar.
            for repeat in _overloads(name):
                if not schema_of(repeat).is_mutable and _signature(repeat) == _signature(operation):
                    rules[operation] = Rule(repeat, is_view=False, overwrites=True)
    return rules


def _signature(operation: Operation) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in schema_of(operation).arguments]


#: Rules by the operations as a `TorchDispatchMode` sees them.
RULES = _rules()

#: Functional operations that preserve the dtype and shape of their first input -> their in-place variants.
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
#: Matrix products -> the position of the operand whose last dimension is contracted.
PRODUCTS = {aten.addmm.default: 1, aten.mm.default: 0, aten.bmm.default: 0, aten.linear.default: 0}


def flops_of(operation: Operation, args: tuple[Any, ...], out: Tensor) -> float | None:
    """Return the FLOP count of a convolution or matrix product; None for anything else and for empty outputs."""
    if not isinstance(out, Tensor) or out.layout is not torch.strided or out.numel() == 0:
        return None
    if operation is CONVOLUTION:
        x, weight, is_transposed = args[0], args[1], args[6]
        return 2.0 * (x if is_transposed else out).numel() * weight[0].numel()
    if operation in PRODUCTS:
        return 2.0 * out.numel() * args[PRODUCTS[operation]].shape[-1]
    return None


@cache
def written_arguments(operation: Operation) -> tuple[tuple[int, str], ...]:
    """Return the positions and names of the arguments that an operation mutates."""
    if operation in BATCH_NORMS:  # update running statistics, which their schemas do not declare
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
    """Return whether an operation's in-place writes increment version counters inside its kernel, if at all."""
    if operation.namespace in ("aten", "prim") and not schema_of(operation).is_mutable:
        return False
    return not has_kernel(operation.name(), "ADInplaceOrView")


# -------------------------------------------------------------------------------------------------------- dropout
#: Operations that draw a mask of 0 and 1 -> the position of the mask among the outputs; None if it is the output.
MASKS = {aten.bernoulli_.float: None, aten.native_dropout.default: 1}


def bits_of(mask: Tensor) -> Tensor:
    """Return a mask packed into bits, uint8 of an eighth of its length. Bit k holds the k-th eighth of the mask."""
    eighths = torch.zeros(8, -(-mask.numel() // 8), dtype=torch.uint8, device=mask.device)
    eighths.view(-1)[: mask.numel()] = mask.reshape(-1)
    bits = eighths[0].clone()
    for k in range(1, 8):
        bits |= eighths[k] << k
    return bits


def mask_of(bits: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the mask unpacked from `bits_of`."""
    eighths = (bits >> torch.arange(8, dtype=torch.uint8, device=bits.device)[:, None]) & 1
    return eighths.view(-1)[: prod(shape)].to(dtype).view(shape)


# ---------------------------------------------------------------------------------------------------- batch norms
BATCH_NORMS = {
    getattr(aten, name).default
    for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
    if hasattr(aten, name)
}


def recipe_of_batch_norm(
    operation: Operation, args: tuple[Any, ...], outputs: Any
) -> tuple[Operation, tuple[Any, ...], tuple[Any, ...]]:
    """Return a function that recomputes the first output of a batch norm exactly, and its arguments.

    The arguments come in two parts: those that the norm had, and small ones that nothing else changes. Running
    statistics are not updated, and not read if the norm used those of the batch. In training, torch's own norms are
    recomputed from their saved mean and inverse standard deviation, in one pass over x: on the CPU as a scale and
    shift, on CUDA by the second of the norm's kernels. cuDNN's norms take their statistics again.
    """
    x, weight, bias, _, _, is_training = args[:6]
    if not is_training:
        return first_output, (operation, *args), ()
    if operation is aten.native_batch_norm.default:
        if has_exact_line(x, weight, bias, outputs[1]):
            return apply_line, (x,), (*line_of(weight, bias, outputs[1], outputs[2]), None, False)
        if x.is_cuda:
            return aten.batch_norm_elemt.default, (x, weight, bias), (outputs[1], outputs[2], args[7])
    return first_output, (operation, x, weight, bias, None, None, True, *args[6:]), ()


def has_exact_line(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor) -> bool:
    """Return whether `apply_line` recomputes a training-mode batch norm of x bit for bit, from its statistics."""
    is_dense = _is_dense(x) and all(each is None or each.is_contiguous() for each in (weight, bias))
    return x.device.type == "cpu" and mean.dtype == x.dtype and is_dense and line_is_exact(x.dtype)


def _is_dense(x: Tensor) -> bool:
    """Return whether x is contiguous or channels-last, the layouts that batch norms have kernels for."""
    return x.is_contiguous() or (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last))


def first_output(operation: Operation, *args: Any) -> Tensor:
    """Return the first output of an operation."""
    out: Tensor = operation(*args)[0]
    return out


def line_of(weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return (alpha, beta) with batch_norm(x) = alpha x + beta, rounded as in torch's CPU kernel."""
    alpha = invstd.clone() if weight is None else invstd * weight
    zero = torch.zeros_like(alpha) if bias is None else bias
    return alpha, torch.addcmul(zero, mean, alpha, value=-1)  # a fused multiply-add, as in the kernel


def line_of_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor] | None:
    """Return (alpha, beta) of a norm with this mean and variance, to rounding; None if `apply_line` does not apply."""
    vectors = [each for each in (weight, bias, mean) if each is not None]
    if not _is_dense(x) or x.dtype not in LINE_DTYPES or any(each.dtype != x.dtype for each in vectors):
        return None
    with DisableTorchDispatch(), torch.no_grad():
        return line_of(weight, bias, mean, torch.rsqrt(var + eps))


def apply_line(
    x: Tensor, alpha: Tensor, beta: Tensor, shortcut: Tensor | None = None, is_rectified: bool = False
) -> Tensor:
    """Return alpha x + beta per channel, plus the shortcut, followed by ReLU if ``is_rectified``.

    The result has the bits of the separate operations. The compiled kernel takes one pass over memory; the fallback
    takes one per operation.
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
    """Return whether `apply_line` has the bits of a training-mode batch norm with this build of torch on this CPU.

    The C++ compiler decides whether a multiply-add is fused. One test on random inputs finds out. False for dtypes
    other than float32 and float64.
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
