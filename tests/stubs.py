"""The stub files of packages that import their public names late. ``python -m tests.stubs`` generates them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import zoo
import zoo.weights
from tests.generated import print_changes, write_changed

PACKAGES = (zoo, zoo.weights)


def stub_path(package: ModuleType) -> Path:
    return Path(str(package.__file__)).with_suffix(".pyi")


def stub_of(package: ModuleType) -> str:
    """Return the contents of the stub file: an import for each name of the package's list."""
    own = package.__name__
    imported = sorted((own if home == f"{own}.{name}" else home, name) for name, home in package._HOMES.items())
    lines = [
        "# Generated from the list in __init__.py.",
        *(f"from {home} import {name} as {name}" for home, name in imported),
        *(["", "__version__: str"] if own == "zoo" else []),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print_changes([path for each in PACKAGES for path in write_changed(stub_path(each), stub_of(each))])
