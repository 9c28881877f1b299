"""``zoo doctor``: print versions, devices, folders and back ends, with the reason why a back end is not in use."""

from __future__ import annotations

import os
from dataclasses import dataclass

from zoo.cli.options import Command
from zoo.errors import ConfigError
from zoo.tables import counted


@dataclass(frozen=True, kw_only=True)
class Doctor(Command):
    """Print versions, devices, back ends and caches."""

    example = "zoo doctor"

    def run(self) -> int:
        from zoo.ops import backend

        sections = {
            "versions": _versions(),
            "devices": _devices(),
            "norm kernels": backend.describe(),
            "files": _files(),
        }
        for title, findings in sections.items():
            print(f"{title}:")
            for name, finding in findings.items():
                print(f"  {name:<14}{finding}")
        return 0


def _versions() -> dict[str, str]:
    import torch

    from zoo.run.environment import describe_environment

    described = describe_environment(torch.device("cpu"))
    names = ("zoo", "commit", "python", "torch", "torchvision", "pillow", "libjpeg", "platform")
    return {name: str(described[name] or "unknown") for name in names}


def _devices() -> dict[str, str]:
    import torch

    from zoo.run.environment import cpu_model, device_name

    gpus = [device_name(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    built = torch.version.cuda or torch.version.hip
    no_gpu = f"no device found (torch is built for CUDA {built})" if built else "torch is built without CUDA"
    mps = "available, but slower and untested"
    cores, threads = counted(os.cpu_count() or 1, "core"), counted(torch.get_num_threads(), "thread")
    return {
        "cpu": f"{cpu_model()}, {cores}, {threads} used by torch",
        "cuda": ", ".join(gpus) or no_gpu,
        "mps": mps if torch.backends.mps.is_available() else "not available",
    }


def _files() -> dict[str, str]:
    from zoo.config.parse import experiments_dir
    from zoo.files import cache_dir

    try:
        cache = f"{cache_dir()} (ZOO_CACHE sets another)"
    except ConfigError as error:
        cache = str(error)
    return {"cache": cache, "experiments": str(experiments_dir())}
