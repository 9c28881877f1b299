"""Triton without a device: programs in its interpreter, and kernels compiled for sm_90 but never launched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode

from zoo.ops import backend
from zoo.ops.abn import triton

# Operations of torch that only allocate memory or create views, and so launch nothing.
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "view", "_unsafe_view", "select"}
FREE |= {"slice", "split", "unbind", "as_strided", "permute", "transpose", "t", "expand", "reshape"}


ROOT = Path(__file__).parents[2]


def interpret(module: str) -> dict[str, Any]:
    """Run the program ``module`` with Triton's interpreter; return the JSON that it prints."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module]
    child = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert child.returncode == 0, child.stderr[-3000:]
    report: dict[str, Any] = json.loads(child.stdout)
    return report


class Device:
    """Replaces Triton's driver; ``started`` are the names of the launched kernels."""

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
        """Return the launcher of a kernel."""
        started, name = self.started, metadata.name
        return lambda *_: started.append(name)


class _Compiler:
    """Replaces a kernel: compiles the code that would be launched, and records it."""

    def __init__(self, kernel: Any, record: list[str]) -> None:
        self.kernel, self.record = kernel, record

    def __getitem__(self, grid: tuple[int]) -> Any:
        def compile_only(*arguments: Any, **constants: Any) -> None:
            code = self.kernel.warmup(*arguments, grid=grid, **constants).asm
            assert len(code["cubin"]) > 0
            self.record.append(code["ptx"])

        return compile_only


@contextmanager
def compiled_code(module: ModuleType, *kernels: str, capability: int) -> Iterator[list[str]]:
    """Compiles launches of a module's kernels within the block instead of starting them; yields their PTX."""
    from triton.runtime.driver import driver

    code: list[str] = []
    compilers = {name: _Compiler(getattr(module, name), code) for name in kernels}
    with patch.object(driver, "_active", Device(capability)), patch.multiple(module, **compilers):
        yield code


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
        patch.dict(backend._chosen, {"cpu": "triton"}),
    ):
        for kernel in jitted:  # kernels for another device stay out
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
