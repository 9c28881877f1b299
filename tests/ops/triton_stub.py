"""Triton without a device: programs in its interpreter, and starts that do nothing of kernels compiled for sm_90.

As a program: prints how long the host is busy with the forward and backward pass of a norm and leaky ReLU through
Triton, with starts that do nothing, over the same of torch's batch norm on a small tensor of the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.layers import InPlaceABN
from zoo.ops.abn import backend, triton

# Operations of torch that only allocate memory, or look at it in another way, and so launch nothing.
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "view", "_unsafe_view", "select"}
FREE |= {"slice", "split", "unbind", "as_strided", "permute", "transpose", "t", "expand", "reshape"}


ROOT = Path(__file__).parents[2]


def interpret(module: str) -> dict[str, Any]:
    """Return what the program ``module`` prints, JSON, when Triton's interpreter runs the kernels."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module]
    child = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, child.stderr[-3000:]
    report: dict[str, Any] = json.loads(child.stdout)
    return report


class Device:
    """Answers what Triton asks its driver; ``started`` are the names of the kernels that were started."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.started: list[str] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 2**17},
            load_binary=lambda name, *_: (name, name, 64, 0, 1024),
            unload_module=lambda module: None,
        )

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Return what starts a kernel."""
        started, name = self.started, metadata.name
        return lambda *_: started.append(name)


@contextmanager
def stubbed(capability: int = 90) -> Iterator[Device]:
    """Within the block, norms of tensors on the CPU go through Triton, whose kernels are not started."""
    from triton.runtime.driver import driver

    from zoo.ops.abn import triton_kernels

    device = Device(capability)
    jitted = [k for k in vars(triton_kernels).values() if hasattr(k, "device_caches")]
    with (
        patch.object(driver, "_active", device),
        patch.object(triton, "_compiled", {}),
        patch.dict(backend._chosen, {"cpu": triton}),
    ):
        for kernel in jitted:  # what is compiled for another device stays out
            kernel.device_caches.clear()
        yield device
        for kernel in jitted:
            kernel.device_caches.clear()


class Operations(TorchDispatchMode):
    """Counts the operations of torch that launch something on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace != "zoo_triton" and name not in FREE:
            self.launched[name] += 1
        return func(*args, **(kwargs or {}))


def step(layer: nn.Module, x: Tensor, dz: Tensor) -> None:
    """Run forward and backward of a layer that may overwrite its input; the gradients are thrown away."""
    torch.autograd.grad(layer(x), [x, *layer.parameters()], dz)


def measure_host_time(rounds: int = 7, repetitions: int = 200) -> tuple[float, float]:
    """Return the microseconds of the host per step of the norm in place and of torch's: the least of several rounds."""
    x, dz = torch.randn(2, 64, 4, 4, requires_grad=True), torch.randn(2, 64, 4, 4)
    ours = InPlaceABN(64)
    ours.inplace = False
    theirs = nn.Sequential(nn.BatchNorm2d(64), nn.LeakyReLU(0.01, inplace=True))
    best = [float("inf")] * 2
    with stubbed():
        for _ in range(rounds):
            for place, layer in enumerate((ours, theirs)):
                step(layer, x, dz)
                start = time.thread_time()
                for _ in range(repetitions):
                    step(layer, x, dz)
                best[place] = min(best[place], (time.thread_time() - start) / repetitions * 1e6)
    return best[0], best[1]


if __name__ == "__main__":
    ours, theirs = measure_host_time()
    print(f"InPlaceABN through Triton, starts left out: {ours:.0f} us of the host per forward and backward pass")
    print(f"torch's batch norm and leaky ReLU: {theirs:.0f} us; ratio {ours / theirs:.2f}")
