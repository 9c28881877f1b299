"""One optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zoo.engine.precision import AMP_DTYPES, at_least_float32, autocast
from zoo.engine.reconstruction import angle_between, gradients
from zoo.engine.state import TrainState, update_average
from zoo.engine.wrapping import unwrap
from zoo.errors import ConfigError, join_names


class StepBatch(NamedTuple):
    """Images (N, 3, H, W) and targets (N, ...) that a replica has in a step, on its device."""

    images: Tensor
    targets: Tensor
    global_size: int
    """Number of images of the step over all replicas."""


def train_step(state: TrainState, *batches: StepBatch) -> None:
    """Take one optimizer step on the mean of the task's loss over the global batch; update ``state`` in place.

    ``batches`` are this process's: one, or with replicas one for each that it runs. Nothing here waits for the device,
    unless there are replicas.
    """
    config = state.config.optimizer

    # 1. Gradients of the mean loss. Processes that are one replica each average their gradients in backward. Several
    # replicas run one after the other, and the gradients of all of them are added exactly.
    state.optimizer.zero_grad(set_to_none=True)
    if state.replicas is None:
        (batch,) = batches
        _backward(state, batch, state.process.world_size / batch.global_size)
    else:
        scale = state.scaler.scale(torch.ones((), device=state.process.device))
        for replica, batch in reversed([*zip(state.replicas.own, batches, strict=True)]):
            with state.replicas.running(replica, state.step, batch.images.shape):
                _backward(state, batch, 1 / batch.global_size)
            state.replicas.add_gradients(scale)
        state.replicas.set_gradients(scale)

    # 2. Gradient clipping, on unscaled gradients.
    if config.clip > 0:
        state.scaler.unscale_(state.optimizer)
        nn.utils.clip_grad_norm_(state.model.parameters(), config.clip)

    # 3. Update of the weights and of their moving average.
    state.scaler.step(state.optimizer)
    state.scaler.update()
    update_average(state)

    # 4. Position in training.
    state.step += 1
    state.batch += 1


def _backward(state: TrainState, batch: StepBatch, loss_scale: float) -> None:
    """Run forward and backward on a batch, which adds its gradients to ``.grad``, and update the meter.

    With gradient accumulation the micro-batches run one after the other, so that only one of them has activations in
    memory. DistributedDataParallel averages the gradients over the ranks, in the last micro-batch only. Scaled by the
    world size, sums over the images become the mean over the global batch, even if ranks or micro-batches have
    different sizes.
    """
    for number, (images, targets) in enumerate(_micro_batches(state, batch), start=1):
        is_last = number == state.config.optimizer.accumulate_steps
        with _averaging(state) if is_last else _without_gradient_sync(state.wrapped_model):
            logits, loss = _forward(state, state.wrapped_model, images, targets)
            state.scaler.scale(loss * loss_scale).backward()
        counts = state.task.counts(logits.detach(), targets)
        state.meter.update(loss.detach(), counts, len(targets), state.step + 1)


def gradient_angle(state: TrainState, batch: StepBatch) -> float:
    """Return the angle in degrees between the gradients from reconstructed and from stored activations.

    The gradients come from this batch alone, before clipping; NaN if one is not finite. Every rank has to call it, as
    norms may be synchronized. ``state`` is unchanged: the next step has the same bits. It waits for the device.
    """
    network = unwrap(state.wrapped_model)  # no averaging over the ranks, and no compilation for these gradients alone

    def losses() -> Iterator[Tensor]:
        for images, targets in _micro_batches(state, batch):
            _, loss = _forward(state, network, images, targets)
            yield state.scaler.scale(loss)

    return angle_between(gradients(network, losses, store=False), gradients(network, losses, store=True))


def _micro_batches(state: TrainState, batch: StepBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the images and targets of each micro-batch."""
    count = state.config.optimizer.accumulate_steps
    return zip(batch.images.tensor_split(count), batch.targets.tensor_split(count), strict=True)


def _forward(state: TrainState, network: nn.Module, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of the images, and the task's loss summed over them."""
    with autocast(state.process.device, AMP_DTYPES[state.config.training.amp]):
        logits = network(images)
    return logits, state.task.loss(at_least_float32(logits), targets)


@contextmanager
def _averaging(state: TrainState) -> Iterator[None]:
    """Context of a backward pass in which DistributedDataParallel, if there are several processes, averages gradients.

    It waits for the gradients of all parameters. Raises ConfigError if a parameter got none on this rank: the averages
    would never be complete.
    """
    if not isinstance(state.wrapped_model, DistributedDataParallel):
        yield
        return
    trained = {name: parameter for name, parameter in state.model.named_parameters() if parameter.requires_grad}
    former = [parameter.grad for parameter in trained.values()]  # of earlier micro-batches
    yield
    # An averaged gradient is another tensor, a view of a bucket.
    unused = [name for (name, parameter), old in zip(trained.items(), former, strict=True) if parameter.grad is old]
    if unused:
        raise ConfigError(
            f"{len(unused)} of {len(trained)} parameters got no gradient on rank {state.process.rank} in step "
            f"{state.step + 1} ({join_names(unused)}), but several processes average the gradients of all parameters",
            state.config.network.arch,
            "freeze them with requires_grad_(False), use them in each forward pass, or set optimizer.replicas",
        )


def _without_gradient_sync(wrapped_model: nn.Module) -> AbstractContextManager[object]:
    """Return a context in which backward accumulates gradients on this rank without an all-reduce."""
    return wrapped_model.no_sync() if isinstance(wrapped_model, DistributedDataParallel) else nullcontext()
