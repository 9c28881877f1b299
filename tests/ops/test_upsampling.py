"""Upsampling equals torch's up to rounding, and strips of rows are bit-identical to the whole map."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.formula import relative_error
from zoo.ops.upsampling import upsample, upsample_strips

SIZES = [
    ((5, 7), (40, 56)),
    ((9, 13), (65, 97)),
    ((1, 1), (8, 3)),
    ((6, 4), (5, 3)),
    ((3, 4), (3, 4)),
    ((1, 5), (7, 1)),
]


@pytest.mark.parametrize(("low", "high"), SIZES)
def test_logits_equal_torchs_bilinear_interpolation_at_any_size(low, high) -> None:
    x = torch.randn(2, 3, *low, dtype=torch.float64)
    expected = F.interpolate(x, size=high, mode="bilinear", align_corners=False)
    assert relative_error(upsample(x, high), expected) < 1e-14
    recorded = upsample(x.requires_grad_(), high)
    assert torch.equal(recorded, expected)
    recorded.sum().backward()
    assert x.grad.sum().item() == pytest.approx(recorded.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("low", "high"), SIZES)
def test_strips_of_any_height_are_rows_of_the_whole_bit_for_bit(low, high, dtype) -> None:
    x = torch.randn(2, 3, *low).to(dtype)
    whole = upsample(x, high)
    for num_rows in (1, 3, high[0], high[0] + 5):
        firsts, strips = zip(*upsample_strips(x, high, num_rows), strict=True)
        assert list(firsts) == list(range(0, high[0], num_rows))
        assert torch.equal(torch.cat(strips, dim=2), whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_half_precision_are_upsampled_in_single(dtype) -> None:
    """Rounded to half precision, neighboring classes would often be equal, and the first of them win."""
    x = torch.randn(1, 19, 8, 8).to(dtype)
    whole = upsample(x, (64, 64))
    assert torch.equal(whole, upsample(x.float(), (64, 64)))
    recorded = upsample(x.requires_grad_(), (64, 64))
    assert recorded.dtype == torch.float32
    assert relative_error(recorded.detach(), whole) < 1e-6
