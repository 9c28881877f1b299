"""Validation: scores a network on every image of a data set exactly once, on any number of processes.

Each rank runs the bare network inside DistributedDataParallel on its own images. No rank waits for another before the
all-reduce at the end, and ranks may have different numbers of batches, or none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from zoo.data.dataset import Batch
from zoo.engine._meters import Meter
from zoo.engine._precision import AMP_DTYPES, at_least_float32, autocast
from zoo.engine._task import EvalProtocol, Result, Task
from zoo.engine._wrapping import unwrap

logger = logging.getLogger(__name__)


def validate(
    model: nn.Module,
    task: Task,
    loader: Iterable[Batch],
    device: torch.device,
    world_size: int = 1,
    *,
    protocol: EvalProtocol,
    amp: str = "off",
    advance: Callable[[int], object] | None = None,
    record: Callable[[Batch, Tensor], object] | None = None,
) -> Result:
    """Score ``model`` on the images of all ranks; return the same result on every rank.

    Args:
    - `model`: images (N, 3, h, w) -> logits. It runs in evaluation mode; the modes of its modules are restored.
    - `task`: computes loss and counts of the logits.
    - `loader`: the batches of this rank.
    - `device`: device of the model, to which the images are moved.
    - `world_size`: number of ranks.
    - `protocol`: the views of an image that the loader yields, and how their logits are combined.
    - `amp`: mixed precision: "off", "bf16" or "fp16".
    - `advance`: called with 1 after each batch, to advance a progress bar.
    - `record`: called with each batch of images and its logits on the device.
    """
    net = unwrap(model)
    meter = Meter(device, task.num_counts)

    def forward(images: Tensor, finished: Callable[[Tensor], Tensor]) -> Tensor:
        with autocast(device, AMP_DTYPES[amp]):
            return at_least_float32(net(finished(images.to(device, non_blocking=True))))

    with _set_evaluation_mode(net), torch.inference_mode():
        for index, batch in enumerate(loader):
            targets = batch.targets.to(device, non_blocking=True)
            logits = protocol.logits(partial(forward, finished=batch.finished), batch.images)
            scored = task.scored(logits, targets)
            meter.update(*scored, len(targets), index)
            if record is not None:
                record(batch, logits)
            if advance is not None:
                advance(1)
    reading = meter.read(reduce=world_size > 1)
    if reading.first_bad_step is not None:
        logger.warning(
            "the validation loss is not finite, first in batch %d: the weights are damaged or half precision overflows",
            reading.first_bad_step,
        )
    return task.result(reading, protocol.name)


@contextmanager
def _set_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Sets evaluation mode; restores the mode of each module on exit, because norms may be frozen."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
