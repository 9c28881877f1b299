"""Selects the back end for each device: compiled kernels where available, plain torch elsewhere.

The back end is selected once, at import. The environment variable ZOO_KERNELS overrides it: ``reference`` disables all
compiled kernels; ``native`` (C++, CPU) and ``triton`` (CUDA) require one back end and raise ConfigError if it is not
available; ``auto``, the default, uses compiled kernels wherever they are available.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from zoo.errors import ConfigError
from zoo.ops import native


@cache
def _triton_unavailable_reason() -> str | None:
    """Return why the kernels in Triton are unavailable, or None if they are available."""
    if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
        return None  # unused without CUDA; importing Triton takes longer than importing all of zoo
    try:
        import triton  # type: ignore  # noqa: F401
    except ImportError as error:
        return f"triton is not installed: {error}"
    return None


# Compiled back end -> its device type, and a function that returns why it is unavailable, or None.
DEVICES: dict[str, tuple[str, Callable[[], str | None]]] = {
    "native": ("cpu", native.unavailable_reason),
    "triton": ("cuda", _triton_unavailable_reason),
}


def unavailable_reason(name: str) -> str | None:
    """Return why a compiled back end is unavailable, or None if it is available."""
    return DEVICES[name][1]()


def _choose(wanted: str) -> dict[str, str]:
    """Return the back end per device type; types not listed use the reference."""
    if wanted not in ("auto", "reference", *DEVICES):
        raise ConfigError(f"ZOO_KERNELS={wanted!r} is not one of auto, reference, {', '.join(DEVICES)}")
    chosen: dict[str, str] = {}
    for name, (device, _) in DEVICES.items():
        reason = unavailable_reason(name)
        if wanted == name and reason is not None:
            raise ConfigError(f"ZOO_KERNELS={name} is not available: {reason}")
        if wanted != "reference" and reason is None:
            chosen[device] = name
    # The meta device is for counting memory. The CPU's operators need no temporary memory there; the reference does.
    return {**chosen, "meta": chosen["cpu"]} if "cpu" in chosen else chosen


_wanted = os.environ.get("ZOO_KERNELS", "auto")
_chosen = _choose(_wanted)


def back_end_for(x: Tensor) -> str:
    """Return the name of the back end for the device of x. Warns once if norms on the CPU are slow."""
    # is_cpu and is_cuda are fast. Reading the name of a device takes as long as launching a small kernel.
    device = "cpu" if x.is_cpu else "cuda" if x.is_cuda else x.device.type
    name = _chosen.get(device, "reference")
    if name == "reference" and device == "cpu" and _wanted == "auto" and not torch.compiler.is_compiling():
        _warn_of_reference()
    return name


@cache
def _warn_of_reference() -> None:
    """Warn once that norms on the CPU are slow, unless there is a GPU to train on."""
    if not torch.cuda.is_available():
        reason = unavailable_reason("native")
        warnings.warn(f"zoo uses plain torch operations for norms on the CPU: {reason}", stacklevel=2)


def name_for(device: torch.device) -> str:
    """Return the name of the back end used on ``device``, a value of ZOO_KERNELS."""
    return _chosen.get(device.type, "reference")


@contextmanager
def force_back_end(name: str) -> Iterator[None]:
    """Uses the back end ``name``, a value of ZOO_KERNELS, within the block."""
    global _chosen, _wanted
    before = _chosen, _wanted
    _chosen, _wanted = _choose(name), name
    try:
        yield
    finally:
        _chosen, _wanted = before


def describe() -> dict[str, str]:
    """Return one line per back end: that it is active, or why it is not."""
    lines = {"reference": "active on all other devices: plain torch operations"}
    for name, (device, _) in DEVICES.items():
        if device == "cuda" and device in _chosen and not torch.cuda.is_available():
            lines[name] = "ready, but there is no CUDA device"
        else:
            off = unavailable_reason(name) or f"ZOO_KERNELS={_wanted}"
            lines[name] = f"active for {device}" if device in _chosen else f"off: {off}"
    return lines
