"""One optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zoo.engine.meters import angle_between, gradients
from zoo.engine.precision import AMP_DTYPES, at_least_float32, autocast
from zoo.engine.state import TrainState, update_average
from zoo.engine.wrapping import unwrap


class StepBatch(NamedTuple):
    """The images (N, 3, H, W) and targets (N, ...) of this process in a step, on its device."""

    images: Tensor
    targets: Tensor
    global_size: int
    """Images of the step over all processes."""


def train_step(state: TrainState, batch: StepBatch) -> None:
    """Take one step down the gradient of the mean loss over the global batch, and count it in ``state``.

    The loss is that of the task. Nothing here waits for the device.
    """
    config, task = state.config.optimizer, state.task
    num_parts = config.accumulate_steps

    # 1. The loss and its gradients, one part of the batch after the other, so that only one part's activations are in
    # memory. DistributedDataParallel averages the gradients of the processes, in the last part only; with this weight
    # its average is the gradient of the mean over all images, whatever the share of each process and of each part.
    weight = state.process.world_size / batch.global_size
    state.optimizer.zero_grad(set_to_none=True)
    for number, (images, targets) in enumerate(_parts(state, batch), start=1):
        with nullcontext() if number == num_parts else _without_averaging(state.wrapped_model):
            logits, loss = _logits_and_loss(state, state.wrapped_model, images, targets)
            state.scaler.scale(loss * weight).backward()
        state.meter.update(loss.detach(), task.counts(logits.detach(), targets), len(targets), state.step + 1)

    # 2. Clipping, which needs the true size of gradients that fp16 has scaled up.
    if config.clip > 0:
        state.scaler.unscale_(state.optimizer)
        nn.utils.clip_grad_norm_(state.model.parameters(), config.clip)

    # 3. The weights, and then their moving average.
    state.scaler.step(state.optimizer)
    state.scaler.update()
    update_average(state)

    # 4. The position in training.
    state.step += 1
    state.batch += 1


def gradient_angle(state: TrainState, batch: StepBatch) -> float:
    """Return the angle in degrees between the gradients of the batch from reconstructed and from stored activations.

    They are those of this process's images, before clipping; NaN if one is not finite. Every rank has to call it, as
    norms may be synchronised. The state stays as it is: the next step is the same to the last bit. It waits for the
    device.
    """
    network = unwrap(state.wrapped_model)  # the gradients are not averaged, and nothing is compiled for them

    def losses() -> Iterator[Tensor]:
        for images, targets in _parts(state, batch):
            _, loss = _logits_and_loss(state, network, images, targets)
            yield state.scaler.scale(loss)

    return angle_between(gradients(network, losses, store=False), gradients(network, losses, store=True))


def _parts(state: TrainState, batch: StepBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the images and targets of each part of a batch."""
    num_parts = state.config.optimizer.accumulate_steps
    return zip(batch.images.tensor_split(num_parts), batch.targets.tensor_split(num_parts), strict=True)


def _logits_and_loss(state: TrainState, network: nn.Module, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the network makes of the images, and the task's loss summed over them."""
    with autocast(state.process.device, AMP_DTYPES[state.config.training.amp]):
        logits = network(images)
    return logits, state.task.loss(at_least_float32(logits), targets)


def _without_averaging(wrapped_model: nn.Module) -> AbstractContextManager[object]:
    """Return the context in which a backward pass adds to the gradients of this process alone."""
    return wrapped_model.no_sync() if isinstance(wrapped_model, DistributedDataParallel) else nullcontext()
