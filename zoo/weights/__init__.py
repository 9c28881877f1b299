"""Weights files: fetching the published ones, reading files safely, and loading them into a network strictly.

The names are imported when they are first used, so that `zoo list` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.weights.cache import digests_of, fetch_weights, md5_of
    from zoo.weights.load import LoadReport, load_state_dict
    from zoo.weights.read import read_checkpoint, read_state_dict
    from zoo.weights.stored import StoredWeights, load_stored, read_weights

__all__ = [
    "LoadReport",
    "StoredWeights",
    "digests_of",
    "fetch_weights",
    "load_state_dict",
    "load_stored",
    "md5_of",
    "read_checkpoint",
    "read_state_dict",
    "read_weights",
]

_HOMES = {
    **dict.fromkeys(("digests_of", "fetch_weights", "md5_of"), "cache"),
    **dict.fromkeys(("LoadReport", "load_state_dict"), "load"),
    **dict.fromkeys(("read_checkpoint", "read_state_dict"), "read"),
    **dict.fromkeys(("StoredWeights", "load_stored", "read_weights"), "stored"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zoo.weights' has no attribute {name!r}")
    return getattr(import_module(f"zoo.weights.{_HOMES[name]}"), name)
