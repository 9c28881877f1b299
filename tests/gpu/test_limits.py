"""Limits on the peak of a training step on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torchvision

import zoo
from tests.ops.test_meta_attention import FORMS, NUM_TOKENS, WIDTH, Attention
from zoo.remat.lean import lean

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def peak(budget: str | int | None) -> int:
    """Return the most bytes that torch allocates in training steps with Adam, after the first two."""
    torch.manual_seed(0)
    model = lean(torchvision.models.resnet50().cuda(), budget)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    x = torch.randn(32, 3, 160, 160, device="cuda")
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        output = model(x)
        F.cross_entropy(output, torch.zeros(len(x), dtype=torch.long, device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()
        del output
    return torch.cuda.max_memory_allocated()


def test_peak_of_allocator_is_close_below_limit() -> None:
    most = peak(None)
    limit = round(0.85 * most)
    assert 0.9 * limit < peak(limit) <= limit


def test_report_counts_the_same_on_meta_device() -> None:
    x = torch.randn(32, 3, 160, 160)
    counted = zoo.memory_report(torchvision.models.resnet50().to("meta"), x.to("meta"), budget="100GB").peak
    measured = zoo.memory_report(torchvision.models.resnet50().cuda(), x.cuda(), budget="100GB").peak
    assert measured == pytest.approx(counted, rel=0.15)  # scratch memory, and earlier allocations of the process


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_attention_on_meta_device_is_counted_with_kernels_of_gpu(form: str, dtype: torch.dtype) -> None:
    model, x = Attention(FORMS[form], dtype).cuda(), torch.randn(2, NUM_TOKENS, WIDTH, dtype=dtype, device="cuda")
    measured = zoo.memory_report(model, x)
    counted = zoo.memory_report(model.to("meta"), x.to("meta"))
    assert (counted.plain, counted.lean) == (measured.plain, measured.lean)
    assert str(counted).endswith("attention is counted as on CUDA")
