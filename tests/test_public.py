"""`import zoo` offers names for completion, a version and types, and imports nothing too early."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import zoo
from tests.stubs import PACKAGES, generated
from zoo.layers import ABN, InPlaceABN, InPlaceABNSync

ROOT = Path(__file__).parents[1]


def test_all_public_names_are_listed_and_exist() -> None:
    assert {name for name in dir(zoo) if not name.startswith("__")} == set(zoo.__all__)
    with pytest.raises(AttributeError, match="no attribute 'lists'"):
        _ = zoo.lists


def test_type_checkers_see_names_of_lists() -> None:
    """After a change of a list: python -m tests.golden"""
    assert {path: path.read_text() for path in generated()} == generated()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_listed_names_exist(package) -> None:
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is not None


def test_version_is_version_of_package(monkeypatch) -> None:
    written = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    monkeypatch.setattr("zoo.files.metadata.version", lambda name: "9.9")
    assert zoo.__version__ == "9.9"

    def not_installed(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("zoo.files.metadata.version", not_installed)
    assert zoo.__version__ == written.group(1)


@pytest.mark.parametrize("layer", [InPlaceABN, InPlaceABNSync])
def test_norms_show_their_arguments(layer) -> None:
    own, base = inspect.signature(layer).parameters, inspect.signature(ABN).parameters
    for name, parameter in base.items():
        assert own[name] == parameter
    assert set(own) - set(base) == ({"group"} if layer is InPlaceABNSync else set())
    norm = layer(4, 1e-3, 0.2, activation="elu", activation_param=0.5, dtype=torch.float64)
    assert (norm.eps, norm.momentum, norm.activation, norm.activation_param) == (1e-3, 0.2, "elu", 0.5)
    assert (norm.weight.dtype, norm.inplace) == (torch.float64, True)


IMPORTED_LATE = ("torch._dynamo", "sympy", "triton", "torchvision", "PIL", "matplotlib", "onnx", "tensorboard", "timm")


def modules_after(code: str) -> set[str]:
    """Return the modules that a new process has imported once it has run ``code``."""
    code += "\nimport sys\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(done.stderr.split())


def test_package_and_its_help_import_neither_torch_nor_pydantic() -> None:
    modules = modules_after("import zoo, zoo.cli; zoo.cli.build_parser(); dir(zoo); zoo.__version__")
    assert not modules & {"torch", "numpy", "pydantic", "requests"}


LOOKS_UP = """
from zoo.cli import main
assert main(["list"]) == main(["show", "deeplab_resnext50"]) == main(["show", "imagenet_revcol_tiny"]) == 0
from zoo.config.parse import parse_experiment
try:
    parse_experiment({"network": {"arch": "revbifpn_s0", "options": {"norm_momentum": 2}}}, "test")
except ValueError as error:
    assert "norm_momentum = 2: should be less than or equal to 1" in str(error)
else:
    raise AssertionError
"""


def test_networks_are_listed_shown_and_checked_without_torch() -> None:
    assert "torch" not in modules_after(LOOKS_UP)


def test_lean_training_imports_torch_and_nothing_else() -> None:
    """zoo.lean is for any training script, whose environment may lack the other dependencies of the package."""
    code = "import torch, sys; of_torch = set(sys.modules)\nimport zoo; zoo.remat.Rematerializer(); zoo.lean\n"
    added = modules_after(code + "for name in of_torch: del sys.modules[name]")
    assert {name.split(".")[0] for name in added} <= {"zoo", *sys.stdlib_module_names}
    assert "zoo.remat._rematerializer" in added


def test_networks_are_listed_and_shown_without_torch() -> None:
    """Their sizes are in a file that tests/models/test_networks.py compares with the networks."""
    code = "from zoo.cli import main; main(['list']); main(['show', 'resnet50'])"
    code += "; main(['show', 'densenet264_ipabn_lr_256'])"
    assert "torch" not in modules_after(code)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is wanted where there is a GPU")
def test_networks_are_built_without_compilers_and_image_readers() -> None:
    """They take longer to import than all of the package."""
    code = "import zoo; zoo.get('resnet18'); zoo.get('revnet38_cifar')\n"
    modules = modules_after(code + "from zoo.cli import main; main(['list']); main(['show', 'resnet50'])")
    assert not modules & set(IMPORTED_LATE)
