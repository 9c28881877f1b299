"""zoo: ImageNet networks, their published weights and their training, in up to half the memory."""

from zoo import layers
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
    "get",
    "layers",
    "list_models",
    "load_weights",
    "transforms",
]
