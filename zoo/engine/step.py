"""One optimizer step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zoo.engine.precision import AMP_DTYPES, at_least_float32, autocast
from zoo.engine.state import TrainState, update_average


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
    parts = zip(batch.images.tensor_split(num_parts), batch.targets.tensor_split(num_parts), strict=True)
    for number, (images, targets) in enumerate(parts, start=1):
        with nullcontext() if number == num_parts else _without_averaging(state.wrapped_model):
            with autocast(state.process.device, AMP_DTYPES[state.config.training.amp]):
                logits = state.wrapped_model(images)
            loss = task.loss(at_least_float32(logits), targets)
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


def _without_averaging(wrapped_model: nn.Module) -> AbstractContextManager[object]:
    """Return the context in which a backward pass adds to the gradients of this process alone."""
    return wrapped_model.no_sync() if isinstance(wrapped_model, DistributedDataParallel) else nullcontext()
