"""Selects the back end for each device: compiled kernels where available, plain torch elsewhere.

The back end is selected once, at import. The environment variable ZOO_KERNELS overrides it: ``reference`` disables all
compiled kernels; ``native`` (C++, CPU) and ``triton`` (CUDA) require one back end and raise ConfigError if it is not
available; ``auto``, the default, uses compiled kernels wherever they are available.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from zoo.errors import ConfigError
from zoo.ops.abn import native, reference, triton
from zoo.ops.abn.kernels import Kernels

# Compiled back end -> its device type and kernels.
DEVICES: dict[str, tuple[str, Kernels]] = {"native": ("cpu", native), "triton": ("cuda", triton)}


def _choose(wanted: str) -> dict[str, Kernels]:
    """Return the kernels per device type; types not listed use the reference."""
    if wanted not in ("auto", "reference", *DEVICES):
        raise ConfigError(f"ZOO_KERNELS={wanted!r} is not one of auto, reference, {', '.join(DEVICES)}")
    chosen: dict[str, Kernels] = {}
    for name, (device, kernels) in DEVICES.items():
        reason = kernels.unavailable_reason()
        if wanted == name and reason is not None:
            raise ConfigError(f"ZOO_KERNELS={name} is not available: {reason}")
        if wanted != "reference" and reason is None:
            chosen[device] = kernels
    # On the meta device memory is counted. The operators of the CPU compute nothing there, and have no temporaries; the
    # reference has some.
    return {**chosen, "meta": chosen["cpu"]} if "cpu" in chosen else chosen


_wanted = os.environ.get("ZOO_KERNELS", "auto")
_chosen = _choose(_wanted)


def kernels_for(x: Tensor) -> Kernels:
    """Return the kernels for the device of x."""
    # Reading the name of a device takes as long as launching a small kernel; is_cpu and is_cuda are fast.
    device = "cpu" if x.is_cpu else "cuda" if x.is_cuda else x.device.type
    kernels = _chosen.get(device)
    if kernels is None and device == "cpu" and _wanted == "auto" and not torch.compiler.is_compiling():
        _warn_of_reference()
    return reference if kernels is None else kernels


@cache
def _warn_of_reference() -> None:
    """Warn once that norms on the CPU are slow, unless there is a GPU to train on."""
    if not torch.cuda.is_available():
        reason = native.unavailable_reason()
        warnings.warn(f"zoo uses plain torch operations for norms on the CPU: {reason}", stacklevel=2)


def name_for(device: torch.device) -> str:
    """Return the name of the back end used on ``device``, a value of ZOO_KERNELS."""
    kernels = _chosen.get(device.type, reference)
    return next((name for name, (_, known) in DEVICES.items() if known is kernels), "reference")


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Context that uses the back end ``name``, a value of ZOO_KERNELS."""
    global _chosen, _wanted
    before = _chosen, _wanted
    _chosen, _wanted = _choose(name), name
    try:
        yield
    finally:
        _chosen, _wanted = before


def describe() -> dict[str, str]:
    """Return a line per back end: whether it is active, or why not."""
    lines = {"reference": "active on all other devices: plain torch operations"}
    for name, (device, kernels) in DEVICES.items():
        if device == "cuda" and device in _chosen and not torch.cuda.is_available():
            lines[name] = "ready, but there is no CUDA device"
        else:
            off = kernels.unavailable_reason() or f"ZOO_KERNELS={_wanted}"
            lines[name] = f"active for {device}" if device in _chosen else f"off: {off}"
    return lines
