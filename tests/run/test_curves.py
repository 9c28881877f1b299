"""Curves have the numbers of metrics.jsonl, and a picture has the format of its suffix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import zoo
from tests.cli.conftest import Cli, Run, events
from tests.refusals import refused
from zoo.run.curves import plot_runs

pytest.importorskip("matplotlib")


def _lines(figure: Any, axes: int) -> list[tuple[list[float], list[float]]]:
    """Return the coordinates of the curves of a panel."""
    lines = figure.axes[axes].get_lines()
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in lines if len(line.get_xdata())]


def test_curves_have_numbers_of_metrics(finished: Run) -> None:
    figure = plot_runs(finished.log_dir)
    records = events(finished.log_dir)
    train, val = ([each for each in records if each["event"] == event] for event in ("train", "validation"))
    for axes, key in enumerate(["loss", "top1"]):
        of_train, of_val = _lines(figure, axes)
        assert of_train[0] == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2])
        assert of_train[1] == [record[key] for record in train]
        assert of_val == ([1, 2], [record[key] for record in val])


def _write(folder: Path, *records: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return folder


def test_last_record_of_repeated_epoch_counts(tmp_path: Path) -> None:
    val = [{"event": "validation", "epoch": epoch, "loss": 1.0, "miou": miou} for epoch, miou in enumerate([1, 2])]
    again = {"event": "validation", "epoch": 1, "loss": None, "miou": 3}
    figure = plot_runs(_write(tmp_path / "run", {"event": "start"}, *val, again))
    assert _lines(figure, 0) == [([1], [1.0])]
    assert _lines(figure, 1) == [([1, 2], [1, 3])]
    assert figure.axes[1].get_ylabel() == "mIoU, %"


def test_command_writes_picture_of_several_runs(finished: Run, cli: Cli, tmp_path: Path) -> None:
    other = _write(tmp_path / "other", {"event": "validation", "epoch": 0, "loss": 1.0, "top1": 5})
    for name, start in (("a.png", b"\x89PNG"), ("b.pdf", b"%PDF")):
        assert cli("plot", finished.log_dir, other, "--output", tmp_path / name).out == f"{tmp_path / name}\n"
        assert (tmp_path / name).read_bytes().startswith(start)
    assert len(_lines(plot_runs([finished.log_dir, other]), 1)) == 3


@pytest.mark.parametrize(
    ("lines", "reason"),
    [(None, "No such file"), ("x", "JSONDecodeError"), ("[]", "TypeError"), ('{"event": "start"}', "no metrics")],
)
def test_folders_without_metrics_raise(lines: str | None, reason: str, tmp_path: Path) -> None:
    if lines is not None:
        (tmp_path / "metrics.jsonl").write_text(lines)
    refused(zoo.ConfigError, lambda: plot_runs(tmp_path), "metrics.jsonl: ", reason)


def test_unknown_suffix_raises(finished: Run, tmp_path: Path) -> None:
    refused(zoo.ConfigError, lambda: plot_runs(finished.log_dir, tmp_path / "curves.xyz"), "curves.xyz: ", "'.xyz'")
