"""The stub files of packages that import their public names late."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import zoo
import zoo.weights

PACKAGES = (zoo, zoo.weights)


def _stub_path(package: ModuleType) -> Path:
    return Path(str(package.__file__)).with_suffix(".pyi")


def _stub_of(package: ModuleType) -> str:
    """Return the contents of the stub file: an import for each name of the package's list."""
    own = package.__name__
    imported = sorted((own if home == f"{own}.{name}" else home, name) for name, home in package._HOMES.items())
    lines = [
        "# Generated from the list in __init__.py.",
        *(f"from {home} import {name} as {name}" for home, name in imported),
        *(["", "__version__: str"] if own == "zoo" else []),
    ]
    return "\n".join(lines) + "\n"


def generated() -> dict[Path, str]:
    return {_stub_path(package): _stub_of(package) for package in PACKAGES}
