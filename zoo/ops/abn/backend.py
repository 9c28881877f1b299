"""The back end that computes the kernels: compiled ones where the device has them, plain torch elsewhere.

Chosen once, at import.  The environment variable ZOO_KERNELS forces the choice: ``reference`` turns compiled kernels
off everywhere; ``native`` (C++, CPU) and ``triton`` (CUDA) demand one, and raise ConfigError where it is not to be had;
``auto``, the default, takes what there is.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor

from zoo.errors import ConfigError
from zoo.ops.abn import meta, native, reference, triton

DEVICES = {"native": ("cpu", native), "triton": ("cuda", triton)}


def _choose(wanted: str) -> dict[str, ModuleType]:
    """Return the kernels per type of device; a device that is not in it has the reference."""
    if wanted not in ("auto", "reference", *DEVICES):
        raise ConfigError(f"ZOO_KERNELS={wanted!r} is not one of auto, reference, {', '.join(DEVICES)}")
    chosen: dict[str, ModuleType] = {}
    for name, (device, module) in DEVICES.items():
        reason = module.why_not()
        if wanted == name and reason is not None:
            raise ConfigError(f"ZOO_KERNELS={name} cannot be had: {reason}")
        if wanted != "reference" and reason is None:
            chosen[device] = module
    # Counting without computing is for what would be computed.
    return {**chosen, "meta": meta} if chosen else {}


_wanted = os.environ.get("ZOO_KERNELS", "auto")
_chosen = _choose(_wanted)
if _wanted == "auto" and "cpu" not in _chosen:
    warnings.warn(f"zoo computes norms on the CPU with plain torch operations: {native.why_not()}", stacklevel=2)


def kernels_for(x: Tensor) -> ModuleType:
    """Return the module whose five functions compute the norm of x: reference, native or triton."""
    return _chosen.get(x.device.type, reference)


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Use one back end within the block: ``reference``, or ``native`` or ``triton`` on the device that it is for."""
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
    for name, (device, module) in DEVICES.items():
        if device == "cuda" and device in _chosen and not torch.cuda.is_available():
            lines[name] = "ready, but there is no CUDA device"
        else:
            off = module.why_not() or f"ZOO_KERNELS={_wanted}"
            lines[name] = f"active for {device}" if device in _chosen else f"off: {off}"
    return lines
