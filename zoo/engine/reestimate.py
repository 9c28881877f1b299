"""Reestimation of running statistics, for weights whose activations have changed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from zoo.data.folder import Batch
from zoo.layers.norm import ABN
from zoo.torch_internals import BatchNormBase


@torch.no_grad()
def reestimate_statistics(model: nn.Module, batches: Iterable[Batch], num_batches: int) -> int:
    """Set the running statistics of all norms to the mean of the batch statistics; return the number of batches used.

    Only norms are in training mode, so that dropout is off. ``model`` is in evaluation mode afterwards. Returns 0, with
    freshly initialized statistics, if no batch has two images.

    Args:
    - `model`: the network, on the device to compute on. Frozen norms keep their statistics.
    - `batches`: batches of images (N, 3, h, w); batches of a single image are skipped.
    - `num_batches`: maximum number of batches to use.
    """
    device = next(model.parameters()).device
    norms = [part for part in model.eval().modules() if isinstance(part, (ABN, BatchNormBase))]
    norms = [norm for norm in norms if not getattr(norm, "frozen", False)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a cumulative average
        norm.train()
    num_done = 0
    for batch in batches:
        if len(batch.images) > 1:
            model(batch.on(device))
            num_done += 1
        if num_done == num_batches:
            break
    model.eval()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return num_done
