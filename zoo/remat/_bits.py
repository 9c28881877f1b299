"""Masks packed into bits."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from zoo.remat._step_log import note_created


def signs_of(rectified: Tensor) -> Tensor:
    """Return the mask of positive elements of the output of a ReLU, packed into bits."""
    return bits_of(~(rectified <= 0))  # backward treats NaN as positive


def rectified_of(
    bits: Tensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the mask of `signs_of` as a tensor of 0 and 1."""
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(mask_of(bits, shape, dtype))


def bits_of(mask: Tensor) -> Tensor:
    """Return a mask packed into bits: uint8, an eighth as long.

    On the CPU, NumPy packs neighbors into a byte in one pass. Elsewhere, bit k holds the k-th eighth of the mask.
    """
    if mask.device.type == "cpu":
        array = mask.to(torch.bool, copy=True).numpy()  # a copy, since the array takes over the memory
        return note_created(torch.from_numpy(np.packbits(array.reshape(-1))).clone())  # in memory owned by torch
    eighths = torch.zeros(8, -(-mask.numel() // 8), dtype=torch.uint8, device=mask.device)
    eighths.view(-1)[: mask.numel()] = mask.reshape(-1)
    bits = eighths[0].clone()
    for k in range(1, 8):
        bits |= eighths[k] << k
    return note_created(bits)


def mask_of(bits: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the mask unpacked from `bits_of`."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(bits.numpy(), count=prod(shape))).to(dtype, copy=True).view(shape)
    eighths = (bits >> torch.arange(8, dtype=torch.uint8, device=bits.device)[:, None]) & 1
    return eighths.view(-1)[: prod(shape)].to(dtype).view(shape)
