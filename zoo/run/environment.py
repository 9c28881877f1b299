"""Versions and machine of a measurement."""

from __future__ import annotations

import functools
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch
from PIL import features

from zoo.files import DISTRIBUTION
from zoo.ops import backend

ROOT = Path(__file__).resolve().parents[2]
RESULTS_DIR = "docs/results"


def describe_environment(device: torch.device) -> dict[str, str | int | None]:
    """Return the versions, settings and hardware that a result on ``device`` depends on, and the date, for JSON.

    A value is None if it is not installed or irrelevant on this device. Older files lack newer keys: read them with
    ``.get``.
    """
    on_gpu = device.type == "cuda"
    return {
        "zoo": distribution_version(DISTRIBUTION),
        "commit": checkout_commit(),
        "date": utc_now(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": distribution_version("torchvision"),
        "timm": distribution_version("timm"),
        "pillow": distribution_version("Pillow"),
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


def distribution_version(distribution: str) -> str | None:
    """Return the installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def utc_now() -> str:
    """Return the current time in UTC, to the second, in ISO 8601 format."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@functools.cache
def checkout_commit() -> str | None:
    """Return the commit of the checkout that zoo runs from, with ``-dirty`` if tracked files have changed.

    Returns None if zoo does not run from a checkout. Cached, because a process keeps running the code that it started
    with. Ignores changes in docs/results, where benchmarks write result files one after another.
    """
    head = git("rev-parse", "--verify", "HEAD")
    if head is None:
        return None
    is_clean = git("diff", "--quiet", "HEAD", "--", ".", f":(exclude){RESULTS_DIR}") is not None
    return head.strip() + "-dirty" * (not is_clean)


def git(*words: str) -> str | None:
    """Run git in the checkout and return its output; None if it fails, or without git or checkout."""
    if not (ROOT / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def libjpeg_version() -> str | None:
    """Return name and version of the JPEG decoder. Decoded pixels depend on it."""
    name = "libjpeg-turbo" if features.check_feature("libjpeg_turbo") else "libjpeg"
    version = features.version_feature("libjpeg_turbo") or features.version_codec("jpg")
    return None if version is None else f"{name} {version}"


def tf32_settings() -> str:
    """Return the operations that may use TF32 on a GPU, with 10 of the 23 mantissa bits of float32."""
    convolutions = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    uses = {"matrix products": torch.backends.cuda.matmul, "convolutions": convolutions}
    return ", ".join(f"{what} {'on' if used.fp32_precision == 'tf32' else 'off'}" for what, used in uses.items())


def device_name(device: torch.device) -> str:
    """Return the product name of a GPU, or the type of another device (``cpu``, ``mps``)."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def cpu_model() -> str:
    """Return the product name of the CPU with its family, model and stepping, or its architecture if it is unknown.

    Virtual machines hide the model in the product name.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    facts: dict[str, str] = {}
    for key, _, value in (line.partition(":") for line in lines):
        facts.setdefault(key.strip(), value.strip())
    if "model name" not in facts:
        return platform.processor() or platform.machine()
    numbers = {"family": "cpu family", "model": "model", "stepping": "stepping"}
    known = [f"{name} {facts[key]}" for name, key in numbers.items() if key in facts]
    return facts["model name"] + (f" ({', '.join(known)})" if known else "")
