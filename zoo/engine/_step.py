"""One optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from zoo.engine._precision import AMP_DTYPES, at_least_float32, autocast
from zoo.engine._state import TrainState, update_average


class StepBatch(NamedTuple):
    """Images (N, 3, H, W) and targets (N, ...) of one replica in a step, on its device."""

    images: Tensor
    targets: Tensor
    global_size: int
    """Number of images of the step over all replicas."""


def train_step(state: TrainState, *batches: StepBatch) -> None:
    """Take one optimizer step on the mean of the task's loss over the global batch; update ``state`` in place.

    ``batches`` has one batch for each replica of this process. Does not synchronize with the device, except to sum the
    gradients of ``optimizer.replicas``.
    """
    config = state.config.optimizer

    # 1. Gradients of the mean loss, over all replicas.
    state.optimizer.zero_grad(set_to_none=True)
    shapes = [batch.images.shape for batch in batches]
    state.replicas.run(
        lambda index, network: _backward(state, network, batches[index]), state.step, shapes, state.scaler
    )
    state.replicas.set_gradients(state.scaler)

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


def _backward(state: TrainState, network: nn.Module, batch: StepBatch) -> None:
    """Run forward and backward of a network on a batch: add the gradients to ``.grad``, and update the meter.

    With gradient accumulation the micro-batches run one after the other, so that only one of them has activations in
    memory. Losses are sums over the images divided by the size of the global batch, so that their gradients add up to
    the gradients of the mean, even if ranks or micro-batches have different sizes.
    """
    factor = state.replicas.loss_factor / batch.global_size
    for number, (images, targets) in enumerate(micro_batches(state, batch), start=1):
        is_last = number == state.config.optimizer.accumulate_steps
        with state.replicas.reduce_gradients(network, state.step, is_last):
            logits, loss = compute_loss(state, network, images, targets)
            state.scaler.scale(loss * factor).backward()
        counts = state.task.counts(logits.detach(), targets)
        state.meter.update(loss.detach(), counts, len(targets), state.step + 1)


def micro_batches(state: TrainState, batch: StepBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the images and targets of each micro-batch."""
    count = state.config.optimizer.accumulate_steps
    return zip(batch.images.tensor_split(count), batch.targets.tensor_split(count), strict=True)


def compute_loss(state: TrainState, network: nn.Module, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of the images, and the task's loss summed over them."""
    with autocast(state.process.device, AMP_DTYPES[state.config.training.amp]):
        logits = network(images)
    return logits, state.task.loss(at_least_float32(logits), targets)
