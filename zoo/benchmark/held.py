"""Bytes of a training step, as the memory allocator reports them: held between forward and backward, and at the peak.

The allocator counts everything: tensors that a compiled graph, a C++ operator or a recomputation's closure hides, and
the scratch memory of convolutions.  `zoo.count_memory` counts from outside, and needs no memory to do so.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

END_OF_FORWARD = "zoo: end of forward"


class Memory(NamedTuple):
    """Bytes above the state before the step: what existed then (parameters, buffers, the images) is not in them.

    ``held`` is alive between forward and backward; ``peak`` is the high-water mark of forward and backward, with the
    gradients of the parameters; ``peak_without_gradients`` is that of everything else; ``gradients`` are their bytes.
    """

    held: int
    peak: int
    peak_without_gradients: int
    gradients: int


class Change(NamedTuple):
    """A block of ``size`` bytes is allocated at ``address``; a size that is not positive frees the block there."""

    address: int
    size: int


def measure_memory(forward: Callable[[], Tensor], parameters: Iterable[Tensor], *, warmup: int = 1) -> Memory:
    """Run a training step and return the bytes that it takes from the allocator of the parameters' device.

    ``forward`` returns the loss of images that exist already.  ``warmup`` steps run before, which compile and fill
    caches.  The parameters' gradients are None before and after; whatever else a step changes, running statistics and
    random numbers, it changes here too.
    """
    parameters = list(parameters)
    for _ in range(warmup):
        forward().backward()
    clear_gradients(parameters)
    gc.collect()  # nothing older may be freed during the step
    with _profile() as profiler:
        loss = forward()
        with record_function(END_OF_FORWARD):
            pass
        loss.backward()
    addresses = gradient_storages(parameters, lambda storage: storage.data_ptr())
    changes, end_of_forward = _changes(profiler, parameters[0].device)
    assert end_of_forward > 0, "the profiler has lost the end of the forward pass"
    clear_gradients(parameters)
    return summarise(changes, end_of_forward, addresses)


def measure_peak(call: Callable[[], object], device: torch.device) -> int:
    """Run ``call`` and return the most bytes it takes from the allocator of ``device`` at once, result included."""
    with _profile() as profiler:
        result = call()
    changes, _ = _changes(profiler, device)
    del result
    return summarise(changes, 0, set()).peak


def summarise(changes: Sequence[Change], end_of_forward: int, gradients: set[int]) -> Memory:
    """Return the bytes of a step: its changes in order, the number of them in forward, the gradients' addresses."""
    last = {change.address: index for index, change in enumerate(changes) if change.size > 0}
    kept = {last[address] for address in gradients if address in last}
    held, peak = _totals(changes, end_of_forward, set())
    _, without = _totals(changes, end_of_forward, kept)
    return Memory(held, peak, without, sum(changes[index].size for index in kept))


def clear_gradients(parameters: Iterable[Tensor]) -> None:
    """Set the gradients to None."""
    for parameter in parameters:
        parameter.grad = None


def gradient_storages(parameters: Iterable[Tensor], key: Callable[[torch.UntypedStorage], int]) -> set[int]:
    """Return the ``key`` of the storage of each gradient that there is."""
    return {key(parameter.grad.untyped_storage()) for parameter in parameters if parameter.grad is not None}


def _totals(changes: Sequence[Change], end_of_forward: int, left_out: set[int]) -> tuple[int, int]:
    """Return the bytes alive at the end of forward, and at the peak.

    ``left_out`` are indices of allocations.  What is freed without having been allocated here was there before.
    """
    live: dict[int, int] = {}
    total = held = peak = 0
    for index, (address, size) in enumerate(changes):
        if index == end_of_forward:
            held = total
        if size > 0 and index not in left_out:
            live[address] = size
            total += size
        elif size <= 0:
            total -= live.pop(address, 0)
        peak = max(peak, total)
    return (held if end_of_forward < len(changes) else total), peak


def _profile() -> profile:
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)


def _changes(profiler: profile, device: torch.device) -> tuple[list[Change], int]:
    """Return the allocator's reports about a device in order, and how many of them were in forward."""
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = list(_walk(profiler.profiler.kineto_results.experimental_event_tree()))
    end_ns = next((event.start_time_ns for event in events if event.name == END_OF_FORWARD), 0)
    reports = sorted(
        (event for event in events if event.tag == _EventType.Allocation),
        key=lambda event: event.start_time_ns,
    )
    reports = [report for report in reports if report.extra_fields.device.type == device.type]
    changes = [Change(report.extra_fields.ptr, report.extra_fields.alloc_size) for report in reports]
    return changes, sum(report.start_time_ns < end_ns for report in reports)


def _walk(events: Iterable[Any]) -> Iterator[Any]:
    pending = list(events)
    while pending:
        event = pending.pop()
        yield event
        pending += event.children
