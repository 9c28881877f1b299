"""The committed results can be measured again: each names a commit, a command that exists, and a text made of it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from zoo.benchmark.results import markdown
from zoo.cli import build_parser

FOLDER = Path(__file__).parents[1] / "docs" / "results"
FILES = sorted(FOLDER.glob("*.json"))
# Shortened from the logs of training runs before there was a command for it; the files say so themselves.
BY_HAND = {"cifar10_flat.json", "cifar10_revnet.json", "cifar10_revnext.json"}


def commits_of(value: Any) -> list[str]:
    """Return the values of all keys ``commit`` in a file's content, at any depth."""
    if isinstance(value, dict):
        own = [value["commit"]] if isinstance(value.get("commit"), str) else []
        return own + [commit for item in value.values() for commit in commits_of(item)]
    return [commit for item in value for commit in commits_of(item)] if isinstance(value, list) else []


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_results_are_of_commits_without_changes() -> None:
    """A commit that ends in -dirty cannot be checked out: its numbers can never be measured again."""
    dirty = {path.name for path in FILES if any(commit.endswith("-dirty") for commit in commits_of(load(path)))}
    assert dirty == set(), "commit first, then measure again with the command in the file"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_result_says_how_it_was_measured(path: Path) -> None:
    content = load(path)
    if path.name in BY_HAND:
        assert "by hand" in content["made_by"]
        return
    assert commits_of(content)
    build_parser().parse_args(shlex.split(content["command"])[1:])


@pytest.mark.parametrize("path", [path for path in FILES if "records" in load(path)], ids=lambda path: path.name)
def test_the_text_of_a_benchmark_is_made_of_its_numbers(path: Path) -> None:
    assert path.with_suffix(".md").read_text() == markdown(load(path))
