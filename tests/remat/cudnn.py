"""A cuDNN for CPU tensors, whose batch norm rounds in a known order, other than torch's own norm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ops.norm_cases import separate
from zoo.remat.graph import cudnn_norm

aten = torch.ops.aten
ORDER = 4  # of rounding


def _forward(x: Tensor, weight: Tensor, bias: Tensor, mean: Any, var: Any, training: bool, *numbers: float) -> Any:
    """Return what cuDNN returns."""
    assert training or mean is not None
    _, *saved = aten.native_batch_norm(x, weight, bias, mean, var, training, *numbers)
    statistics = saved if training else (mean, (var + numbers[1]).rsqrt())
    return separate(x, weight, bias, *statistics, ORDER), *saved, torch.ones(int(training), dtype=torch.uint8)


def _backward(x: Tensor, grad: Tensor, weight: Tensor, mean: Any, var: Any, *rest: Any) -> Any:
    *statistics, eps, reserve = rest
    assert reserve.tolist() == [1]
    gradients = aten.native_batch_norm_backward(grad, x, weight, None, None, *statistics, True, eps, [True] * 3)
    reserve.zero_()  # cuDNN may overwrite it
    return gradients


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """Let CPU tensors have cuDNN's operators."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("cudnn_batch_norm", _forward, "CPU")
    library.impl("cudnn_batch_norm_backward", _backward, "CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cudnn_norm, "chooses_cudnn", lambda *_: True)
        patch.setattr(cudnn_norm, "cudnn_reserve_bytes", lambda _, training: int(training))
        yield
    library._destroy()


class CudnnNorm(nn.BatchNorm2d):
    """Calls cuDNN as eager training on CUDA does."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        arguments = self.weight, self.bias, self.running_mean, self.running_var
        out: Tensor = aten.cudnn_batch_norm(x, *arguments, self.training, self.momentum, self.eps)[0]
        return out
