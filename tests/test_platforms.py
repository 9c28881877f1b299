"""Lean training, layers and networks need nothing that only POSIX systems have."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import os, signal, sys, warnings
warnings.filterwarnings("default", "zoo uses plain torch operations for norms on the CPU")
# These have separate code for each platform.
import filelock, pydantic, torch, torch._dynamo, torch.profiler, torchvision, tqdm
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
for module, names in (
    (os, "fork geteuid getuid killpg mkfifo pread register_at_fork sched_getaffinity statvfs sysconf O_NONBLOCK"),
    (signal, "SIGALRM SIGHUP SIGKILL SIGPIPE SIGUSR1"),
):
    for name in names.split():
        delattr(module, name)
sys.platform = "win32"

import zoo
from zoo.cli import main

images = torch.randn(2, 3, 32, 32)
model = zoo.lean(zoo.get("resnet18", norm="standard", num_classes=3))
model(images).square().mean().backward()
zoo.get("revnet38_cifar", norm="inplace", num_classes=3)(images).square().mean().backward()
zoo.convert.convert_norm(zoo.get("resnet18", norm="inplace", num_classes=3), "standard")
layers, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.randn(2, 4)
assert zoo.check(layers, x).same
assert "held for backward" in str(zoo.memory_report(layers, x))
assert main(["list", "resnet1*"]) == 0
assert main(["show", "resnet18"]) == 0
"""


@pytest.mark.slow  # starts a process that imports torch
def test_lean_training_and_networks_run_without_posix() -> None:
    result = subprocess.run([sys.executable, "-W", "error", "-c", CODE], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
