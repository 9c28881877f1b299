"""One optimizer step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from zoo.engine.state import TrainState, update_average
from zoo.engine.validate import AMP_DTYPES


class StepBatch(NamedTuple):
    """The images (N, 3, H, W) and classes (N,) of this process in a step, on its device."""

    images: Tensor
    targets: Tensor
    global_size: int
    """Images of the step over all processes."""


def train_step(state: TrainState, batch: StepBatch) -> None:
    """Take one step down the gradient of the mean loss over the global batch; counts it in ``state``.

    The loss is cross-entropy, smoothed as configured. Nothing here waits for the device.
    """
    config = state.config.optimizer
    state.optimizer.zero_grad(set_to_none=True)
    # DDP averages the gradients of the processes. This weight makes that average the gradient of the mean over
    # all images, whatever the share of each process and of each part.
    weight = state.process.world_size / batch.global_size

    # Gradients: part by part, so that only one part's activations are in memory; ranks talk after the last one.
    images = batch.images.tensor_split(config.accumulate_steps)
    targets = batch.targets.tensor_split(config.accumulate_steps)
    for part in range(config.accumulate_steps):
        is_last = part == config.accumulate_steps - 1
        with _gradient_sync(state.network, is_last):
            with _autocast(state):
                logits = state.network(images[part])
            loss = F.cross_entropy(
                _at_least_float32(logits), targets[part], reduction="sum", label_smoothing=config.label_smoothing
            )
            state.scaler.scale(loss * weight).backward()
        state.meter.update(loss.detach(), logits.detach(), targets[part], state.step + 1)

    # Clipping needs the true size of gradients that fp16 has scaled up.
    if config.clip > 0:
        state.scaler.unscale_(state.optimizer)
        nn.utils.clip_grad_norm_(state.model.parameters(), config.clip)

    # Weights, and their moving average.
    state.scaler.step(state.optimizer)
    state.scaler.update()
    update_average(state)
    state.step += 1
    state.batch += 1


def _gradient_sync(network: nn.Module, active: bool) -> AbstractContextManager[object]:
    if isinstance(network, DistributedDataParallel) and not active:
        return network.no_sync()
    return nullcontext()


def _autocast(state: TrainState) -> AbstractContextManager[object]:
    amp = state.config.training.amp
    if amp == "off":
        return nullcontext()
    return torch.autocast(state.process.device.type, AMP_DTYPES[amp])


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
