"""Dropout masks are drawn once and saved exactly as bits, in a thirty-second of their memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.remat.programs import assert_same, bytes_held
from zoo.remat._bits import bits_of, mask_of

X, Y = torch.randn(2, 2, 4, 5, 7, generator=torch.Generator().manual_seed(0))
DROPOUTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "dropout": F.dropout, "dropout_": lambda x, p: F.dropout(x * 1, p, inplace=True), "alpha": F.alpha_dropout,
    "dropout2d": F.dropout2d, "native": lambda x, p: torch.native_dropout(x, p, True)[0],
    "of a view": lambda x, p: F.dropout(x.transpose(1, 2), p),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (3, 5, 7), (0, 3)])
def test_bits_restore_mask(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    mask = (torch.rand(shape) < 0.3).to(dtype)
    bits = bits_of(mask)
    assert bits.nbytes == -(-mask.numel() // 8)
    again = mask_of(bits, mask.shape, dtype)
    assert again.dtype == dtype
    assert torch.equal(again, mask)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("p", [0.1, 1.0])
@pytest.mark.parametrize("name", DROPOUTS)
def test_gradients_and_random_numbers_are_the_same(name: str, p: float, layout: torch.memory_format) -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        dropped = DROPOUTS[name]((x * y).sigmoid(), p)
        return dropped * torch.rand(())  # depends on how many numbers were drawn before

    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert_same(program, *(each.to(dtype=dtype, memory_format=layout) for each in (X, Y)))


def test_mask_takes_one_bit_per_element() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    assert bytes_held(lambda: F.dropout(x, 0.5)) == x.numel() / 8
    assert bytes_held(lambda: torch.native_dropout(x, 0.5, True)[0]) == x.numel() / 8
