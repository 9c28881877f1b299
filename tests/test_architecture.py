"""Data flows one way, and the top level holds only what belongs there."""

from __future__ import annotations

import ast
import subprocess
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = [
    "errors",
    "limits",
    "tables",
    "architectures",
    "files",
    "section",
    "spec",
    "config",
    "torch_internals",
    "ops",
    "layers",
    "remat",
    "models",
    "weights",
    "convert",
    "data",
    "registry",
    "preprocessing",
    "engine",
    "tasks",
    "run",
    "benchmark",
    "reproduce",
    "cli",
]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "zoo").rglob("*.py"))
}


def room_of(module: str) -> int | None:
    """Return the position of a module's room; None for `zoo` itself and for modules of other packages."""
    parts = module.split(".")
    return ROOMS.index(parts[1]) if parts[0] == "zoo" and len(parts) > 1 and parts[1] in ROOMS else None


def imports_of(path: Path) -> set[str]:
    """Return the modules of this package that a file imports, those for type checkers and in functions included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else str(node.module) for name in full}
    return names & MODULES.keys()


IMPORTS = {module: imports_of(path) for module, path in MODULES.items() if room_of(module) is not None}


def test_every_module_belongs_to_a_room():
    assert MODULES.keys() - IMPORTS.keys() == {"zoo", "zoo.__main__"}


def test_a_file_imports_only_from_its_own_room_or_an_earlier_one():
    upward = [
        f"{module} imports {name}"
        for module, names in IMPORTS.items()
        for name in sorted(names)
        if room_of(name) is None or room_of(name) > room_of(module)
    ]
    assert upward == []


def test_no_files_import_each_other_in_a_cycle():
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_remat_needs_nothing_of_networks():
    allowed = {"errors", "tables", "torch_internals", "ops", "remat"}
    outside = [
        f"{module} imports {name}"
        for module, names in IMPORTS.items()
        if module.startswith("zoo.remat")
        for name in sorted(names)
        if name.split(".")[1] not in allowed
    ]
    assert outside == []


def test_reading_data_needs_nothing_of_preparing_it():
    outside = [
        f"{module} imports {name}"
        for module, names in IMPORTS.items()
        if module.startswith("zoo.data") and not module.startswith("zoo.data.prepare")
        for name in sorted(names)
        if name.startswith("zoo.data.prepare")
    ]
    assert outside == []


def test_the_top_level_holds_only_what_belongs_there():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    expected = {"zoo", "experiments", "scripts", "csrc", "tests", "checksums.md5", "setup.py", "README.md", "docs"}
    expected |= {"pyproject.toml", "Makefile", "LICENSE", ".ci", ".gitignore", "hubconf.py"}
    assert {name.split("/")[0] for name in tracked} <= expected
