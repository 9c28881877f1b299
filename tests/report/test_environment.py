"""A result can be traced to its machine and versions."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from zoo.report import environment


def test_the_description_is_json_and_names_versions_and_machine() -> None:
    described = environment.describe_environment(torch.device("cpu"))
    assert json.loads(json.dumps(described)) == described
    assert described["torch"] == torch.__version__
    assert described["device"] == "cpu"
    assert described["cpu"]
    assert described["threads"] == torch.get_num_threads()
    assert described["cuda"] is None


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert environment.version_of("no-such-distribution") is None


def test_the_commit_is_that_of_the_checkout_and_says_when_files_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*args: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    package = tmp_path / "zoo" / "report" / "environment.py"
    package.parent.mkdir(parents=True)
    package.touch()
    monkeypatch.setattr(environment, "__file__", str(package))
    assert environment.checkout_commit() is None
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    assert environment.checkout_commit() == git("rev-parse", "HEAD")
    package.write_text("changed")
    assert environment.checkout_commit() == f"{git('rev-parse', 'HEAD')}-dirty"


def test_a_system_without_cpuinfo_still_has_a_cpu_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", fail)
    assert environment.cpu_model()
