"""Data flows in one direction, and the top level has only known files."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parents[1]
ROOMS = [
    "errors", "tables", "files", "config", "torch_internals", "ops", "layers", "remat", "memory", "models", "weights",
    "convert", "data", "registry", "engine", "tasks", "run", "benchmark", "reproduce", "inplace_abn",
    "cli",
]  # fmt: skip
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


@functools.cache
def all_imports() -> dict[str, set[str]]:
    return {module: imports_of(path) for module, path in MODULES.items() if room_of(module) is not None}


def test_every_module_belongs_to_room():
    assert MODULES.keys() - all_imports().keys() == {"zoo", "zoo.__main__"}


def imports_in(room: str) -> list[tuple[str, str]]:
    """Return which modules of a room import which others of this package."""
    return [(module, name) for module, names in all_imports().items() if module.startswith(room) for name in names]


def test_files_import_from_earlier_rooms_only():
    upward = [
        (module, name) for module, name in imports_in("zoo") if room_of(name) is None or room_of(name) > room_of(module)
    ]
    assert upward == []


def test_remat_imports_nothing_from_networks():
    allowed = {"errors", "tables", "files", "torch_internals", "ops", "remat"}
    assert [each for each in imports_in("zoo.remat") if each[1].split(".")[1] not in allowed] == []


def test_reading_data_imports_nothing_from_preparing_data():
    of_preparing = [each for each in imports_in("zoo.data") if each[1].startswith("zoo.data.prepare")]
    assert [each for each in of_preparing if not each[0].startswith("zoo.data.prepare")] == []


def test_no_files_import_each_other_in_cycle():
    try:
        TopologicalSorter(all_imports()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


#: Trains a lean step while the packages named by the arguments cannot be found.
ALONE = """
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

class Others(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in sys.argv else super().find_spec(name, path, target)

sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Others]
import torch, zoo, zoo.remat
from torch import nn
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 1))
x = torch.randn(2, 3, 66, 66)
report = zoo.memory_report(model, x)
zoo.lean(model, 0.9)(x).sum().backward()
assert report.lean < report.plain
from zoo.ops.backend import unavailable_reason
assert unavailable_reason("triton").startswith("triton is not installed: ")
others = sys.modules.keys() - sys.stdlib_module_names
print("rooms:", *sorted({name.split(".")[1] for name in others if name.startswith("zoo.")}))
"""


@pytest.mark.slow
def test_remat_requires_only_torch():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = [re.split("[<>=]", each)[0] for each in settings]
    hidden = ["PIL" if name == "pillow" else name for name in names if name not in ("torch", "numpy", "filelock")]
    assert {"pydantic", "PIL", "requests", "tensorboard", "torchvision"} <= set(hidden)
    command = [sys.executable, "-c", ALONE, "triton", *hidden]
    without_kernels = {**os.environ, "ZOO_KERNELS": "reference"}
    result = subprocess.run(command, cwd=ROOT, env=without_kernels, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "rooms: errors files memory ops remat tables torch_internals"


def test_top_level_has_only_known_files():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    expected = {"zoo", "experiments", "scripts", "csrc", "tests", "checksums.md5", "setup.py", "README.md", "docs"}
    expected |= {"pyproject.toml", "Makefile", "LICENSE", "CHANGELOG.md", ".ci", ".gitignore", "hubconf.py"}
    expected |= {".github", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md", "mkdocs.yml"}
    assert {name.split("/")[0] for name in tracked} <= expected
