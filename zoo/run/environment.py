"""The versions and the machine that a number was measured with."""

from __future__ import annotations

import functools
import logging
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch
from PIL import features

from zoo.ops.abn import backend

logger = logging.getLogger(__name__)

RESULTS = "docs/results"
DIRTY = "-dirty"


def describe_environment(device: torch.device) -> dict[str, str | int | None]:
    """Return all that a result on ``device`` depends on beside its command, and the date, ready for JSON.

    Files that were written before a key was added lack it: read it with ``.get``. None where something is not there, or
    does not count on this device.
    """
    on_gpu = device.type == "cuda"
    return {
        "zoo": version_of("zoo"),
        "commit": checkout_commit(),
        "date": utc_now(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": version_of("torchvision"),
        "timm": version_of("timm"),
        "pillow": version_of("Pillow"),
        "libjpeg": libjpeg_version(),
        "cuda": torch.version.cuda if on_gpu else None,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "tf32": tf32_settings() if on_gpu else None,
        "norms": backend.name_for(device),
        "platform": platform.platform(),
        "device": device_name(device),
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
    }


def version_of(distribution: str) -> str | None:
    """Return the installed version of a distribution, None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def utc_now() -> str:
    """Return date and time in UTC, to the second, as ISO 8601 has them."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


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


def libjpeg_version() -> str | None:
    """Return name and version of the library that decodes JPEG; another one gives other pixels."""
    name = "libjpeg-turbo" if features.check_feature("libjpeg_turbo") else "libjpeg"
    version = features.version_feature("libjpeg_turbo") or features.version_codec("jpg")
    return None if version is None else f"{name} {version}"


def tf32_settings() -> str:
    """Return for what a GPU may round float32 to TF32, which keeps 10 of 23 bits."""
    convolutions = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    uses = {"matrix products": torch.backends.cuda.matmul, "convolutions": convolutions}
    return ", ".join(f"{what} {'on' if used.fp32_precision == 'tf32' else 'off'}" for what, used in uses.items())


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
