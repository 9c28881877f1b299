"""The FLOP of expensive operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zoo.remat._operations import Operation, aten, first_tensor, overloads
from zoo.torch_internals.dispatch import schema_of

CONVOLUTION = aten.convolution.default
#: Matrix product -> position of the operand whose last dimension is contracted.
CONTRACTIONS = {aten.addmm.default: 1, aten.mm.default: 0, aten.bmm.default: 0, aten.linear.default: 0}
#: Kernel of scaled dot product attention (query, key, value, ...) -> position of its dropout probability.
ATTENTIONS = {
    operation: [argument.name for argument in schema_of(operation).arguments].index("dropout_p")
    for name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention",
                 "fused_attention_overrideable")
    for operation in overloads(f"_scaled_dot_product_{name}")
}  # fmt: skip
LINEAR = {aten.addmm.default, aten.mm.default}  #: matrix products that are recomputed without a budget if of low rank
LOW_RANK, LOW_RANK_RATIO = 16, 8  # maximum rank, and minimum ratio of output features to it
#: The operations that `flops_of` counts: convolutions, matrix products and attention.
PRODUCTS = {CONVOLUTION, *CONTRACTIONS, *ATTENTIONS}


def flops_of(operation: Operation, args: tuple[Any, ...], out: Any) -> float | None:
    """Return the FLOP count of a convolution, matrix product or attention without dropout.

    None for anything else, for empty outputs and for nested tensors.
    """
    # torch.utils.flop_counter takes over ten times as long, and lacks linear and an attention.
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
    """Return whether one of `PRODUCTS` is a matrix product of low rank, such as the second one of LoRA.

    Such a product takes about as long as an elementwise operation. Convolutions, batched products and small square
    products take longer, even with as few FLOP per byte.
    """
    if operation not in LINEAR:
        return False
    position = CONTRACTIONS[operation]
    rank, width = args[position].shape[-1], args[position + 1].shape[-1]
    return bool(rank <= LOW_RANK and width >= LOW_RANK_RATIO * rank)
