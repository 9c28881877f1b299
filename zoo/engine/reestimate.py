"""Estimates the running statistics of a network again, for weights whose activations have changed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from zoo.data.folder import Batch
from zoo.layers.norm import ABN
from zoo.torch_internals import BatchNormBase


@torch.no_grad()
def reestimate_statistics(model: nn.Module, batches: Iterable[Batch], num_batches: int) -> int:
    """Set the running statistics of all norms to the plain average of the batch statistics; return how many batches.

    Only the norms are put into training mode: dropout does not drop anything. ``model`` is in evaluation mode
    afterwards; its norms have their own momentum again.

    Args:
    - `model`: the network, on the device to compute on. Frozen norms keep their statistics.
    - `batches`: batches of images (N, 3, h, w); batches of a single image are left out.
    - `num_batches`: largest number of batches to use.

    Returns 0, with the statistics of a new network, if no batch has two images.
    """
    device = next(model.parameters()).device
    norms = [part for part in model.eval().modules() if isinstance(part, (ABN, BatchNormBase))]
    norms = [norm for norm in norms if not getattr(norm, "frozen", False)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the average over all batches so far
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
