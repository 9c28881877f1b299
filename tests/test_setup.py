"""Installation as the README documents it works in a fresh environment, and never fails for the lack of a compiler."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # installs and compiles the package

pytest.importorskip("setuptools", minversion="77")  # what pyproject.toml needs for a build

ROOT = Path(__file__).parents[1]
NO_INDEX = re.compile(
    "ConnectionError|NewConnectionError|No matching distribution|Temporary failure in name resolution"
)


def _documented_commands() -> list[str]:
    """Return the commands of the README's first block, which install zoo."""
    return re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0].splitlines()


def _copy_of_the_checkout(target: Path) -> Path:
    """Return a copy of the tracked files: a build leaves its own files in the folder that it builds."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    for name in map(os.fsdecode, filter(None, names)):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((ROOT / name).read_bytes())
    return target


def _quick_compiler(path: Path) -> str:
    """Write a compiler that does not optimize, which takes a fifth of the time for the same sources; return its path.

    The kernels that the other tests use were compiled as documented.
    """
    path.write_text(f'#!/bin/sh\nexec {sysconfig.get_config_var("CXX") or "c++"} "$@" -O0\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.exhaustive
def test_documented_installation_works_in_fresh_environment(tmp_path: Path) -> None:
    """Torch and the other packages come from the environment that runs the test; setuptools is the new one's own."""
    checkout, home = _copy_of_the_checkout(tmp_path / "checkout"), tmp_path / "venv"
    venv.create(home, with_pip=True)
    paths = {"base": str(home), "platbase": str(home)}
    Path(sysconfig.get_path("purelib", vars=paths), "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment["CC"] = environment["CXX"] = _quick_compiler(tmp_path / "compiler")
    commands = _documented_commands()
    assert [command.split()[0] for command in commands] == ["pip"] * 2
    for command in commands:
        words = [str(home / "bin" / "python"), "-m", *shlex.split(command, comments=True), "--verbose"]
        done = subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
        if done.returncode and NO_INDEX.search(done.stderr):
            pytest.skip("the package index cannot be reached")
        assert done.returncode == 0, done.stderr
    shown = subprocess.run(
        [str(home / "bin" / "zoo"), "doctor"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert str(home) in shown  # the experiments of the installed package, not of a checkout
    assert re.search(r"native +active", shown), f"{shown}\n{done.stdout}"
    installed = {
        str(path.relative_to(package)) for package in home.rglob("site-packages/zoo") for path in package.rglob("*")
    }
    tracked = {
        str(path.relative_to(ROOT / "zoo")) for path in (ROOT / "zoo/reproduce").rglob("*.*") if path.suffix != ".pyc"
    }
    assert tracked <= installed, "the published numbers are part of the package"


FIRST_STEP = """
import sys, torch, torchvision, zoo
from zoo.cli import main
from zoo.engine import _trainer as trainer
from zoo.layers import InPlaceABN
from zoo.ops import backend

def of_step(model):
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    model(images).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]

def new():
    torch.manual_seed(0)
    return torchvision.models.resnet18(num_classes=4)

assert all(map(torch.equal, of_step(zoo.lean(new())), of_step(new())))
assert InPlaceABN(4)(torch.randn(2, 4, 8, 8)).std() > 0.5
print(zoo.__file__, zoo.__version__, backend.name_for(torch.device("cpu")))
train_step = trainer.train_step
def step_and_stop(state, batch):
    train_step(state, batch)
    sys.exit(7)

trainer.train_step = step_and_stop
main(["quickstart"])
"""


@pytest.mark.parametrize("kind", ["py3-none-any", pytest.param("cp310-abi3", marks=pytest.mark.exhaustive)])
def test_wheel_runs_in_fresh_environment(kind: str, tmp_path: Path) -> None:
    """Runs the commands of `make wheel`; torch comes from the environment that runs the test."""
    checkout = _copy_of_the_checkout(tmp_path / "checkout")
    make = ["make", "-n", "wheel", f"BIN={Path(sys.executable).parent}"]
    lines = subprocess.run(make, cwd=checkout, capture_output=True, text=True, check=True).stdout.splitlines()
    builds = [line for line in lines if "pip wheel" in line]
    assert ["ZOO_PURE_WHEEL=1" in line for line in builds] == [True, False, False]
    compiler = _quick_compiler(tmp_path / "compiler")
    environment = {**os.environ, "CC": compiler, "CXX": compiler}
    subprocess.run(builds[kind == "cp310-abi3"], shell=True, cwd=checkout, env=environment, check=True)
    (wheel,) = checkout.glob(f"dist/zoo_lean-*-{kind}*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    assert all((site / "zoo" / name).is_file() for name in ("py.typed", "__init__.pyi", "weights/__init__.pyi"))
    assert not list(site.glob("inplace_abn*")), "the name of another project's package"
    environment = {**os.environ, "PYTHONPATH": str(site), "ZOO_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", FIRST_STEP]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    backend = "native" if kind == "cp310-abi3" else "reference"
    assert done.stdout.splitlines()[0].split()[::2] == [str(site / "zoo" / "__init__.py"), backend]


UNEDITED = """
from inplace_abn import ABN, InPlaceABN
import inplace_abn.functions
import torch

network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), InPlaceABN(8, 1e-5, 0.1, True, "leaky_relu", 0.01))
network(torch.randn(2, 3, 9, 9)).sum().backward()
print(InPlaceABN.__module__, inplace_abn.functions.ACT_NONE)
"""


def test_wheel_of_inplace_abn_runs_unedited_code(tmp_path: Path) -> None:
    checkout = _copy_of_the_checkout(tmp_path / "checkout")
    make = ["make", "-n", "wheel", f"BIN={Path(sys.executable).parent}"]
    lines = subprocess.run(make, cwd=checkout, capture_output=True, text=True, check=True).stdout.splitlines()
    (build,) = (line for line in lines if "pip wheel" in line and line.endswith("scripts/inplace_abn"))
    subprocess.run(build, shell=True, cwd=checkout, check=True)
    (wheel,) = checkout.glob("dist/zoo_inplace_abn-*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}"}
    command = [sys.executable, "-c", UNEDITED]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["zoo.inplace_abn.abn", "none"], done.stderr


def test_quickstart_installs_no_development_tools() -> None:
    """They are installed by the targets that need them."""
    commands = {
        target: subprocess.run(
            ["make", "-n", "-B", target], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for target in ("quickstart", "test")
    }
    assert "[dev]" not in commands["quickstart"]
    assert "--editable" in commands["quickstart"]
    assert commands["test"].count("[dev]") == commands["test"].count("--editable") == 1


def test_without_working_compiler_kernels_are_skipped_with_notice(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", tmp_path, "--build-temp", tmp_path / "temp"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "CC": "false", "CXX": "false"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "the CPU kernels are left out, plain torch stands in" in done.stdout + done.stderr
    assert not list(tmp_path.rglob("*.so"))
