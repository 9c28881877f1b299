"""Weights files: fetching published weights, reading files safely, and loading them into networks strictly.

The names are imported when they are first used, so that `zoo list` does not wait for torch.
"""

from importlib import import_module
from typing import Any

# The module of each public name; `python -m tests.golden` generates __init__.pyi, which type checkers read, from it.
_HOMES = {
    **dict.fromkeys(("digests_of", "fetch_weights", "md5_of"), "zoo.weights._cache"),
    **dict.fromkeys(("LoadReport", "load_state_dict"), "zoo.weights._load"),
    **dict.fromkeys(("read_checkpoint", "read_state_dict"), "zoo.weights._read"),
    **dict.fromkeys(("StoredWeights", "read_weights"), "zoo.weights._stored"),
    "load_stored": "zoo.weights._load_file",
}
__all__ = sorted(_HOMES)


def __dir__() -> list[str]:
    """Return the public names, including those that are not imported yet."""
    return sorted({*__all__, *globals()})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zoo.weights' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
