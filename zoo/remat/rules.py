"""The rules: cheap, deterministic operations without side effects, which backward may recompute.

The output of an operation that is not listed is saved, as in plain training. A missing entry costs memory, never
exactness.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zoo.ops.backend import name_for
from zoo.torch_internals.dispatch import (
    DisableTorchDispatch,
    OperatorOverload,
    autocast_of_caller,
    has_kernel,
    resolve_views,
    schema_of,
)

aten = torch.ops.aten
Operation = Any  # torch._ops.OpOverload, or a function of this package

MAX_DEPTH = 4  # recomputed saved tensors in a chain: bounds the work and the peak memory of one recomputation
# Smaller tensors are saved, as recomputing them costs more time than the memory is worth.
MIN_BYTES = 2**14

# Beside these, the pointwise operations that torch tags as such.
OTHERS = (
    "roll", "flip", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "avg_pool2d", "avg_pool3d",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_softmax", "_log_softmax", "_safe_softmax", "glu", "mean", "sum",
    "amax", "amin", "var_mean", "std_mean", "linalg_vector_norm", "native_layer_norm", "native_group_norm",
    "max_pool2d_with_indices", "max_pool3d_with_indices", "log_sigmoid_forward", "hardswish", "_prelu_kernel",
    "elu_backward", "hardswish_backward", "hardtanh_backward", "leaky_relu_backward", "softplus_backward",
    "_softmax_backward_data", "_log_softmax_backward_data",
)  # fmt: skip
# Operations whose output may be larger than their inputs.
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
    packet = getattr(aten, name, None)  # not every operation has an in-place variant
    for overload in packet.overloads() if packet is not None else ():
        yield getattr(packet, overload)


def _rules() -> dict[Operation, Rule]:
    rules = {}
    for name in (*OTHERS, *ENLARGING, *VIEWS):
        is_view = name in VIEWS
        for operation in _overloads(name):
            if not schema_of(operation).is_mutable:
                rules[operation] = Rule(operation, is_view, overwrites=False)
        for operation in () if is_view else _overloads(f"{name}_"):
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


def is_pointwise(operation: Operation) -> bool:
    """Return whether an operation of torch is elementwise and draws no random numbers, by torch's tags."""
    if not isinstance(operation, OperatorOverload) or operation.namespace != "aten":
        return False
    is_deterministic = torch.Tag.nondeterministic_seeded not in operation.tags
    returns_tensors = all(str(each.type) == "Tensor" for each in schema_of(operation).returns)  # `equal` does not
    return torch.Tag.pointwise in operation.tags and is_deterministic and returns_tensors


@cache
def in_place_of(operation: Operation) -> Operation | None:
    """Return the in-place variant of a pointwise operation; None for other operations."""
    if operation is not HARDSWISH and not is_pointwise(operation):
        return None
    return _with_signature(f"{schema_of(operation).name.removeprefix('aten::')}_", operation)


def _functional(operation: Operation) -> Operation | None:
    """Return the functional variant of an in-place operation; None if there is none, or for one with ``out``."""
    name = schema_of(operation).name.removeprefix("aten::")
    found = _with_signature(name.removesuffix("_"), operation) if name.endswith("_") else None
    return None if found is None or schema_of(found).is_mutable else found


def _with_signature(name: str, operation: Operation) -> Operation | None:
    """Return the overload of a name with the arguments of an operation: pow.Tensor_Scalar for pow_.Scalar."""
    return next((each for each in _overloads(name) if _signature(each) == _signature(operation)), None)


def _signature(operation: Operation) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in schema_of(operation).arguments]


LINE_DTYPES = (torch.float32, torch.float64)  # of `apply_line`
VECTOR = 8  # channels


def max_pool_with_indices(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return the outputs of `max_pool2d_with_indices`.

    On the CPU, torch's channels-last kernel is three times as fast as the contiguous kernel if there are enough
    channels to vectorize over. Maxima are not rounded, so both kernels return the same bits. Half precision keeps its
    kernel, because NaN beside infinity gives other bits there.
    """
    is_slow = (
        type(x) is Tensor and x.device.type == "cpu" and x.dtype in LINE_DTYPES and x.ndim == 4 and x.is_contiguous()
    )
    if not is_slow or x.shape[1] < VECTOR:
        first: tuple[Tensor, Tensor] = aten.max_pool2d_with_indices(x, *args, **kwargs)
        return first
    out, indices = aten.max_pool2d_with_indices(x.contiguous(memory_format=torch.channels_last), *args, **kwargs)
    # `contiguous` would keep the strides of sizes of 1.
    return out.clone(memory_format=torch.contiguous_format), indices.clone(memory_format=torch.contiguous_format)


def batch_norm(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs of `native_batch_norm`, and update the running statistics.

    In training on the CPU, torch accumulates each channel in double precision, one element after another. The compiled
    kernel vectorizes over channels, keeps this order, and takes a third of the time.
    """
    if kwargs or not _can_sum_side_by_side(x, *args):
        out: tuple[Tensor, Tensor, Tensor] = aten.native_batch_norm(x, *args, **kwargs)
        return out
    *tensors, _, momentum, eps = args
    fast: tuple[Tensor, Tensor, Tensor] = torch.ops.zoo.batch_norm.default(x, *tensors, momentum, eps)
    return fast


def _can_sum_side_by_side(x: Tensor, *args: Any) -> bool:
    *vectors, is_training, _, _ = args
    return (
        is_training
        and type(x) is Tensor
        and x.dtype is torch.float32
        and x.is_contiguous()
        and (1 not in x.shape or x.stride() == _contiguous_strides(x))  # torch's output has these
        and x.ndim > 2
        and x.shape[1] % VECTOR == 0
        and x.numel() > x.shape[0] * x.shape[1]  # torch sums single positions in another order
        and name_for(x.device) == "native"
        and all(each is None or (each.dtype is torch.float32 and each.is_contiguous()) for each in vectors)
        and batch_norm_is_exact()
    )


def _contiguous_strides(x: Tensor) -> tuple[int, ...]:
    return tuple(prod(x.shape[dim + 1 :]) for dim in range(x.ndim))


#: Operations -> functions with the same bits that take less time, in forward too.
FASTER = {
    aten.max_pool2d_with_indices.default: max_pool_with_indices,
    aten.native_batch_norm.default: batch_norm,
}
#: Rules by the operations as a `TorchDispatchMode` sees them; `rule_of` adds rules of pointwise operations.
RULES = _rules() | {aten.max_pool2d_with_indices.default: Rule(max_pool_with_indices, is_view=False, overwrites=False)}

ENLARGES = {operation for name in ENLARGING for operation in _overloads(name)}
CONCATENATE = aten.cat.default
(UNSAFE_VIEW,) = (each for each in _overloads("_unsafe_view") if not schema_of(each).is_mutable)
ADD, RELU, HARDSWISH = aten.add.Tensor, aten.relu.default, aten.hardswish.default
CONVOLUTION = aten.convolution.default
#: Matrix products -> the position of the operand whose last dimension is contracted.
CONTRACTIONS = {aten.addmm.default: 1, aten.mm.default: 0, aten.bmm.default: 0, aten.linear.default: 0}


#: Kernels of scaled dot product attention of (query, key, value, ...) -> the position of their dropout probability.
ATTENTIONS = {
    operation: [argument.name for argument in schema_of(operation).arguments].index("dropout_p")
    for name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention",
                 "fused_attention_overrideable")
    for operation in _overloads(f"_scaled_dot_product_{name}")
}  # fmt: skip

LINEAR = {aten.addmm.default, aten.mm.default}  #: products of low rank are recomputed without a budget
LOW_RANK, LOW_RANK_RATIO = 16, 8  # at most this many inner features, and this many times as many outer ones

#: Operations whose kernels call matrix products, which autocast casts.
CASTS_INSIDE = {
    operation for name in ("_trilinear", "affine_grid_generator", "linalg_polar") for operation in _overloads(name)
}


def call_in_mode(operation: Operation, *args: Any, **kwargs: Any) -> Any:
    """Return the result of an operation, within `__torch_dispatch__`, whose kernel may call other operations.

    It has the bits that it has without a dispatch mode: autocast casts the arguments of the operations inside, and they
    read conjugated views of complex arguments. The kernels of custom operators call others, and in inference mode those
    of composite operations do. Otherwise torch decomposes a composite operation before `__torch_dispatch__` is called.
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


#: Convolutions, matrix products and attention, which `flops_of` counts.
PRODUCTS = {CONVOLUTION, *CONTRACTIONS, *ATTENTIONS}


def flops_of(operation: Operation, args: tuple[Any, ...], out: Any) -> float | None:
    """Return the FLOP count of a convolution, matrix product or attention without dropout.

    None for anything else, for empty outputs and for nested tensors.
    """
    out = first_tensor(out)
    if not isinstance(out, Tensor) or out.layout is not torch.strided or out.is_nested or out.numel() == 0:
        return None
    if operation is CONVOLUTION:
        x, weight, is_transposed = args[0], args[1], args[6]
        return 2.0 * (x if is_transposed else out).numel() * weight[0].numel()
    if operation in CONTRACTIONS:
        return 2.0 * out.numel() * args[CONTRACTIONS[operation]].shape[-1]
    if operation in ATTENTIONS and not any(args[ATTENTIONS[operation] :][:1]):
        query, key = args[:2]
        return 2.0 * query.numel() * key.shape[-2] + 2.0 * out.numel() * key.shape[-2]
    return None


def is_low_rank(operation: Operation, args: Sequence[Any]) -> bool:
    """Return whether an operation that `flops_of` counts is a product of low rank, such as the second one of LoRA.

    Such a product takes about as long as an elementwise operation. Convolutions, batched products and small square
    products with as few FLOP per byte take longer.
    """
    if operation not in LINEAR:
        return False
    position = CONTRACTIONS[operation]
    rank, width = args[position].shape[-1], args[position + 1].shape[-1]
    return bool(rank <= LOW_RANK and width >= LOW_RANK_RATIO * rank)


def first_tensor(out: Any) -> Any:
    """Return the first output of an operation with several outputs, and the output of any other operation."""
    return out[0] if isinstance(out, (tuple, list)) and out else out


def call_with_keywords(operation: Operation, names: Sequence[str], *args: Any, **kwargs: Any) -> Any:
    """Call an operation with the first of ``args`` passed as keywords of these names; return its result."""
    return operation(*args[len(names) :], **dict(zip(names, args, strict=False)), **kwargs)


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


def writes_inside(operation: Operation) -> bool:
    """Return whether an operation's in-place writes increment version counters inside its kernel, if at all."""
    if operation.namespace in ("aten", "prim") and not schema_of(operation).is_mutable:
        return False
    return not has_kernel(operation.name(), "ADInplaceOrView")


#: Operations that save their input although backward reads only its shape and strides.
POOLINGS = ("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d",
            "_adaptive_avg_pool3d")  # fmt: skip
READS_SHAPE = {operation for name in POOLINGS for operation in _overloads(name)}
POOL_BACKWARDS = {operation for name in POOLINGS for operation in _overloads(f"{name}_backward")}


def unread_input(operation: Operation, args: tuple[Any, ...]) -> Tensor | None:
    """Return the input that autograd saves although no gradient depends on its elements; None if there is none.

    Convolutions and evaluation-mode batch norms save their input for the gradient of the weight, frozen or not.
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


def signs_of(rectified: Tensor) -> Tensor:
    """Return which elements of the output of a ReLU are not 0, as bits."""
    return bits_of(~(rectified <= 0))  # NaN counts as positive in backward


def rectified_of(
    bits: Tensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a tensor unpacked from `signs_of`: 0 where the output of the ReLU was 0, otherwise 1."""
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(mask_of(bits, shape, dtype))


def own(x: Tensor) -> Tensor:
    """Return the tensor if torch owns its memory; otherwise a copy, because other code may overwrite the memory.

    Also copies inference tensors, which autograd cannot save.
    """
    return x if x.untyped_storage().resizable() and not x.is_inference() else torch.empty_like(x).copy_(x)


#: Operations that draw a mask of 0 and 1 -> the position of the mask among the outputs; None if it is the output.
MASKS = {aten.bernoulli_.float: None, aten.native_dropout.default: 1}


def bits_of(mask: Tensor) -> Tensor:
    """Return a mask packed into bits: uint8, an eighth as long.

    On the CPU, numpy packs neighbors into a byte in one pass. Elsewhere bit k holds the k-th eighth of the mask.
    """
    if mask.device.type == "cpu":
        array = mask.to(torch.bool, copy=True).numpy()  # a copy: the array owns its memory from now on
        return torch.from_numpy(np.packbits(array.reshape(-1))).clone()  # in memory of torch
    eighths = torch.zeros(8, -(-mask.numel() // 8), dtype=torch.uint8, device=mask.device)
    eighths.view(-1)[: mask.numel()] = mask.reshape(-1)
    bits = eighths[0].clone()
    for k in range(1, 8):
        bits |= eighths[k] << k
    return bits


def mask_of(bits: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the mask unpacked from `bits_of`."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(bits.numpy(), count=prod(shape))).to(dtype, copy=True).view(shape)
    eighths = (bits >> torch.arange(8, dtype=torch.uint8, device=bits.device)[:, None]) & 1
    return eighths.view(-1)[: prod(shape)].to(dtype).view(shape)


BATCH_NORMS = {aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default}


def recipe_of_batch_norm(
    operation: Operation, args: tuple[Any, ...], outputs: Any
) -> tuple[Operation, tuple[Any, ...], tuple[Any, ...]]:
    """Return a function that recomputes the first output of a batch norm exactly, and its arguments.

    The arguments are in two parts: the norm's own, and small ones that nothing else modifies. Running statistics are
    not updated. If the norm used batch statistics, only the dtype of its running statistics is needed, which selects
    the kernel. In training, torch's own norms are recomputed from their saved mean and inverse standard deviation, in
    one pass over x: on the CPU as a scale and shift, on CUDA by the second of the norm's kernels. cuDNN's norms
    recompute their statistics, because their rounding is not documented.
    """
    x, weight, bias, _, _, is_training = args[:6]
    if not is_training:
        return first_output, (operation, *args), ()
    if operation is aten.native_batch_norm.default:
        if has_exact_line(x, weight, bias, outputs[1]):
            return apply_line, (x,), (*line_of(weight, bias, outputs[1], outputs[2]), None, False)
        if x.is_cuda:
            return aten.batch_norm_elemt.default, (x, weight, bias), (outputs[1], outputs[2], args[7])
    dtype = None if args[3] is None else args[3].dtype
    return repeat_batch_norm, (operation, dtype, x, weight, bias, *args[6:]), ()


def repeat_batch_norm(
    operation: Operation,
    dtype: torch.dtype | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *settings: float,
) -> Tensor:
    """Return the first output of a training-mode batch norm that had running statistics of this dtype, if any."""
    scratch = (None, None) if dtype is None else x.new_zeros(2, x.shape[1], dtype=dtype)
    out: Tensor = operation(x, weight, bias, *scratch, True, *settings)[0]
    return out


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


def apply_line(
    x: Tensor, alpha: Tensor, beta: Tensor, shortcut: Tensor | None = None, is_rectified: bool = False
) -> Tensor:
    """Return alpha x + beta per channel, plus the shortcut, followed by ReLU if ``is_rectified``.

    The result has the bits of the separate operations. The compiled kernel takes one pass over memory; the fallback
    takes one per operation.
    """
    if name_for(x.device) == "native":
        fused: Tensor = torch.ops.zoo.line.default(x, alpha, beta, shortcut, is_rectified)
        return fused
    # Batch norm adds beta - mean alpha: a product of +0 leaves the sign of a zero beta.
    mean = torch.zeros_like(alpha).copysign(alpha)
    out: Tensor = aten.native_batch_norm(x, alpha, beta, mean, torch.ones_like(alpha), False, 0.0, 0.0)[0]
    if shortcut is not None:
        out.add_(shortcut)
    return out.relu_() if is_rectified else out


@cache
def batch_norm_is_exact() -> bool:
    """Return whether the kernel of `batch_norm` has the bits of this build of torch, by one test on random inputs."""
    with DisableTorchDispatch(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for shape in ((3, 16, 5, 7), (2, 8, 3, 3), (1, 24, 30)):
            x = 3 * torch.randn(shape) + 1
            weight, bias, *old = torch.rand(4, shape[1])
            ours, torchs = ([each.clone() for each in old] for _ in range(2))
            outputs = torch.ops.zoo.batch_norm.default(x, weight, bias, *ours, 0.1, 1e-5)
            expected = aten.native_batch_norm(x, weight, bias, *torchs, True, 0.1, 1e-5)
            if not all(map(torch.equal, (*outputs, *ours), (*expected, *torchs))):
                return False
    return True


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
        maps, rows = (3 * torch.randn(shape, dtype=dtype) + 1 for shape in ((3, 37, 5, 7), (16, 37)))
        for x in (maps, maps.contiguous(memory_format=torch.channels_last), rows):
            y, mean, invstd = aten.native_batch_norm(x, weight, bias, None, None, True, 0.0, 1e-5)
            line = x, *line_of(weight, bias, mean, invstd)
            if not (torch.equal(apply_line(*line), y) and torch.equal(apply_line(*line, x, True), (y + x).relu())):
                return False
    return True
