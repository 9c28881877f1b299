"""Limits on the peak of a training step on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import Tensor, nn

import zoo
from tests.ops.test_meta_attention import FORMS, NUM_TOKENS, WIDTH, Attention
from zoo.remat._lean import lean

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def resnet() -> tuple[nn.Module, Tensor]:
    return torchvision.models.resnet50(), torch.randn(32, 3, 160, 160)


def encoder() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(16, 256, 512)


def volumes() -> tuple[nn.Module, Tensor]:
    """Return convolutions that need scratch memory."""
    blocks = [nn.Sequential(nn.Conv3d(i, 32, 3, padding=1), nn.BatchNorm3d(32), nn.ReLU()) for i in (1, *[32] * 7)]
    return nn.Sequential(*blocks), torch.randn(2, 1, 64, 64, 64)


def peaks(build: Callable[[], tuple[nn.Module, Tensor]], budget: str | int | None) -> list[int]:
    """Return the most bytes that torch allocates in each training step with Adam from the third on."""
    torch.manual_seed(0)
    model, x = build()
    model, x = lean(model.cuda(), budget), x.cuda()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    found = []
    for _ in range(6):
        torch.cuda.reset_peak_memory_stats()
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(torch.cuda.max_memory_allocated())
    return found[2:]


@pytest.mark.parametrize("share", [0.95, 0.85])
@pytest.mark.parametrize("build", [resnet, encoder, volumes])
def test_peaks_of_allocator_are_close_below_limit(build: Callable[[], tuple[nn.Module, Tensor]], share: float) -> None:
    limit = round(share * peaks(build, None)[-1])
    found = peaks(build, limit)
    assert max(found) <= limit
    assert found[-1] > 0.8 * limit


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
