"""Whether an order of rounding has the bits of cuDNN's batch norm, so that backward may recompute it in one pass."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torchvision

import zoo
from zoo.ops.norm_triton import ORDERS
from zoo.remat import norm_order

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = [(32, 64, 112, 112), (32, 256, 56, 56), (32, 512, 28, 28), (32, 1024, 14, 14), (32, 2048, 7, 7)]


@pytest.fixture(autouse=True)
def _enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_order, "ENABLED", True)
    monkeypatch.setattr(norm_order, "_orders", {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_one_order_has_the_bits_of_cudnn_for_all_maps_of_a_resnet(
    dtype: torch.dtype, layout: torch.memory_format, record_property: Callable[[str, object], None]
) -> None:
    maps = [torch.empty(shape, dtype=dtype, device="cuda").contiguous(memory_format=layout) for shape in SHAPES]
    orders = [norm_order.order_of(x) for x in maps]
    names = [None if order is None else ORDERS[order] for order in orders]
    record_property("orders", names)
    assert None not in names, names


@pytest.mark.parametrize("capture", [False, True])
def test_lean_training_in_one_pass_has_the_bits_of_plain_training(
    capture: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    torch.manual_seed(0)
    plain = torchvision.models.resnet18().cuda()
    lean = zoo.lean(copy.deepcopy(plain), capture=capture)
    x = torch.randn(8, 3, 96, 96, device="cuda")
    for network in (plain, lean):
        network(x).square().mean().backward()
    for ours, theirs in zip(lean.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
