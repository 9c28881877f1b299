"""`replace_copy` replaces copies of the original in other repositories by this package."""

from __future__ import annotations

import ast
import sys
from collections import OrderedDict
from collections.abc import Sequence
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from torch import nn

from zoo.inplace_abn import bn, functions

# Name of a module of a copy -> its replacement, and the names that it has in every release.
REPLACED = {
    "bn": (bn, {"ABN", "InPlaceABN", "InPlaceABNSync"}),
    "functions": (functions, {"inplace_abn", "inplace_abn_sync"}),
}


def replace_copy(package: str) -> None:
    """Import ``PACKAGE.bn`` and ``PACKAGE.functions`` from this package from now on, and never run their files.

    Repositories of 2018 to 2020 have a package, mostly called ``modules`` or ``libs``, with copies of these two files
    of releases 0.x. functions.py compiles CUDA while it is imported. The other files of the package are imported as
    before:

        import zoo.inplace_abn
        zoo.inplace_abn.replace_copy("modules")
        from modules import InPlaceABNSync

    Raises ImportError if one of the two is already imported. Importing a replaced module raises ImportError if the file
    has other public names than the original and hence is not a copy. A copy that computes something else under the same
    names is not detected.
    """
    for name in REPLACED:
        module = sys.modules.get(f"{package}.{name}")
        if module is not None and not isinstance(getattr(module.__spec__, "loader", None), _CopyFinder):
            raise ImportError(
                f"{module.__name__} is imported already, from {getattr(module, '__file__', None)}; "
                f"call replace_copy({package!r}) before everything that imports {package}"
            )
    if not any(isinstance(finder, _CopyFinder) and finder.package == package for finder in sys.meta_path):
        sys.meta_path.insert(0, _CopyFinder(package))


class ABN(nn.Sequential):
    """ABN of release 0.0.1: a BatchNorm2d ``bn`` with the given settings, and an activation ``act`` (default ReLU)."""

    def __init__(self, num_features: int, activation: nn.Module | None = None, **settings: Any) -> None:
        activation = nn.ReLU(inplace=True) if activation is None else activation
        super().__init__(OrderedDict(bn=nn.BatchNorm2d(num_features, **settings), act=activation))


class _CopyFinder(MetaPathFinder, Loader):
    """Finds and loads the modules of one copy."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        found = PathFinder.find_spec(fullname, path) if package == self.package and name in REPLACED else None
        if found is None:
            return None
        names = _public_names(found)
        module, needed = REPLACED[name]
        if (missing := needed - names) or (other := names - set(module.__all__)):
            what = f"lacks {', '.join(sorted(missing))}" if missing else f"defines {', '.join(sorted(other))}"
            raise ImportError(
                f"{found.origin} {what}, unlike {name}.py of inplace_abn: it is no copy of that file; "
                f"leave out replace_copy({self.package!r})"
            )
        return ModuleSpec(fullname, self, origin=found.origin, loader_state=names)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        replacement, _ = REPLACED[module.__name__.rpartition(".")[2]]
        vars(module).update({name: getattr(replacement, name) for name in replacement.__all__})
        if "InPlaceABNWrapper" in module.__spec__.loader_state:  # release 0.0.1; only it has another ABN
            vars(module)["ABN"] = ABN


def _public_names(spec: ModuleSpec) -> set[str]:
    """Return the names in ``__all__`` of a module, or the public names that it defines, without running it."""
    source = spec.loader.get_source(spec.name) if isinstance(spec.loader, InspectLoader) else None
    names: set[str] = set()
    for node in ast.parse(source or "").body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            assigned = {target.id for target in node.targets if isinstance(target, ast.Name)}
            if "__all__" in assigned:
                return set(ast.literal_eval(node.value))
            names |= assigned
    return {name for name in names if not name.startswith("_")}
