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

from zoo.data.folder import Batch
from zoo.engine.meters import Meter, Reading
from zoo.engine.precision import AMP_DTYPES, at_least_float32, autocast
from zoo.engine.task import EvalProtocol, Result, Task
from zoo.engine.wrapping import unwrap
from zoo.errors import VerificationError, ZooError

logger = logging.getLogger(__name__)


def validate(
    model: nn.Module,
    task: Task,
    loader: Iterable[Batch],
    device: torch.device,
    world_size: int = 1,
    *,
    num_images: int,
    protocol: EvalProtocol,
    amp: str = "off",
    advance: Callable[[int], object] | None = None,
    record: Callable[[Batch, Tensor], object] | None = None,
) -> Result:
    """Return the scores of ``model`` over the images of all ranks, the same on every rank.

    Args:
    - `model`: images (N, 3, h, w) -> logits. It runs in evaluation mode; the modes of its modules are restored.
    - `task`: computes loss and counts of the logits.
    - `loader`: the batches of this rank.
    - `device`: device of the model, to which the images are moved.
    - `world_size`: number of ranks.
    - `num_images`: number of images of all ranks; VerificationError if another number was seen.
    - `protocol`: the views of an image that the loader yields, and how their logits are combined.
    - `amp`: mixed precision: "off", "bf16" or "fp16".
    - `advance`: called with 1 after each batch, to advance a progress bar.
    - `record`: called with each batch of images and its logits on the device.
    """
    net = unwrap(model)
    forward = _ShrinkingForward(net, device, amp)
    meter = Meter(device, task.num_counts)
    with _evaluating(net), torch.inference_mode():
        for index, batch in enumerate(loader):
            targets = batch.targets.to(device, non_blocking=True)
            try:
                logits = protocol.logits(partial(forward, finished=batch.finished), batch.images)
                scored = task.scored(logits, targets)
            except RuntimeError as error:
                if not is_memory_full(error):
                    raise
                raise _out_of_memory(len(targets), batch.images, device) from error
            meter.update(*scored, len(targets), index)
            if record is not None:
                record(batch, logits)
            if advance is not None:
                advance(1)
    return task.result(_checked(meter.read(reduce=world_size > 1), num_images), protocol.name)


def is_memory_full(error: RuntimeError) -> bool:
    """Return whether ``error`` is torch's report of an out-of-memory condition."""
    # The CPU's allocator has no error class of its own.
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _out_of_memory(num_images: int, images: Tensor, device: torch.device) -> ZooError:
    what = "one image" if num_images == 1 else f"{num_images} images"
    return ZooError(
        f"out of memory with {what} of {tuple(images.shape[1:])} at a time; validation on {device}: use smaller "
        "images, or free memory on the device"
    )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Context in evaluation mode. It restores the mode of each module, as norms may be frozen."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _checked(reading: Reading, num_images: int) -> Reading:
    """Return ``reading``; VerificationError unless it covers every image once."""
    if reading.count != num_images:
        raise VerificationError(
            f"{reading.count} images scored, but the data set has {num_images}; validation over all ranks: this is a "
            "bug of zoo, please report it"
        )
    if reading.first_bad_step is not None:
        logger.warning(
            "the validation loss is not finite, first in batch %d: the weights are damaged or half precision overflows",
            reading.first_bad_step,
        )
    return reading


class _ShrinkingForward:
    """Calls a network on as many images at a time as fit into memory; halves the number when memory runs out."""

    def __init__(self, model: nn.Module, device: torch.device, amp: str) -> None:
        self._model = model
        self._device = device
        self._dtype = AMP_DTYPES[amp]
        self._num_images: int | None = None  # at a time

    def __call__(self, images: Tensor, finished: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the logits of images (N, 3, h, w), at least float32; ``finished`` normalizes them on the device."""
        while True:
            num_images = min(self._num_images or len(images), len(images))
            try:
                return torch.cat([self._logits(finished, part) for part in images.split(num_images)])
            except RuntimeError as error:
                if not is_memory_full(error):
                    raise
                if num_images == 1:
                    raise _out_of_memory(num_images, images, self._device) from error
            self._num_images = num_images // 2
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            logger.warning("out of memory with %d images at once: trying %d", num_images, self._num_images)

    def _logits(self, finished: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        inputs = finished(images.to(self._device, non_blocking=True))
        with autocast(self._device, self._dtype):
            return at_least_float32(self._model(inputs))
