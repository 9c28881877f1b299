"""The versions and the machine that a number was measured with."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch

from zoo.engine.agreement import version_of


def describe_environment(device: torch.device) -> dict[str, str | int | None]:
    """Return versions, names of device and CPU, the thread count and the commit, ready for JSON."""
    return {
        "zoo": version_of("zoo"),
        "commit": checkout_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": version_of("torchvision"),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "platform": platform.platform(),
        "device": device_name(device),
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
    }


def checkout_commit() -> str | None:
    """Return the commit of the checkout that zoo runs from, with ``-dirty`` for changed files, else None."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return finished.stdout.strip() or None


def device_name(device: torch.device) -> str:
    """Return the GPU's product name, or the kind of another device (``cpu``, ``mps``)."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def cpu_model() -> str:
    """Return the CPU's product name, or its architecture where the system does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
