"""The README says what the package does: its figures are the files', its code runs, its links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests import readme
from zoo.cli import build_parser
from zoo.config import experiments_dir, load_experiment

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", readme.SECTIONS)
def test_figures_are_those_of_the_files_they_come_from(name: str) -> None:
    """After a new measurement or golden file: python -m tests.readme"""
    assert readme.section(README, name) == readme.SECTIONS[name]()


def test_rewriting_changes_nothing_but_figures() -> None:
    assert readme.rewrite(README) == README
    emptied = re.sub(r"(<!-- (\w+) -->\n?).*?\n?(<!-- /\2 -->)", r"\1\3", README, flags=re.DOTALL)
    assert len(emptied) < len(README) - 2000
    assert readme.rewrite(emptied) == README


def test_all_markers_have_a_generator_and_none_begins_a_line_of_a_sentence() -> None:
    markers = re.findall(r"<!-- (/?)(\w+) -->", README)
    assert sorted(name for slash, name in markers if not slash) == sorted(readme.SECTIONS)
    assert sorted(name for slash, name in markers if slash) == sorted(readme.SECTIONS)
    assert re.findall(r"^<!-- .*-->.+$", README, re.MULTILINE) == []


def test_the_quickstart_expects_the_mean_of_its_seeds() -> None:
    expected = load_experiment(experiments_dir() / "quickstart_fashion_mnist.json").expected
    assert expected is not None
    scores = {crop: score.model_dump() for crop, score in expected.scores.items()}
    assert scores == readme.quickstart_means()
    assert expected.source == "mean of seeds 1 to 3"
    assert [run["seed"] for run in readme.result("quickstart")["runs"]] == [1, 2, 3]


def test_python_examples_run():
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})


def test_commands_are_understood():
    lines = [line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("zoo ")]
    assert len(commands) > 10
    for arguments in commands:
        build_parser().parse_args(arguments)


def test_links_to_files_lead_to_files():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_checksums_name_the_published_files():
    lines = [line.split("  ") for line in (ROOT / "checksums.md5").read_text().splitlines()]
    entries = json.loads((ROOT / "zoo" / "published.json").read_text())
    assert lines == [[entry["md5"], f"{entry['name']}.pth.tar"] for entry in entries]
