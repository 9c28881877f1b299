"""The multiplications and additions of training steps, counted on the meta device.

Tested by tests/reproduce/test_revnet.py.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.flop_counter import flop_registry

from zoo.reproduce.paper_networks import forward_of
from zoo.torch_internals.dispatch import TorchDispatchMode

COUNTED_BATCH, CIFAR_SIZE = 2, 32  # images of the counted steps, and the side of images of CIFAR


class OperationLog(TorchDispatchMode):
    """Adds up the multiplications and additions of matrix products and convolutions.

    torch's FlopCounterMode cannot count a backward pass that calls `torch.autograd.grad`, as a reversible chain does.
    """

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
