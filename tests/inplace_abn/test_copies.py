"""Repositories with a copy of the original import this package instead of it, without edited files."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo.inplace_abn
from tests.inplace_abn.test_init import check_equal, images
from tests.refusals import refused
from zoo.inplace_abn import replace_copy
from zoo.inplace_abn.copies import _CopyFinder

NORMS = "class ABN(nn.Module): pass\nclass InPlaceABN(ABN): pass\nclass InPlaceABNSync(ABN): pass\n"
# As in releases 0.0.2 to 0.1.1.
BN = f"import torch.nn as nn\nfrom .functions import *\n{NORMS}"
FUNCTIONS = """
from torch.utils.cpp_extension import load
raise RuntimeError("this compiles CUDA")
_backend = load(name="inplace_abn", sources=["inplace_abn.cpp"])
ACT_RELU = "relu"
def _reduce(x): pass
class InPlaceABN: pass
class InPlaceABNSync: pass
inplace_abn = InPlaceABN.apply
inplace_abn_sync = InPlaceABNSync.apply
__all__ = ["inplace_abn", "inplace_abn_sync", "ACT_RELU", "ACT_LEAKY_RELU", "ACT_ELU", "ACT_NONE"]
"""
INIT = """
from .bn import ABN, InPlaceABN, InPlaceABNSync
from .functions import ACT_RELU, ACT_LEAKY_RELU, ACT_ELU, ACT_NONE
from .misc import Block
"""
MISC = """
import torch.nn as nn
from .bn import ABN
class Block(nn.Sequential):
    def __init__(self, channels, norm_act=ABN):
        super().__init__(nn.Conv2d(channels, channels, 1), norm_act(channels), nn.Conv2d(channels, channels, 1))
"""
# As in release 0.0.1.
FIRST_BN = f"""
from collections import OrderedDict, Iterable
import torch.nn as nn
from .functions import inplace_abn, inplace_abn_sync
def _pair(x): pass
{NORMS}
class InPlaceABNWrapper(nn.Module): pass
class InPlaceABNSyncWrapper(nn.Module): pass
"""
FIRST_FUNCTIONS = """
from . import _ext
ACT_ELU = "elu"
class InPlaceABN: pass
__all__ = ["inplace_abn", "inplace_abn_sync"]
"""
FIRST_INIT = """
from .bn import ABN, InPlaceABN, InPlaceABNWrapper, InPlaceABNSync, InPlaceABNSyncWrapper
from .misc import Block
"""
LATER = {"__init__.py": INIT, "bn.py": BN, "functions.py": FUNCTIONS, "misc.py": MISC}
FIRST = {"__init__.py": FIRST_INIT, "bn.py": FIRST_BN, "functions.py": FIRST_FUNCTIONS, "misc.py": MISC}
FORMS = pytest.mark.parametrize("files", [LATER, FIRST], ids=["later", "first"])


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to import modules from; imports of a test are undone."""
    before = set(sys.modules)
    others = [finder for finder in sys.meta_path if not isinstance(finder, _CopyFinder)]  # examples of pages leave some
    monkeypatch.setattr(sys, "meta_path", others)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__spec__", None) and str(tmp_path) in str(sys.modules[name].__spec__.origin):
            del sys.modules[name]


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def import_copy(root: Path, files: dict[str, str]) -> Any:
    """Write a copy of the original as the package libs, and import it with its modules replaced."""
    write(root / "libs", files)
    replace_copy("libs")
    return importlib.import_module("libs")


def twin(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(4), activation).double()


@FORMS
def test_copy_is_never_run(root: Path, files: dict[str, str]) -> None:
    write(root / "libs", files)
    with pytest.raises((RuntimeError, ImportError)):
        importlib.import_module("libs")
    replace_copy("libs")
    libs: Any = importlib.import_module("libs")
    check_equal(libs.InPlaceABN(4).double(), twin(nn.LeakyReLU(0.01)), images())
    check_equal(libs.InPlaceABNSync(4, [0, 1], slope=0.2).double(), twin(nn.LeakyReLU(0.2)), images())
    check_equal(libs.InPlaceABN(4, activation="elu").double(), twin(nn.ELU()), images())
    check_equal(libs.InPlaceABNSync(4, activation="none").double(), twin(nn.Identity()), images())
    assert {path.name: path.read_text() for path in (root / "libs").glob("*.py")} == files


def test_abn_of_first_release_applies_relu(root: Path) -> None:
    libs = import_copy(root, FIRST)
    check_equal(libs.ABN(4).double(), twin(nn.ReLU()), images())
    check_equal(libs.ABN(4, nn.LeakyReLU(0.2), eps=1e-5).double(), twin(nn.LeakyReLU(0.2)), images())
    check_equal(libs.Block(4)[1].double(), twin(nn.ReLU()), images())
    keys = set(libs.ABN(4).state_dict())
    assert keys == set(libs.InPlaceABNWrapper(4).state_dict()) == set(libs.InPlaceABNSyncWrapper(4).state_dict())
    assert not isinstance(libs.InPlaceABN(4), libs.ABN)


def test_abn_of_later_releases_applies_leaky_relu(root: Path) -> None:
    libs = import_copy(root, LATER)
    check_equal(libs.ABN(4).double(), twin(nn.LeakyReLU(0.01)), images())
    check_equal(libs.Block(4, libs.InPlaceABN)[1].double(), twin(nn.LeakyReLU(0.01)), images())
    assert isinstance(libs.InPlaceABN(4), libs.ABN)
    assert libs.ACT_ELU == "elu"


@pytest.mark.parametrize(
    "statement",
    [
        "import {0}.bn; bn = {0}.bn; functions = {0}.functions",
        "from {0} import bn, functions",
        "import {0}.functions as functions, {0}.bn as bn",
    ],
)
@pytest.mark.parametrize("package", ["modules", "nets.modules"])
def test_copy_is_imported_in_any_way(root: Path, package: str, statement: str) -> None:
    write(root / package.replace(".", "/"), LATER)
    replace_copy(package)
    replace_copy(package)
    namespace: dict[str, Any] = {}
    exec(statement.format(package), namespace)
    exec(f"from {package}.bn import *\nfrom {package}.functions import *", namespace)
    replace_copy(package)
    assert namespace["bn"].__name__ == f"{package}.bn"
    assert namespace["bn"].ABN is namespace["ABN"] is zoo.inplace_abn.bn.ABN
    assert namespace["functions"].inplace_abn is namespace["inplace_abn"] is zoo.inplace_abn.inplace_abn
    assert zoo.inplace_abn.bn.__spec__.name == "zoo.inplace_abn.bn"


def test_modules_pickled_with_copy_load(root: Path) -> None:
    write(root / "modules", LATER)
    replace_copy("modules")
    modules: Any = importlib.import_module("modules")
    file = io.BytesIO()
    torch.save(nn.Sequential(modules.InPlaceABN(4)), file)
    file.seek(0)
    network: nn.Module = torch.load(file, weights_only=False)
    out: Tensor = network(images().float())
    assert out.shape == (3, 4, 5, 6)


def test_other_packages_are_imported_as_before(root: Path) -> None:
    for name in ("modules", "others"):
        write(root / name, LATER)
    (root / "plain").mkdir()
    replace_copy("modules")
    replace_copy("plain")
    refused(RuntimeError, lambda: importlib.import_module("others"), "CUDA")
    refused(ModuleNotFoundError, lambda: importlib.import_module("plain.bn"), "plain.bn")


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        ({"bn.py": BN + "class BatchRenorm: pass"}, "bn", "defines BatchRenorm"),
        ({"bn.py": "class ABN: pass\nclass InPlaceABN: pass"}, "bn", "lacks InPlaceABNSync"),
        ({"bn.py": ""}, "bn", "lacks ABN, InPlaceABN, InPlaceABNSync"),
        ({"bn.py": BN + "SLOPE = 0.01"}, "bn", "defines SLOPE"),
        ({"functions.py": FUNCTIONS.replace('["inplace_abn",', '["swish", "inplace_abn",')}, "functions", "swish"),
        ({"functions.py": "def swish(x): return x"}, "functions", "lacks inplace_abn, inplace_abn_sync"),
    ],
)
def test_module_that_is_not_a_copy_raises(root: Path, files: dict[str, str], name: str, message: str) -> None:
    write(root / "modules", {**LATER, "__init__.py": "", **files})
    replace_copy("modules")
    refused(
        ImportError,
        lambda: importlib.import_module(f"modules.{name}"),
        f"{name}.py ",
        message,
        "replace_copy('modules')",
    )


@pytest.mark.parametrize("name", ["bn", "functions"])
def test_already_imported_copy_raises(root: Path, name: str) -> None:
    write(root / "modules", {"__init__.py": "", "bn.py": NORMS.replace("nn.Module", "object"), "functions.py": ""})
    importlib.import_module(f"modules.{name}")
    refused(ImportError, lambda: replace_copy("modules"), f"modules.{name}", f"{name}.py")
