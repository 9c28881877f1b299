"""zoo: ImageNet networks, their published weights and their training, in up to half the memory.

The public names are imported when they are first used, so that `zoo --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo import convert, layers
    from zoo.data.transforms import transforms
    from zoo.errors import CheckpointError, ConfigError, ConversionError, DataError, WeightsError, ZooError
    from zoo.registry import get, list_models
    from zoo.weights import load_weights

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ConversionError",
    "DataError",
    "WeightsError",
    "ZooError",
    "convert",
    "get",
    "layers",
    "list_models",
    "load_weights",
    "transforms",
]

_HOMES = {
    "get": "zoo.registry",
    "list_models": "zoo.registry",
    "load_weights": "zoo.weights",
    "transforms": "zoo.data.transforms",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'zoo' has no attribute {name!r}")
    if name in ("convert", "layers"):
        return import_module(f"zoo.{name}")
    return getattr(import_module(_HOMES.get(name, "zoo.errors")), name)
