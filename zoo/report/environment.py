"""The versions and the machine that a number was measured with."""

from __future__ import annotations

import functools
import logging
import platform
import subprocess
from pathlib import Path

import torch

from zoo.engine.program import version_of

logger = logging.getLogger(__name__)

RESULTS = "docs/results"
DIRTY = "-dirty"


def describe_environment(device: torch.device) -> dict[str, str | int | None]:
    """Return versions, the names of device and CPU, the number of threads and the commit, ready for JSON."""
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


@functools.cache
def checkout_commit() -> str | None:
    """Return the commit of the checkout that zoo runs from, with ``-dirty`` if it has changed files.

    None if zoo does not run from a checkout. Git is asked once per process, as a process runs the code that it began
    with. Changed files in docs/results do not count: benchmarks write them, one after another, but do not run them.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)

    try:
        head = git("rev-parse", "--verify", "HEAD")
        changes = git("diff", "--quiet", "HEAD", "--", ".", f":(exclude){RESULTS}")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + DIRTY * bool(changes.returncode) if head.returncode == 0 else None


def warn_of_changes() -> None:
    """Log a warning if the checkout has changed files, because results could then not be measured again."""
    commit = checkout_commit()
    if commit is not None and commit.endswith(DIRTY):
        logger.warning("the checkout has changes, so that results will name the commit %s, which nobody can check out: "
                       "commit first if they are to be kept", commit)  # fmt: skip


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
