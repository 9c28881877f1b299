"""Dtypes by name, and autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AMP_DTYPES = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # ``training.amp`` -> dtype


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Autocasts matrix products and convolutions on ``device`` to ``dtype``; does nothing for float32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def at_least_float32(x: Tensor) -> Tensor:
    """Return ``x`` in float32, or in its own dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
