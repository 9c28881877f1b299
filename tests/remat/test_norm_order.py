"""Recomputing cuDNN's batch norm in one pass, on the CPU, with a cuDNN in its place that rounds in a known order."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.ops.norm_cases import separate
from tests.remat.cudnn import ORDER, CudnnNorm, on_the_cpu
from tests.remat.programs import COMPILES, Block, are_equal
from tests.step import step
from zoo.remat import norm_order, rules
from zoo.remat.eager import recording
from zoo.remat.graph import joint_graph

pytestmark = [*COMPILES, pytest.mark.filterwarnings("ignore")]  # torch's own, while it compiles


def _normalize(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, order: int,
    shortcut: Tensor | None = None, is_rectified: bool = False,
) -> Tensor:  # fmt: skip
    """Do what the Triton kernel does."""
    calls[shortcut is not None, is_rectified] += 1
    y = separate(x, weight, bias, mean, invstd, order)
    y = y if shortcut is None else y + shortcut
    return y.relu() if is_rectified else y


calls: Counter[tuple[bool, bool]] = Counter()


@pytest.fixture(autouse=True)
def _cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let CPU tensors have a cuDNN, and let the orders be tried on them."""
    for module in (norm_order, rules, joint_graph):
        monkeypatch.setattr(module, "normalize", _normalize)
    monkeypatch.setattr(recording, "FUSED_NORMS", (_normalize,))
    monkeypatch.setattr(norm_order, "_orders", {})
    monkeypatch.setattr(norm_order, "ENABLED", True)
    calls.clear()
    with on_the_cpu():
        yield


def _net(norm: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), *(Block(8, norm) for _ in range(3)), nn.Conv2d(8, 8, 3))


def _step(net: nn.Module) -> list[Tensor]:
    return step(net, torch.randn(4, 8, 32, 32, generator=torch.Generator().manual_seed(1)))


def test_the_order_is_found_once_per_kind_of_input() -> None:
    x = torch.randn(2, 8, 16, 16)
    assert norm_order.order_of(x) == ORDER
    tried = sum(calls.values())
    assert norm_order.order_of(torch.randn(2, 8, 16, 16)) == ORDER
    assert sum(calls.values()) == tried


def test_without_a_known_order_cudnn_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_order, "normalize", lambda x, *_: x)
    assert norm_order.order_of(torch.randn(2, 8, 16, 16)) is None
    plain = _net(CudnnNorm)
    assert are_equal(_step(zoo.lean(copy.deepcopy(plain))), _step(plain))
    assert not calls


@pytest.mark.parametrize("capture", [False, True])
def test_a_norm_with_the_sum_and_the_relu_after_it_is_one_pass_with_the_same_bits(capture: bool) -> None:
    expected = _step(_net(CudnnNorm))
    assert norm_order.order_of(torch.empty(4, 8, 32, 32)) == ORDER
    calls.clear()
    found = _step(zoo.lean(_net(nn.BatchNorm2d if capture else CudnnNorm), capture=capture))
    assert are_equal(found, expected)
    assert calls[False, True] >= 3  # the first norm of each block
    assert calls[True, True] >= 2  # the second one, with the shortcut; of the last block nothing need be recomputed
    assert calls[False, False] == calls[True, False] == 0
