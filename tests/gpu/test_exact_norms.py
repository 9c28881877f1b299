"""Batch norms on a GPU that lean training recomputes in one pass over memory, from their statistics."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.ops.norm_cases import LAYOUTS, lay_out
from zoo.memory.values import bits
from zoo.remat._exact_norms import normalize, order_of
from zoo.remat._operations import aten

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = [(32, 64, 112, 112), (64, 512, 28, 28), (128, 1024, 14, 14), (64, 2048, 7, 7), (5, 48, 33, 31)]
OPERATIONS = {"torch": aten.native_batch_norm.default, "cudnn": aten.cudnn_batch_norm.default}
CASES = [
    (name, dtype, parameters, layout, shape)
    for (name, dtype, parameters), layout, shape in itertools.product(
        [("torch", "float32", "float32"), ("torch", "bfloat16", "float32"), ("torch", "bfloat16", "bfloat16"),
         ("torch", "float16", "float32"), ("cudnn", "float32", "float32"), ("cudnn", "float16", "float32")],
        LAYOUTS, SHAPES,
    )
]  # fmt: skip


def same(a: Tensor, b: Tensor) -> bool:
    return a.stride() == b.stride() and torch.equal(bits(a.contiguous()), bits(b.contiguous()))


@pytest.mark.parametrize("weights", ["random", "subnormal"])
@pytest.mark.parametrize(("name", "dtype", "parameters", "layout", "shape"), CASES)
def test_norm_recomputed_in_one_pass_has_bits_of_torch(name, dtype, parameters, layout, shape, weights):
    torch.manual_seed(0)
    channels, dtype, parameters = shape[1], getattr(torch, dtype), getattr(torch, parameters)
    x, shortcut = (lay_out(torch.randn(shape, device="cuda").mul(2).add(0.5).to(dtype), layout) for _ in range(2))
    weight = (torch.rand(channels, device="cuda") - 0.3).to(parameters)
    bias = torch.randn(channels, device="cuda").to(parameters)
    running = torch.zeros(channels, device="cuda").to(parameters), torch.ones(channels, device="cuda").to(parameters)

    def norm() -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = OPERATIONS[name](x, weight, bias, *running, True, 0.1, 1e-5)
        return found

    order = order_of(OPERATIONS[name], x, weight, bias, norm())
    assert order is not None
    if weights == "subnormal":  # as weight decay leaves them behind
        weight.mul_(torch.finfo(torch.float32).tiny / 16)
        bias.zero_()
    y, mean, invstd = norm()[:3]
    assert same(normalize(x, weight, bias, mean, invstd, order), y)
    assert same(normalize(x, weight, bias, mean, invstd, order, shortcut), y + shortcut)
    assert same(normalize(x, weight, bias, mean, invstd, order, None, True), y.relu())
    assert same(normalize(x, weight, bias, mean, invstd, order, shortcut, True), (y + shortcut).relu())


def test_values_without_magnitude_have_bits_of_torch():
    x = torch.randn(8, 16, 32, 32, device="cuda")
    weight, bias = torch.randn(2, 16, device="cuda")
    order = order_of(OPERATIONS["torch"], x, weight, bias, OPERATIONS["torch"](x, weight, bias, None, None, True, 0, 1))
    assert order == "weight first"
    x.view(-1)[:4] = torch.tensor([0.0, -0.0, torch.inf, torch.nan], device="cuda")
    zeros, ones = torch.zeros(16, device="cuda"), torch.ones(16, device="cuda")
    for shortcut, weight in itertools.product((-torch.zeros_like(x), x), (ones, -ones, zeros)):
        y = aten.batch_norm_elemt(x, weight, -zeros, zeros, ones, 0.0)
        assert same(normalize(x, weight, -zeros, zeros, ones, "weight first", shortcut, True), (y + shortcut).relu())


def test_equal_outputs_of_several_orders_choose_none():
    x = torch.zeros(4, 16, 32, 32, device="cuda")
    weight, bias = torch.ones(2, 16, device="cuda")
    outputs = OPERATIONS["cudnn"](x, weight, bias, bias.clone(), weight.clone(), True, 0.1, 1e-5)
    assert order_of(OPERATIONS["cudnn"], x, weight, bias, outputs) is None
