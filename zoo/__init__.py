"""zoo: networks that classify or segment images, their published weights and their training, in half the memory.

The public names are imported when they are first used, so that `zoo --help` does not wait for torch.
"""

import re
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo import convert, layers, remat, weights
    from zoo.errors import (
        CheckpointError,
        ConfigError,
        ConversionError,
        DataError,
        NonFiniteLossError,
        TrainingInterrupted,
        VerificationError,
        WeightsError,
        ZooError,
    )
    from zoo.registry.get import create_model, get, load_weights
    from zoo.registry.load_network import load_network
    from zoo.registry.names import is_model, list_models, list_pretrained
    from zoo.registry.transforms import transforms
    from zoo.remat.lean import lean
    from zoo.remat.memory_use import count_memory, measure_memory
    from zoo.remat.report.check import check
    from zoo.remat.report.memory_report import memory_report
    from zoo.run.scoring import score
    from zoo.run.segmenting import segment
    from zoo.run.training import train

    __version__: str

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ConversionError",
    "DataError",
    "NonFiniteLossError",
    "TrainingInterrupted",
    "VerificationError",
    "WeightsError",
    "ZooError",
    "check",
    "convert",
    "count_memory",
    "create_model",
    "get",
    "is_model",
    "layers",
    "lean",
    "list_models",
    "list_pretrained",
    "load_network",
    "load_weights",
    "measure_memory",
    "memory_report",
    "remat",
    "score",
    "segment",
    "train",
    "transforms",
    "weights",
]

_HOMES = {
    "check": "zoo.remat.report.check",
    "count_memory": "zoo.remat.memory_use",
    "create_model": "zoo.registry.get",
    "get": "zoo.registry.get",
    "is_model": "zoo.registry.names",
    "lean": "zoo.remat.lean",
    "list_models": "zoo.registry.names",
    "list_pretrained": "zoo.registry.names",
    "load_network": "zoo.registry.load_network",
    "load_weights": "zoo.registry.get",
    "measure_memory": "zoo.remat.memory_use",
    "memory_report": "zoo.remat.report.memory_report",
    "score": "zoo.run.scoring",
    "segment": "zoo.run.segmenting",
    "train": "zoo.run.training",
    "transforms": "zoo.registry.transforms",
}


def __dir__() -> list[str]:
    """Return the public names, including those that are not imported yet."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__")), "__version__"})


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in __all__:
        raise AttributeError(f"module 'zoo' has no attribute {name!r}")
    if name in ("convert", "layers", "remat", "weights"):
        return import_module(f"zoo.{name}")
    return getattr(import_module(_HOMES.get(name, "zoo.errors")), name)


def _version() -> str:
    """Return the installed version, or the one in pyproject.toml if this checkout is not installed."""
    from zoo.files import DISTRIBUTION

    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        settings = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
        version = re.search(r'^version = "(.+)"$', settings, re.MULTILINE)
        assert version is not None, "pyproject.toml names no version"
        return version.group(1)
