"""Counts the bytes of a training step in two independent ways.

`measure_memory` reads the memory allocator during a real step. This includes tensors hidden in compiled graphs, C++
operators and closures, and the scratch memory of convolutions.
`count_memory` adds up the tensors that operations return. On the meta device it computes nothing and takes no memory,
but misses tensors inside compiled graphs and the scratch memory of operators. It counts attention on the meta device as
on this machine's GPU, or as on the CPU without one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from zoo.memory.release import ReleasedGradient, is_released
from zoo.ops.meta_attention import meta_attention
from zoo.remat._step_log import AllocatorLog, Change, StorageLog, log_gradients, totals_of

END_OF_FORWARD = "end of forward"


class Memory(NamedTuple):
    """Bytes of a training step, excluding existing tensors (parameters, buffers, images).

    Args:
    - `held`: bytes alive between the forward and the backward pass.
    - `peak`: peak bytes of both passes, including gradients of parameters.
    - `peak_without_gradients`: peak bytes of both passes, excluding gradients of parameters.
    - `gradients`: bytes of the gradients of parameters.
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
    """Run a training step and return the bytes that it allocates on the device of the parameters.

    Sets gradients of parameters to None. Running statistics and random number generators change as in any step. Raises
    ConfigError on the CPU if a profiler is active.

    Args:
    - `forward`: computes the loss, a scalar, of existing images.
    - `parameters`: parameters of the network, at least one.
    - `warmup`: number of steps before the measured one, to compile and to fill caches.
    - `update`: runs after backward, such as an optimizer step. The peak includes it.
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
    - `forward`: computes the loss, a scalar, of existing images.
    - `parameters`: parameters of the network. Their gradients are set to None.
    - `warmup`: number of steps before the counted one: 1 for lean training with a fraction as its budget.
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
    gc.collect()  # otherwise older garbage may be freed during the step
    with log:
        loss = forward()
        log.mark(END_OF_FORWARD)
        with log_gradients(each for each in parameters if not is_released(each)):
            loss.backward()
        gradients = [each.grad for each in parameters if each.grad is not None]
        storages = [each.untyped_storage() for each in gradients if not isinstance(each, ReleasedGradient)]
        del gradients
        addresses = log.addresses(storages)  # an `AllocatorLog` completes this set when it exits
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
    - `end_of_forward`: number of changes in the forward pass.
    - `gradients`: addresses of the gradients of parameters at the end of the step.
    """
    last_allocation = {change.address: index for index, change in enumerate(changes) if change.size > 0}
    gradient_changes = {last_allocation[address] for address in gradients if address in last_allocation}
    totals = list(totals_of(changes))
    return Memory(
        held=totals[end_of_forward],
        peak=max(totals),
        peak_without_gradients=max(totals_of(changes, gradient_changes)),
        gradients=sum(changes[index].size for index in gradient_changes),
    )
