"""Data flows one way, and the project speaks of itself alone."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [
    "errors",
    "limits",
    "architectures",
    "files",
    "section",
    "spec",
    "config",
    "torch_internals",
    "ops",
    "layers",
    "models",
    "weights",
    "convert",
    "data",
    "registry",
    "engine",
    "tasks",
    "report",
    "training",
    "scoring",
    "segmenting",
    "benchmark",
    "reproduce",
    "cli",
]
FILES = sorted((ROOT / "zoo").rglob("*.py"))


def row_of(module: str) -> int | None:
    """Return the row of a module's dotted name; None outside the rows (zoo itself, __main__, other packages)."""
    parts = module.split(".")
    return ROWS.index(parts[1]) if parts[0] == "zoo" and len(parts) > 1 and parts[1] in ROWS else None


def imports_of(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_from_its_own_row_or_an_earlier_one(path):
    own = row_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    if own is None:
        return
    for name in imports_of(path):
        row = row_of(name)
        assert row is None or row <= own, f"{path.name} ({ROWS[own]}) imports {name}"
        assert name.split(".")[0] != "zoo" or row is not None, f"{path.name} imports {name}, which has no row"


def test_every_file_of_the_package_belongs_to_a_row():
    outside = {path.name for path in FILES if row_of(".".join(path.relative_to(ROOT).with_suffix("").parts)) is None}
    assert outside == {"__init__.py", "__main__.py"}


def test_no_two_files_have_the_same_name():
    names = [path.name for path in FILES if path.name != "__init__.py"]
    assert sorted(names) == sorted(set(names))


def test_the_top_level_holds_only_what_belongs_there():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    expected = {"zoo", "experiments", "scripts", "csrc", "tests", "checksums.md5", "setup.py", "README.md", "docs"}
    expected |= {"pyproject.toml", "Makefile", "LICENSE", ".ci", ".gitignore", "hubconf.py"}
    assert {name.split("/")[0] for name in tracked} <= expected
