"""The digest of a training state, and a comparison of two states by tensor name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def state_tensors(content: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights, buffers, moving average and optimizer state of a checkpoint's content by name, sorted.

    ``content`` is read from a file, or returned by `zoo.engine._state.shared_state`; missing keys are skipped.
    Numbers of the optimizer, such as its step count, are tensors without dimensions.
    """
    optimizer = (content.get("optimizer") or {}).get("state", {})
    optimizer_state = {f"{index}.{key}": value for index, state in optimizer.items() for key, value in state.items()}
    parts = {"": content["state_dict"], "ema.": content.get("ema") or {}, "optimizer.": optimizer_state}
    found = {f"{prefix}{key}": value for prefix, part in parts.items() for key, value in part.items()}
    return {key: torch.as_tensor(found[key]) for key in sorted(found) if isinstance(found[key], (Tensor, int, float))}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the names, dtypes, shapes and values of ``tensors``, in their order."""
    sha256 = hashlib.sha256()
    for name, tensor in tensors.items():
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        values: Any = _bytes(tensor).numpy()
        sha256.update(values)
    return sha256.hexdigest()


def differences(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the name and a description of each tensor whose bits differ, or that one of the two lacks."""
    for name in sorted({*first, *second}):
        a, b = first.get(name), second.get(name)
        if a is None or b is None:
            yield name, f"only in the {'second' if a is None else 'first'}"
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            yield name, " and ".join(f"{tensor.dtype} of shape {tuple(tensor.shape)}" for tensor in (a, b))
        elif not torch.equal(_bytes(a), _bytes(b)):
            difference = (a.double() - b.double()).abs()
            count = int((a != b).sum())
            yield name, f"{count:,} of {a.numel():,} values, by up to {float(difference.max()):.3g}"


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor on the CPU, in the order of its elements."""
    return tensor.detach().cpu().flatten().view(torch.uint8)
