"""Chooses the back end for each device: compiled kernels where the device has them, plain torch elsewhere.

The choice is made once, at import. The environment variable ZOO_KERNELS forces it: ``reference`` turns compiled kernels
off everywhere; ``native`` (C++, CPU) and ``triton`` (CUDA) ask for one back end and raise ConfigError if it cannot be
used; ``auto``, the default, uses compiled kernels wherever it can.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from zoo.errors import ConfigError
from zoo.ops.abn import meta, native, reference, triton
from zoo.ops.abn.kernels import Kernels

# Per back end of compiled kernels, the type of the devices that it is for.
DEVICES: dict[str, tuple[str, Kernels]] = {"native": ("cpu", native), "triton": ("cuda", triton)}


def _choose(wanted: str) -> dict[str, Kernels]:
    """Return the kernels per type of device; all other devices use the reference."""
    if wanted not in ("auto", "reference", *DEVICES):
        raise ConfigError(f"ZOO_KERNELS={wanted!r} is not one of auto, reference, {', '.join(DEVICES)}")
    chosen: dict[str, Kernels] = {}
    for name, (device, kernels) in DEVICES.items():
        reason = kernels.unavailable_reason()
        if wanted == name and reason is not None:
            raise ConfigError(f"ZOO_KERNELS={name} cannot be had: {reason}")
        if wanted != "reference" and reason is None:
            chosen[device] = kernels
    # Meta tensors get byte-counting kernels only where a compiled back end exists; the temporaries of the reference are
    # counted as they are.
    return {**chosen, "meta": meta} if chosen else {}


_wanted = os.environ.get("ZOO_KERNELS", "auto")
_chosen = _choose(_wanted)
if _wanted == "auto" and "cpu" not in _chosen:
    warnings.warn(
        f"zoo computes norms on the CPU with plain torch operations: {native.unavailable_reason()}", stacklevel=2
    )


def kernels_for(x: Tensor) -> Kernels:
    """Return the kernels that compute the norm of x."""
    # Torch writes the name of a device in as long as a small kernel takes, and says at once whether it is one of these.
    device = "cpu" if x.is_cpu else "cuda" if x.is_cuda else x.device.type
    return _chosen.get(device, reference)


def name_for(device: torch.device) -> str:
    """Return the name of the back end that computes norms on ``device``: a value of ZOO_KERNELS."""
    kernels = _chosen.get(device.type, reference)
    return next((name for name, (_, known) in DEVICES.items() if known is kernels), "reference")


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Within the block, use the back end ``name``, one of the values of ZOO_KERNELS."""
    global _chosen, _wanted
    before = _chosen, _wanted
    _chosen, _wanted = _choose(name), name
    try:
        yield
    finally:
        _chosen, _wanted = before


def describe() -> dict[str, str]:
    """Return, per back end, whether it is active and, where it is not, why."""
    lines = {"reference": "active where nothing else is: plain torch operations"}
    for name, (device, kernels) in DEVICES.items():
        if device == "cuda" and device in _chosen and not torch.cuda.is_available():
            lines[name] = "ready, but there is no CUDA device"
        else:
            off = kernels.unavailable_reason() or f"ZOO_KERNELS={_wanted}"
            lines[name] = f"active for {device}" if device in _chosen else f"off: {off}"
    return lines
