"""A file of runs gives the same report as its log folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import refused
from tests.reproduce.runs import EXPERIMENT, make_run, run_of
from zoo.errors import ConfigError
from zoo.reproduce.papers import PAPERS
from zoo.reproduce.training_runs import draw_runs, groups_of, read_path, read_runs, write_runs

EXPERIMENTS, REVNEXT_EXPERIMENTS = PAPERS["revnet"].experiments, PAPERS["revnext"].experiments
RESULTS = Path(__file__).parents[2] / "docs" / "results"


def add_records(folder: Path, *records: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def train(epoch: int, loss: float) -> dict[str, Any]:
    return {"event": "train", "epoch": epoch, "epoch_loss": loss, "epoch_top1": 10.0}


def test_log_folder_yields_one_line_per_epoch(tmp_path: Path) -> None:
    """The last report of an epoch has its means; repeated epochs of a resumed run replace the earlier ones."""
    folder = make_run(tmp_path / "a", [])
    images = {"train": {"images": 500, "names": "12ab"}, "val": {"images": 50, "names": "34cd"}}
    add_records(
        folder,
        {"event": "resume", "environment": {"commit": "abc"}, "images": images},
        *(train(0, 2.5), train(0, 2.0), {"event": "validation", "epoch": 0, "top1": 20, "loss": 2.2, "count": 50}),
        *(train(1, 9.0), {"event": "validation", "epoch": 1, "top1": 1.0, "loss": 9.9, "count": 50}),
        *(train(1, 1.5), {"event": "validation", "epoch": 1, "top1": 30.0, "loss": 1.7, "count": 50}),
        train(2, 1.0),
        *({"event": "gradient_angle", "step": step, "degrees": angle} for step, angle in ((9, 0.1), (9, None))),
    )
    (run,) = read_path(folder)
    assert run.epochs == [
        {"epoch": 1, "train_loss": 2.0, "train_top1": 10.0, "val_loss": 2.2, "val_top1": 20.0},
        {"epoch": 2, "train_loss": 1.5, "train_top1": 10.0, "val_loss": 1.7, "val_top1": 30.0},
    ]
    assert (run.angles, run.environment) == ([{"step": 9, "degrees": None}], {"commit": "abc"})
    assert (run.num_training_images, run.num_validation_images) == (500, 50)
    assert run.data == "train 12ab, val 34cd"


def test_runs_are_named_by_changes_of_network() -> None:
    run = run_of("revnext_flat_cifar10", 90.0, num_epochs=1, memory="plain")
    changes = {
        "optimizer.schedule.epochs": 40,
        "network.options": {"layers": [1, 2, 2]},
        "network.activation_param": 0.1,
    }
    changed = replace(run, experiment=f"revnext_flat_cifar10 {json.dumps(changes)}")
    assert changed.label == "revnext_flat_cifar10, layers 1-2-2, activation_param 0.1, stored, seed 1"
    assert run.label == "revnext_flat_cifar10, stored, seed 1"


def test_runs_file_replaces_its_folders(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "a", [10.0, 20.0]), make_run(tmp_path / "b", [30.0], memory="plain", seed=7)]
    add_records(folders[0], {"event": "gradient_angle", "step": 5, "degrees": 0.25})
    runs = read_runs(folders, EXPERIMENTS)
    facts = [(run.experiment, run.is_stored, run.config.seed, run.top1, run.is_finished) for run in runs]
    assert facts == [(EXPERIMENT, False, 1, [10.0, 20.0], False), (EXPERIMENT, True, 7, [30.0], False)]
    write_runs(tmp_path, "revnet", "zoo reproduce revnet", runs)
    again = read_runs([tmp_path / "revnet_runs.json", folders[0]], EXPERIMENTS)  # the folder is read a second time
    assert [replace(run, source="") for run in again] == [replace(run, source="") for run in runs]


def test_runs_of_same_training_share_axes(tmp_path: Path) -> None:
    names = (EXPERIMENT, "resnet32_cifar10_short", "revnet38_cifar10")
    runs = read_runs([make_run(tmp_path / name, [10.0], name) for name in names], EXPERIMENTS)
    assert [[run.experiment for run in group] for group in groups_of(runs)] == [[*names[:2]], [names[2]]]


@pytest.mark.pages
@pytest.mark.parametrize("name", ["revnet_runs", "revnext_runs"])
def test_committed_curves_can_be_drawn(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = read_runs([RESULTS / f"{name}.json"], [*EXPERIMENTS, *REVNEXT_EXPERIMENTS])
    assert len(runs) == len(json.loads((RESULTS / f"{name}.json").read_text())["runs"])
    draw_runs(tmp_path, "x", "title", runs)
    assert (tmp_path / "x_runs.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "text", ["", "{}", '{"runs": [{"label": "", "seed": 1, "settings": {}, "epochs": [{"epoch": 1}]}]}', "[]", None]
)
def test_folder_without_runs_is_user_error(text: str | None, tmp_path: Path) -> None:
    path = tmp_path
    if text is not None:
        path = tmp_path / "x.json"
        path.write_text(text)
    refused(ConfigError, lambda: read_runs([path], EXPERIMENTS), "--runs")


def test_incomplete_runs_are_skipped_with_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unknown = make_run(tmp_path / "a", [10.0], activation_param=0.5)
    empty = make_run(tmp_path / "b", [])
    assert read_runs([unknown, empty], EXPERIMENTS) == []
    assert f"left out: {unknown} was trained with settings of no experiment" in caplog.text
    assert f"left out: {empty} has no validation yet" in caplog.text
