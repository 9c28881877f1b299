"""Where the time of a training step goes: its share per kind of operation, as torch's profiler sees it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from zoo.remat.memory_use import clear_gradients

STEPS = 2
REST = "rest"
# A kind, and the names of its operations and of their nodes in autograd. The outermost one of them that runs decides:
# a copy that a convolution makes belongs to the convolution.
KINDS = {
    "convolution": re.compile(r"conv(olution|[123]d|_depthwise)", re.IGNORECASE),
    "norm and activation": re.compile(r"batch_?norm|abn|elu|silu|swish|sigmoid|tanh|mish", re.IGNORECASE),
    "pooling": re.compile(r"pool", re.IGNORECASE),
    "concatenation": re.compile(r"aten::cat\b|CatBackward|SplitWithSizesBackward|SplitBackward"),
    "sums": re.compile(r"aten::(add|sub)_?$"),
}
ENGINE = "autograd::engine"  # what a node of autograd is called with; that also adds up gradients of several readers


def measure_shares(
    forward: Callable[[], Tensor], parameters: Iterable[Tensor], device: torch.device
) -> dict[str, float]:
    """Run training steps under torch's profiler and return the share of their time that each kind of operation takes.

    The shares of the `KINDS` and of the `REST` sum up to 1. The rest is everything else, such as the linear layer, the
    loss and, on a CPU, what Python does between operations. The profiler makes small operations dearer than they are.
    On a GPU the times are those of its kernels. The parameters' gradients are None afterwards.

    Args:
    - `forward`: computes the loss, a scalar, of images that exist already; it has run before.
    - `parameters`: parameters of the network.
    - `device`: where it runs.
    """
    parameters, on_gpu = list(parameters), device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(STEPS):
            with record_function("zoo: step"):
                forward().backward()
            clear_gradients(parameters)
    times = dict.fromkeys((*KINDS, REST), 0.0)
    kinds: dict[int, str | None] = {}
    for event in profiler.events():
        if event.device_type == DeviceType.CPU:  # the others are the kernels, whose times these events have, too
            own_time = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            times[_kind(event, kinds) or REST] += own_time
    total = sum(times.values())
    return {kind: time / total for kind, time in times.items()}


def _kind(event: Any, kinds: dict[int, str | None]) -> str | None:
    """Return the kind of an event, that of the outermost event around it that has one; ``kinds`` are known already."""
    chain = []
    while event is not None and event.id not in kinds:
        chain.append(event)
        event = event.cpu_parent
    kind = None if event is None else kinds[event.id]
    for inner in reversed(chain):
        kind = kind or kind_of(inner.name)
        kinds[inner.id] = kind
    return kind


def kind_of(name: str) -> str | None:
    """Return the kind of an operation, or of a node of autograd, by its name; None for all others."""
    if name.startswith(ENGINE):
        return None
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name)), None)
