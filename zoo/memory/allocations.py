"""Bytes that a training step takes, counted in two independent ways.

`measure_memory` reads what the memory allocator reports during a real step. That includes tensors hidden in a compiled
graph, a C++ operator or the closure of a recomputation, and the scratch memory of convolutions.
`count_memory` adds up the tensors that the step's operations return. On the meta device nothing is computed and no
memory is taken, but tensors inside compiled graphs and the scratch memory of operators are not seen. Attention is
counted there as this machine's GPU computes it, or without a GPU as the CPU does.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from zoo.memory.release import ReleasedGradient, is_released
from zoo.ops.meta_attention import meta_attention
from zoo.remat.step_log import AllocatorLog, Change, StorageLog, totals_of, watched

END_OF_FORWARD = "end of forward"


class Memory(NamedTuple):
    """Bytes of a training step, excluding what existed before it (parameters, buffers, images).

    Args:
    - `held`: bytes alive between the forward and the backward pass.
    - `peak`: the most bytes alive at one time in either pass, including gradients of the parameters.
    - `peak_without_gradients`: the most bytes alive at one time, excluding these gradients.
    - `gradients`: bytes of the parameters' gradients alone.
    """

    held: int
    peak: int
    peak_without_gradients: int
    gradients: int


def measure_memory(
    forward: Callable[[], Tensor],
    parameters: Iterable[Tensor],
    *,
    warmup: int = 1,
    update: Callable[[], object] = lambda: None,
) -> Memory:
    """Run a training step and return the bytes that it takes from the allocator of the parameters' device.

    The parameters' gradients are None afterwards. Other state that a training step changes (running statistics, the
    random number generator) changes here too. Raises ConfigError on the CPU if a profiler is active.

    Args:
    - `forward`: computes the loss, a scalar, of images that exist already.
    - `parameters`: parameters of the network, at least one.
    - `warmup`: number of steps that run before the measured one, to compile and to fill caches.
    - `update`: runs after backward, such as the step of an optimizer, which is then part of the peak.
    """
    parameters = list(parameters)
    for _ in range(warmup):
        forward().backward()
        update()
    return _memory_of_step(AllocatorLog(parameters[0].device), forward, parameters, update)


def count_memory(
    forward: Callable[[], Tensor],
    parameters: Iterable[Tensor],
    *,
    warmup: int = 0,
    update: Callable[[], object] = lambda: None,
) -> Memory:
    """Run a training step and return the bytes of the storages that its operations create.

    With parameters and images on the meta device this takes neither memory nor time.

    Args:
    - `forward`: computes the loss, a scalar, of images that exist already.
    - `parameters`: parameters of the network; their gradients are None afterwards.
    - `warmup`: number of steps that run before the counted one: 1 for lean training within a fraction.
    - `update`: as for `measure_memory`.
    """
    parameters = list(parameters)

    def forward_with_attention() -> Tensor:
        with meta_attention():
            return forward()

    for _ in range(warmup):
        forward_with_attention().backward()
        update()
    return _memory_of_step(StorageLog(), forward_with_attention, parameters, update)


def _memory_of_step(
    log: AllocatorLog | StorageLog,
    forward: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    update: Callable[[], object],
) -> Memory:
    clear_gradients(parameters)
    gc.collect()  # nothing older may be freed during the step
    with log:
        loss = forward()
        log.mark(END_OF_FORWARD)
        with watched(each for each in parameters if not is_released(each)):
            loss.backward()
        kept = [each.grad for each in parameters if each.grad is not None]
        storages = [each.untyped_storage() for each in kept if not isinstance(each, ReleasedGradient)]
        del kept
        addresses = log.addresses(storages)  # a set that the end of an `AllocatorLog` completes
        del storages
        update()
    memory = summarize(log.changes, log.marks[0][1], addresses)
    clear_gradients(parameters)
    return memory


def clear_gradients(parameters: Iterable[Tensor]) -> None:
    """Set the gradients of the parameters to None."""
    for parameter in parameters:
        parameter.grad = None


def summarize(changes: Sequence[Change], end_of_forward: int, gradients: set[int]) -> Memory:
    """Return the bytes of a step.

    Args:
    - `changes`: all changes of the step, in order.
    - `end_of_forward`: how many of them belong to the forward pass.
    - `gradients`: addresses of the parameters' gradients at the end of the step.
    """
    last_allocation = {change.address: index for index, change in enumerate(changes) if change.size > 0}
    of_gradients = {last_allocation[address] for address in gradients if address in last_allocation}
    totals = list(totals_of(changes))
    return Memory(
        held=totals[end_of_forward],
        peak=max(totals),
        peak_without_gradients=max(totals_of(changes, of_gradients)),
        gradients=sum(changes[index].size for index in of_gradients),
    )
