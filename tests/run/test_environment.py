"""A result can be traced to its machine and versions."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import PIL
import pytest
import torch

from zoo.ops import backend
from zoo.run import environment


def test_description_is_json_and_names_versions_and_machine() -> None:
    described = environment.describe_environment(torch.device("cpu"))
    assert json.loads(json.dumps(described)) == described
    assert described["torch"] == torch.__version__
    assert described["device"] == "cpu"
    assert described["cpu"]
    assert described["threads"] == torch.get_num_threads()
    assert [described[key] for key in ("cuda", "cudnn", "tf32")] == [None, None, None]
    assert described["pillow"] == PIL.__version__
    assert described["norms"] == backend.name_for(torch.device("cpu"))
    age = datetime.now(timezone.utc) - datetime.fromisoformat(str(described["date"]))
    assert timedelta(0) <= age < timedelta(hours=1)


def test_back_end_of_norms_is_one_in_use() -> None:
    with backend.force_back_end("reference"):
        assert environment.describe_environment(torch.device("cpu"))["norms"] == "reference"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """A checkout with one commit that zoo seems to run from; called with its arguments, it runs git there."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    for name in ("zoo/run/environment.py", "docs/results/model_cpu.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    environment.checkout_commit.cache_clear()
    yield git
    environment.checkout_commit.cache_clear()


def test_commit_of_checkout_is_dirty_after_changes_and_none_without_git(
    checkout: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = checkout("rev-parse", "HEAD")
    assert environment.checkout_commit() == commit
    for change, expected in (
        (lambda: (tmp_path / "docs/results/model_cpu.json").write_text("changed"), commit),
        (lambda: (tmp_path / "zoo/run/environment.py").write_text("changed"), f"{commit}-dirty"),
        (lambda: monkeypatch.setenv("PATH", str(tmp_path)), None),
        (lambda: monkeypatch.setattr(environment, "ROOT", tmp_path / "elsewhere"), None),
    ):
        change()
        environment.checkout_commit.cache_clear()
        assert environment.checkout_commit() == expected
