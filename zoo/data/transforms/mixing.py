"""Mixup and CutMix of a batch, the same with any number of processes and gradient accumulation steps.

All replicas draw the same mix, from (seed, epoch, batch). Images i and i + B / 2 of the global batch are mixed with
each other, where B is ``optimizer.batch_size``. Replica r of R, by default a process, holds the images r, r + R, r + 2R
and so on. If B is a multiple of 2R, both images of a pair are therefore on the same replica, for every R. Images
without a partner, which occur only in the last batch of an epoch, are mixed with themselves.

timm mixes image i with image N - 1 - i of the N images of a process, torchvision with image i - 1.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.config.regularization import Regularization
from zoo.data.transforms.pixels import Box


class Mix(NamedTuple):
    """Parameters of the mix of a batch.

    Args:
    - `weight`: weight of an image and of its label; the partner has the rest.
    - `box`: for CutMix, the part that comes from the partner; None for mixup.
    """

    weight: float
    box: Box | None = None


def draw_mix(settings: Regularization, height: int, width: int, generator: Random) -> Mix | None:
    """Draw the mix of a batch of images of ``height`` x ``width`` px; None if it is not mixed.

    The distribution is as in timm's Mixup: one weight per batch, and for CutMix a box of the same aspect ratio as the
    image around a uniformly drawn center, cut off at the edges, whose area then determines the weight.
    """
    if not settings.mixes or generator.random() >= settings.mix_probability:
        return None
    cuts = settings.mixup == 0 or (settings.cutmix > 0 and generator.random() < 0.5)
    alpha = settings.cutmix if cuts else settings.mixup
    weight = generator.betavariate(alpha, alpha)
    if not cuts:
        return Mix(weight)
    edges = []
    for side in (height, width):
        length, center = int(side * (1 - weight) ** 0.5), generator.randrange(side)
        edges.append((max(0, center - length // 2), min(side, center + (length + 1) // 2)))
    (top, bottom), (left, right) = edges
    box = Box(top, left, bottom - top, right - left)
    return Mix(1 - box.height * box.width / (height * width), box)


def partners(num_images: int, half: int) -> Tensor:
    """Return the index of the partner of each image of a replica, (num_images,) int64.

    ``half`` is half the number of images of this replica in a full batch.
    """
    positions = torch.arange(num_images)
    found = (positions + half) % (2 * half)
    return torch.where((positions < 2 * half) & (found < num_images), found, positions)


def mix_images(images: Tensor, mix: Mix, partners: Tensor) -> Tensor:
    """Return the mixed ``images`` (N, C, H, W), in a new tensor."""
    if mix.box is None:
        return images[partners].mul_(1 - mix.weight).add_(images.mul(mix.weight))
    top, left, height, width = mix.box
    part = slice(None), slice(None), slice(top, top + height), slice(left, left + width)
    mixed = images.clone()
    mixed[part] = images[part][partners]
    return mixed


def mix_targets(targets: Tensor, num_classes: int, mix: Mix, partners: Tensor) -> Tensor:
    """Return the share of each class in the mixed images, (N, num_classes) float32; ``targets`` are (N,) int64."""
    shares = F.one_hot(targets, num_classes).float()
    return shares[partners].mul_(1 - mix.weight).add_(shares.mul(mix.weight))
