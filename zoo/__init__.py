"""zoo: networks that classify or segment images, their published weights and their training, in half the memory.

The public names are imported when they are first used, so that `zoo --help` does not wait for torch.
"""

from importlib import import_module
from typing import Any

# The module of each public name; `python -m tests.golden` generates __init__.pyi, which type checkers read, from it.
_HOMES = {
    "CheckpointError": "zoo.errors",
    "ConfigError": "zoo.errors",
    "ConversionError": "zoo.errors",
    "DataError": "zoo.errors",
    "NonFiniteLossError": "zoo.errors",
    "TrainingInterrupted": "zoo.errors",
    "VerificationError": "zoo.errors",
    "WeightsError": "zoo.errors",
    "ZooError": "zoo.errors",
    "check": "zoo.memory.check",
    "convert": "zoo.convert",
    "create_model": "zoo.registry.get",
    "get": "zoo.registry.get",
    "is_model": "zoo.registry.names",
    "layers": "zoo.layers",
    "lean": "zoo.remat._lean",
    "list_models": "zoo.registry.names",
    "list_pretrained": "zoo.registry.names",
    "load_network": "zoo.registry.load_network",
    "load_weights": "zoo.registry.get",
    "memory_report": "zoo.memory.report",
    "predict": "zoo.run.predicting",
    "release_gradients": "zoo.memory.release",
    "remat": "zoo.remat",
    "score": "zoo.run.scoring",
    "segment": "zoo.run.segmenting",
    "train": "zoo.run.training",
    "transforms": "zoo.registry.transforms",
    "weights": "zoo.weights",
}
__all__ = sorted(_HOMES)


def __dir__() -> list[str]:
    """Return the public names, including those that are not imported yet."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__")), "__version__"})


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("zoo.files").version()
    if name not in _HOMES:
        raise AttributeError(f"module 'zoo' has no attribute {name!r}")
    home = import_module(_HOMES[name])
    return home if home.__name__ == f"zoo.{name}" else getattr(home, name)
