"""The FLOP of operations equal the counts of torch's own counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from zoo.remat._cost import ATTENTIONS, CONTRACTIONS, flops_of

aten = torch.ops.aten


def convolution(transposed: bool = False, groups: int = 1, stride: int = 1, sides: tuple[int, ...] = (7, 9)) -> Any:
    shape = (6, 4 // groups) if transposed else (4, 6 // groups)
    weight, each = torch.randn(*shape, *(3 for _ in sides)), [1 for _ in sides]
    x = torch.randn(2, 6, *sides)
    return aten.convolution.default, (
        x, weight, None, [stride for _ in sides], each, each, transposed, [0 for _ in sides], groups,
    )  # fmt: skip


def attention(operation: Any, queries: int = 16, keys: int = 16) -> Any:
    query, key = torch.randn(2, 4, queries, 8), torch.randn(2, 4, keys, 8)
    return operation, (query, key, key)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return attention by products, which torch's counter counts in every version."""
    return (query @ key.mT).softmax(-1) @ value


CASES: dict[str, Any] = {
    "convolution": convolution(),
    "strided convolution": convolution(stride=2),
    "grouped convolution": convolution(groups=2),
    "transposed convolution": convolution(transposed=True),
    "transposed, strided and grouped": convolution(transposed=True, stride=2, groups=2),
    "1-d convolution": convolution(sides=(11,)),
    "3-d convolution": convolution(sides=(4, 5, 6)),
    "mm": (aten.mm.default, (torch.randn(3, 5), torch.randn(5, 7))),
    "bmm": (aten.bmm.default, (torch.randn(2, 3, 5), torch.randn(2, 5, 7))),
    "addmm": (aten.addmm.default, (torch.randn(7), torch.randn(3, 5), torch.randn(5, 7))),
    "linear": (aten.linear.default, (torch.randn(2, 3, 5), torch.randn(7, 5))),
    "attention": attention(aten._scaled_dot_product_flash_attention_for_cpu.default),
    "cross attention": attention(aten._scaled_dot_product_flash_attention_for_cpu.default, queries=5),
}


@pytest.mark.parametrize("case", CASES)
def test_flops_equal_torch(case: str) -> None:
    operation, args = CASES[case]
    out = operation(*args)
    with FlopCounterMode(display=False) as counter:
        attend(*args) if operation in ATTENTIONS else operation(*args)
    assert flops_of(operation, args, out) == counter.get_total_flops() > 0


def test_products_equal_products_counted_by_torch() -> None:
    extra = {"aten.linear", "aten._scaled_dot_product_fused_attention_overrideable"}
    found = {str(operation.overloadpacket) for operation in (*CONTRACTIONS, *ATTENTIONS)}
    counted_by_some_versions = {"aten._scaled_dot_product_flash_attention_for_cpu"}
    assert found - set(map(str, flop_registry)) - counted_by_some_versions == extra
