"""The multiplications and additions of training steps and of whole trainings, counted on the meta device.

Tested by tests/reproduce/test_revnet.py.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from zoo.models.build import build_model
from zoo.reproduce.paper_networks import forward_of
from zoo.reproduce.training_runs import load_changed
from zoo.torch_internals import TorchDispatchMode

COUNTED_BATCH, CIFAR_SIZE = 2, 32  # images of the counted steps, and the side of those of CIFAR
# Training images by the number of classes: CIFAR-10, CIFAR-100, ImageNet, Cityscapes, Mapillary Vistas, COCO-Stuff.
TRAINING_IMAGES = {10: 50_000, 100: 50_000, 1000: 1_281_167, 19: 2_975, 65: 18_000, 91: 40_000}


class OperationLog(TorchDispatchMode):
    """Adds up the multiplications and additions of matrix products and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.total += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result


def count_operations(model: nn.Module) -> tuple[int, int]:
    """Return the operations of forward and backward of a network on the meta device, for images of CIFAR."""
    forward = forward_of(model, COUNTED_BATCH, CIFAR_SIZE)
    with OperationLog() as in_forward:
        loss = forward()
    with OperationLog() as in_backward:
        loss.backward()
    return in_forward.total, in_backward.total


@cache
def operations_of(experiment: str, memory: str = "auto") -> float:
    """Return the operations of the whole training of an experiment, see `load_changed`.

    ``memory`` "plain" stores all activations, so that backward reruns nothing.
    """
    config = load_changed(experiment)
    network = config.network.model_copy(update={"memory": memory})
    with torch.device("meta"):
        model: Any = build_model(network)
    size = config.input.crop_train
    with OperationLog() as operations:
        model(torch.empty(COUNTED_BATCH, 3, size, size, device="meta")).sum().backward()
    images = TRAINING_IMAGES[config.network.num_classes] * config.optimizer.schedule.epochs
    return float(operations.total / COUNTED_BATCH * images)
