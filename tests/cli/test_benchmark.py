"""``zoo benchmark`` measures and writes its files, with the command that repeats it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from zoo.cli import build_parser

pytestmark = pytest.mark.slow  # measures


@pytest.fixture(autouse=True)
def _allocator_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.memory.timing.keep_heap", lambda: "left alone")


def run(cli: Cli, out: Path, *words: str) -> tuple[str, dict[str, Any]]:
    """Return what the command prints, and the content of the JSON file, which repeats the command."""
    words = ("benchmark", *words, "--out", str(out))
    printed = cli(*words).out
    content = json.loads(out.with_name(out.name + ".json").read_text())
    parser = build_parser()
    assert parser.parse_args(shlex.split(content["command"])[1:]) == parser.parse_args(words)
    return printed, content


def test_layer_benchmark_measures_requested_layers(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.benchmark.layer._compiled", lambda layer: layer)
    options = ["--dtypes", "float32", "--layouts", "channels_last", "--rounds", "2", "--threads", "1"]
    _, content = run(cli, tmp_path / "layer", "layer", "--shapes", "3x2x5x1", *options)
    found = {(tuple(record["shape"]), record["layout"]) for record in content["records"]}
    assert found == {((3, 2, 5, 1), "channels_last")}
    assert content["settings"]["threads"] == 1
    assert content["settings"]["allocator"] == "left alone"


def test_model_prints_and_writes_table_and_draws_plot(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ["--batch", "2", "--rounds", "1", "--plot", "--size", "32", "--structure", "1x1x1x1", "--threads", "1"]
    printed, content = run(cli, tmp_path / "model", "model", "resnet18", *options)
    assert (tmp_path / "model.md").read_text() in printed
    name = "resnet18 (1-1-1-1)"
    assert {record["subject"] for record in content["records"]} == {name}
    assert (tmp_path / "model.png").read_bytes().startswith(b"\x89PNG")
