"""Test-time augmentation for segmentation: fuses predictions at several scales and of mirror images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.config.limits import MAX_PIXELS
from zoo.errors import ConfigError, DataError, WeightsError, join_names
from zoo.ops.upsampling import upsample_strips
from zoo.tasks.protocols import Fusion

MAX_SCALE = 100.0
STRIP_BYTES = 2**22  # fuse so many bytes of probabilities at a time; they fit into a cache


def check_views(scales: Sequence[float], fusion: str = "mean") -> None:
    """Raise ConfigError for invalid scales or an unknown fusion."""
    if not scales or not all(type(scale) in (int, float) and 0 < scale <= MAX_SCALE for scale in scales):
        raise ConfigError(f"scales = {join_names(scales)}: give one or more numbers above 0 and up to {MAX_SCALE:g}")
    if fusion not in FUSE:
        raise ConfigError(f"fusion = {fusion!r}: give one of {', '.join(FUSE)}")


class Segments(NamedTuple):
    """Predicted classes and probabilities of an image.

    Args:
    - `classes`: class of each pixel, (H, W), int32, on the CPU.
    - `probabilities`: probability of that class, (H, W), float32, on the CPU.
    """

    classes: Tensor
    probabilities: Tensor


@torch.inference_mode()
def segment_image(
    forward: Callable[[Tensor], Tensor],
    image: Tensor,
    scales: Sequence[float] = (1.0,),
    flip: bool = False,
    size: tuple[int, int] | None = None,
    fusion: Fusion = "mean",
) -> Segments:
    """Return the class and its probability for each pixel of an image, from several views of it.

    A view is the image resized to round(side * scale) px, bilinearly with ``align_corners=False``. Its logits are
    upsampled to ``size`` in one bilinear step, converted to probabilities, and fused with the other views. This is done
    in strips of rows, so that probabilities never exist for the whole image: they would take 64 times the memory of the
    logits of a head with output stride 8. (The test script of Inplace-ABN fuses whole maps.)

    Args:
    - `forward`: the network in evaluation mode, (1, 3, h, w) -> logits (1, C, h', w') at any resolution. For
      `zoo.models.DeepLab`, ``forward_logits`` takes the least memory.
    - `image`: (3, h, w), normalized, on the network's device.
    - `scales`: factors of the sides of the views.
    - `flip`: whether each scale is also predicted mirrored.
    - `size`: (H, W) of the result; default: the size of the image.
    - `fusion`: rule that selects the class of a pixel.
      "mean": the class with the largest mean probability.
      "max": the class with the largest probability in any view; ties go to the earlier view, a scale before its mirror
      image.
      "voting": the class that is the most probable one in most views, with the mean probability over these views; ties
      go to the larger sum of their probabilities, then to the smaller class.

    Raises DataError for a scale that makes the image too large, and WeightsError for logits that are not finite.
    """
    size = size or (image.shape[1], image.shape[2])
    maps = list(_maps(forward, image, scales, flip))
    row_bytes = maps[0].shape[1] * size[1] * maps[0].element_size()
    num_rows = max(1, STRIP_BYTES // row_bytes)
    strips = [upsample_strips(logits, size, num_rows) for logits in maps]
    classes = torch.empty(size, dtype=torch.int32)
    probabilities = torch.empty(size)
    for first in range(0, size[0], num_rows):
        best, winners = FUSE[fusion](_probabilities(next(strip)[1][0]) for strip in strips)
        classes[first : first + num_rows] = winners.cpu()
        probabilities[first : first + num_rows] = best.cpu()
    return Segments(classes, probabilities)


def _maps(forward: Callable[[Tensor], Tensor], image: Tensor, scales: Sequence[float], flip: bool) -> Iterator[Tensor]:
    """Yield the logits (1, C, h', w') of each view; mirrored views are mirrored back."""
    for scale in scales:
        scaled = _scaled(image[None], scale)
        for flipped in (False, True)[: 1 + flip]:
            logits = forward(scaled.flip(-1) if flipped else scaled)
            if not bool(logits.isfinite().all()):
                raise WeightsError(
                    "the network's logits are not finite: its weights are damaged, or half precision overflows",
                    remedy="use other weights or single precision",
                )
            yield logits.flip(-1) if flipped else logits


def _scaled(image: Tensor, scale: float) -> Tensor:
    if scale == 1:
        return image
    height, width = (max(1, round(side * scale)) for side in image.shape[-2:])
    if height * width > MAX_PIXELS:
        raise DataError(
            f"an image of {image.shape[-1]} x {image.shape[-2]} px at scale {scale:g} has {width} x {height} px, more "
            f"than {MAX_PIXELS:,}",
            "scales",
            "give a smaller one, or downscale the image first",
        )
    return F.interpolate(image, size=(height, width), mode="bilinear", align_corners=False)


def _probabilities(logits: Tensor) -> Tensor:
    """Return the softmax of logits (C, rows, W), at least in float32."""
    return logits.softmax(0, dtype=torch.promote_types(logits.dtype, torch.float32))


def _mean(views: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Average views (C, rows, W); return the top probability and class of each pixel, (rows, W). Overwrites views."""
    mean = None
    for number, probabilities in enumerate(views, start=1):
        mean = probabilities if mean is None else mean.add_(probabilities.sub_(mean), alpha=1 / number)
    assert mean is not None
    best, winners = mean.max(0)
    return best, winners


def _max(views: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the largest probability in any view and its class, (rows, W), of views (C, rows, W)."""
    best = winners = None
    for probabilities in views:
        largest, classes = probabilities.max(0)
        if best is None or winners is None:
            best, winners = largest, classes
        else:
            better = largest > best
            best, winners = torch.where(better, largest, best), torch.where(better, classes, winners)
    assert best is not None
    assert winners is not None
    return best, winners


def _voting(views: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the class with the most votes, (rows, W), and its mean probability where it won; see `segment_image`."""
    votes = sums = None
    for probabilities in views:
        if votes is None or sums is None:
            votes, sums = torch.zeros_like(probabilities, dtype=torch.int16), torch.zeros_like(probabilities)
        largest, classes = (part[None] for part in probabilities.max(0))
        votes.scatter_add_(0, classes, torch.ones_like(classes, dtype=votes.dtype))
        sums.scatter_add_(0, classes, largest)
    assert votes is not None
    assert sums is not None
    most = votes.amax(0)
    sum_of_winner, winners = sums.masked_fill_(votes < most, -1).max(0)
    return sum_of_winner / most, winners


# A fusion consumes the probabilities (C, rows, W) of the views one by one, may overwrite them, and returns
# probabilities and classes, (rows, W).
FUSE: dict[Fusion, Callable[[Iterable[Tensor]], tuple[Tensor, Tensor]]] = {
    "mean": _mean,
    "voting": _voting,
    "max": _max,
}
