"""Scores a network on every image of a data set exactly once, on any number of processes.

Each process scores its own images with the network inside DistributedDataParallel. No rank therefore waits for another
before the one all-reduce at the very end, and ranks may have different numbers of batches, or none.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.data.folder import Batch
from zoo.data.loader import NUM_CROPS
from zoo.engine.meters import Meter, Reading
from zoo.engine.precision import AMP_DTYPES, at_least_float32, autocast
from zoo.engine.protocols import PROTOCOLS, Protocol
from zoo.engine.wrapping import unwrap
from zoo.errors import VerificationError, ZooError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """The scores of a validation.

    Args:
    - `top1`: images whose class is the network's best, percent.
    - `top5`: images whose class is among the network's best five, percent.
    - `loss`: mean cross-entropy, nats per image.
    - `count`: number of images that were scored.
    - `skipped`: number of images that could not be read and are in no average.
    - `protocol`: name of the way in which the images were scaled and cropped.
    """

    top1: float
    top5: float
    loss: float
    count: int
    skipped: int
    protocol: str

    def to_json(self, weights_md5: str | None, environment: dict[str, Any]) -> dict[str, Any]:
        """Return the contents of a result file; a loss that is not finite becomes null (JSON has no NaN)."""
        loss = self.loss if math.isfinite(self.loss) else None
        return {**asdict(self), "loss": loss, "weights_md5": weights_md5, "environment": environment}


def validate(
    model: nn.Module,
    loader: Iterable[Batch],
    device: torch.device,
    world_size: int = 1,
    *,
    num_images: int,
    protocol: Protocol = PROTOCOLS["center224"],
    amp: str = "off",
    advance: Callable[[int], object] | None = None,
    record: Callable[[Batch, Tensor], object] | None = None,
) -> Result:
    """Return the scores of ``model`` over the images of all ranks' loaders; every rank gets the same.

    Args:
    - `model`: images (N, 3, h, w) -> logits (N, classes). The training and evaluation modes of its modules are
      restored.
    - `loader`: the batches of this rank.
    - `device`: where the model is and the images are moved to.
    - `world_size`: number of ranks.
    - `num_images`: how many images the loaders of all ranks hold together; VerificationError if another number was
      seen.
    - `protocol`: whether batches are (N, 3, h, w), or ten crops (N, 10, 3, h, w), whose logits are averaged before loss
      and accuracy, as published.
    - `amp`: the format to compute in: "off", "bf16" or "fp16".
    - `advance`: called with 1 after each batch.
    - `record`: called with each batch of images and its logits (N, classes) on the device.
    """
    net = unwrap(model)
    forward = _ShrinkingForward(net, device, amp)
    score = partial(_ten_crop_mean, forward) if protocol.ten_crops else forward
    meter = Meter(device)
    with _evaluating(net), torch.inference_mode():
        for index, batch in enumerate(loader):
            meter.skip(len(batch.skipped))
            if len(batch.targets):
                targets = batch.targets.to(device, non_blocking=True)
                logits = score(batch.images)
                meter.update(F.cross_entropy(logits, targets, reduction="sum"), logits, targets, index)
                if record is not None:
                    record(batch, logits)
            if advance is not None:
                advance(1)
    return _checked_result(meter.read(reduce=world_size > 1), num_images, protocol)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode, and each back into its own mode afterwards, as norms may be frozen."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _ten_crop_mean(forward: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Return the mean over the crops of the logits, (N, classes), for images (N, 10, 3, h, w)."""
    return forward(images.flatten(0, 1)).unflatten(0, (-1, NUM_CROPS)).mean(dim=1)


def _checked_result(reading: Reading, num_images: int, protocol: Protocol) -> Result:
    seen = reading["count"] + reading["skipped"]
    if seen != num_images:
        raise VerificationError(
            f"{reading['count']} images scored and {reading['skipped']} left out, but the data set has "
            f"{num_images}; validation over all processes: this is a fault of zoo, please report it"
        )
    if reading["count"] == 0:
        raise VerificationError(
            f"none of {num_images} images could be scored; validation data: mend the files left out"
        )
    if reading["first_bad_step"] is not None:
        logger.warning(
            "the validation loss is not finite, first in batch %d: the weights are damaged, "
            "or half precision overflows",
            reading["first_bad_step"],
        )
    top1, top5, loss = reading["top1"], reading["top5"], reading["loss"]
    return Result(top1, top5, loss, reading["count"], reading["skipped"], protocol.name)


class _ShrinkingForward:
    """Calls a network on as many images at a time as fit into memory; the number is halved when the memory is full."""

    def __init__(self, model: nn.Module, device: torch.device, amp: str) -> None:
        self._model = model
        self._device = device
        self._dtype = AMP_DTYPES[amp]
        self._num_images: int | None = None  # at a time

    def __call__(self, images: Tensor) -> Tensor:
        """Return the logits of images (N, 3, h, w), at least float32, (N, classes)."""
        while True:
            num_images = min(self._num_images or len(images), len(images))
            try:
                return torch.cat([self._logits(part) for part in images.split(num_images)])
            except RuntimeError as error:
                # The CPU's allocator has no error class of its own.
                if not (isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)):
                    raise
                if num_images == 1:
                    raise ZooError(
                        f"out of memory with one image of {tuple(images.shape[1:])} at a time; "
                        f"validation on {self._device}: use a smaller crop, or free memory on the device"
                    ) from error
            self._num_images = num_images // 2
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            logger.warning("out of memory with %d images at once: trying %d", num_images, self._num_images)

    def _logits(self, images: Tensor) -> Tensor:
        with autocast(self._device, self._dtype):
            return at_least_float32(self._model(images.to(self._device, non_blocking=True)))
