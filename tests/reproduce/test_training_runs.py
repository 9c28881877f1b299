"""What is kept of training runs stands for their log folders: the same report follows from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.reproduce.runs import EXPERIMENT, make_run, run_of
from zoo.errors import ConfigError
from zoo.reproduce.papers import PAPERS
from zoo.reproduce.training_runs import (
    NUM_ANGLES,
    NUM_RECONSTRUCTIONS,
    data_of,
    draw_runs,
    groups_of,
    read_path,
    read_runs,
    write_runs,
)

EXPERIMENTS, REVNEXT_EXPERIMENTS = PAPERS["revnet"].experiments, PAPERS["revnext"].experiments
RESULTS = Path(__file__).parents[2] / "docs" / "results"


def add_records(folder: Path, *records: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def train(epoch: int, loss: float) -> dict[str, Any]:
    return {"event": "train", "epoch": epoch, "epoch_loss": loss, "epoch_top1": 10.0}


def test_a_log_folder_becomes_a_line_per_epoch(tmp_path: Path) -> None:
    """The last report of an epoch has its means; what an interrupted run did again replaces what it had done."""
    folder = make_run(tmp_path / "a", [])
    add_records(
        folder,
        {
            "event": "resume",
            "environment": {"commit": "abc"},
            "images": {"train": {"images": 500, "names": "12ab"}, "val": {"images": 50, "names": "34cd"}},
        },
        *(train(0, 2.5), train(0, 2.0), {"event": "validation", "epoch": 0, "top1": 20, "loss": 2.2, "count": 50}),
        *(train(1, 9.0), {"event": "validation", "epoch": 1, "top1": 1.0, "loss": 9.9, "count": 50}),
        *(train(1, 1.5), {"event": "validation", "epoch": 1, "top1": 30.0, "loss": 1.7, "count": 50}),
        train(2, 1.0),
    )
    (folder / "training_0.log").write_text("begin\nnow - stopped: NonFiniteLossError: the loss was not finite\n")
    (run,) = read_path(folder)
    assert run.epochs == [
        {"epoch": 1, "train_loss": 2.0, "train_top1": 10.0, "val_loss": 2.2, "val_top1": 20.0},
        {"epoch": 2, "train_loss": 1.5, "train_top1": 10.0, "val_loss": 1.7, "val_top1": 30.0},
    ]
    assert run.environment == {"commit": "abc"}
    assert (run.num_training_images, run.num_validation_images) == (500, 50)
    assert run.data == "train 12ab, val 34cd"
    assert run.status == "stopped: NonFiniteLossError: the loss was not finite"


def test_the_cost_of_a_run_is_that_of_all_its_parts_if_all_are_known(tmp_path: Path) -> None:
    cost = {"seconds": 60.0, "gpu_seconds": None}
    folder = make_run(tmp_path / "a", [10.0])
    add_records(folder, {"event": "end", **cost}, {"event": "resume"})
    assert read_path(folder)[0].cost is None  # the second part was killed, and its records have no times
    add_records(folder, {"event": "end", **cost})
    (run,) = read_path(folder)
    assert run.cost == {"seconds": 120.0, "gpu_seconds": None}
    run = replace(run, data="train 12ab")
    write_runs(tmp_path, "test", "zoo", [run])
    assert read_path(tmp_path / "test_runs.json")[0].cost == run.cost
    assert read_path(tmp_path / "test_runs.json")[0].data == run.data


def test_a_process_that_was_killed_cost_the_time_until_its_last_record(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", [])
    (folder / "metrics.jsonl").unlink()
    started = {"event": "start", "world_size": 2, "environment": {"cuda": "13.0"}}
    ended = {"event": "end", "time_s": 1060.0, "seconds": 61.0, "gpu_seconds": 122.0}
    add_records(
        folder,
        {**started, "time_s": 100.0},
        {**train(0, 2.0), "time_s": 140.0},
        {**started, "event": "resume", "time_s": 1000.0},
        ended,
    )
    assert read_path(folder)[0].cost == {"seconds": 101.0, "gpu_seconds": 202.0}


def test_runs_of_a_changed_experiment_are_named_by_the_changes_of_its_network() -> None:
    run = run_of("revnext_flat_cifar10", 90.0, num_epochs=1, memory="plain")
    changes = {
        "optimizer.schedule.epochs": 40,
        "network.options": {"layers": [1, 2, 2]},
        "network.activation_param": 0.1,
    }
    changed = replace(run, experiment=f"revnext_flat_cifar10 {json.dumps(changes)}")
    assert changed.label == "revnext_flat_cifar10, layers 1-2-2, activation_param 0.1, stored, seed 1"
    assert run.label == "revnext_flat_cifar10, stored, seed 1"


def test_reconstruction_errors_are_thinned_out_and_what_is_not_finite_stays_so(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", [10.0])
    steps = [{"event": "reconstruction", "step": step, "errors": {"0": 0.5, "1": step / 100}} for step in range(100)]
    add_records(folder, *steps, {"event": "reconstruction", "step": 100, "errors": {"0": None, "1": 2.0}})
    kept = read_path(folder)[0].reconstruction
    assert len(kept) == NUM_RECONSTRUCTIONS
    assert (kept[0]["step"], kept[-1]["step"]) == (0, 100)
    assert (kept[0]["worst_relative_error"], kept[-1]["worst_relative_error"]) == (0.5, None)


def test_angles_are_thinned_out_and_the_images_have_their_digest(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", [10.0])
    steps = [{"event": "gradient_angle", "step": step, "degrees": step / 100} for step in range(2 * NUM_ANGLES)]
    images = {"val": {"images": 50, "classes": 2, "names": "digest"}}
    add_records(folder, {"event": "resume", "images": images}, *steps, {**steps[-1], "degrees": None})
    (run,) = read_path(folder)
    assert len(run.angles) == NUM_ANGLES
    assert (run.angles[0], run.angles[-1]) == (
        {"step": 0, "degrees": 0.0}, {"step": 2 * NUM_ANGLES - 1, "degrees": None},
    )  # fmt: skip
    assert (run.data, data_of([run]), data_of([run, replace(run, data="other")])) == ("val digest", "val digest", "")
    write_runs(tmp_path, "x", "zoo reproduce revnet", [run])
    (again,) = read_path(tmp_path / "x_runs.json")
    assert (again.angles, again.data) == (run.angles, "val digest")


def test_a_file_of_runs_stands_for_its_folders(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "a", [10.0, 20.0]), make_run(tmp_path / "b", [30.0], memory="plain", seed=7)]
    runs, _ = read_runs(folders, EXPERIMENTS)
    write_runs(tmp_path, "revnet", "zoo reproduce revnet", runs)
    again, remarks = read_runs([tmp_path / "revnet_runs.json"], EXPERIMENTS)
    assert remarks == []
    assert [replace(run, source="") for run in again] == [replace(run, source="") for run in runs]


def test_runs_that_were_trained_alike_share_their_axes(tmp_path: Path) -> None:
    names = (EXPERIMENT, "resnet32_cifar10_short", "revnet38_cifar10")
    folders = [make_run(tmp_path / name, [10.0], name) for name in names]
    runs, _ = read_runs(folders, EXPERIMENTS)
    assert [[run.experiment for run in group] for group in groups_of(runs)] == [[*names[:2]], [names[2]]]


@pytest.mark.parametrize("name", ["revnet_runs", "revnext_runs"])
def test_the_committed_curves_are_runs_of_the_experiments_and_can_be_drawn(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs, remarks = read_runs([RESULTS / f"{name}.json"], [*EXPERIMENTS, *REVNEXT_EXPERIMENTS])
    assert remarks == []
    assert len(runs) == len(json.loads((RESULTS / f"{name}.json").read_text())["runs"])
    assert {(run.num_training_images, run.num_validation_images) for run in runs} <= {
        (10_000, 10_000),
        (50_000, 10_000),
    }
    draw_runs(tmp_path, "x", runs)
    assert (tmp_path / "x_runs.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"runs": [{"label": "", "seed": 1, "settings": {}, "epochs": [{"epoch": 1}]}]}',
        "[]",
        '{"runs": null}',
    ],
)
def test_a_file_that_holds_no_runs_is_a_users_fault(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=r"--runs .*x\.json: training runs cannot be read "):
        read_runs([tmp_path / "x.json"], EXPERIMENTS)


def test_remarks_name_the_path_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report may be committed: it has no folder of one machine in it."""
    make_run(tmp_path / "a", [])
    monkeypatch.chdir(tmp_path)
    assert read_runs([Path("a")], EXPERIMENTS)[1] == ["left out: a has no validation yet"]


def test_runs_are_recognized_by_their_settings_with_any_seed_and_memory(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", [10.0, 20.0])
    second = make_run(tmp_path / "b", [30.0], memory="plain", seed=7)
    found, remarks = read_runs([first, second, first], EXPERIMENTS)
    assert remarks == []
    facts = [(run.experiment, run.is_stored, run.config.seed, run.top1, run.is_finished) for run in found]
    assert facts == [(EXPERIMENT, False, 1, [10.0, 20.0], False), (EXPERIMENT, True, 7, [30.0], False)]


def test_runs_with_unknown_settings_or_without_scores_are_remarked_on(tmp_path: Path) -> None:
    unknown = make_run(tmp_path / "a", [10.0], activation_param=0.5)
    empty = make_run(tmp_path / "b", [])
    foreign = make_run(tmp_path / "c", [10.0], REVNEXT_EXPERIMENTS[0])
    found, (first, second, third) = read_runs([unknown, empty, foreign], EXPERIMENTS)
    assert found == []
    assert first.startswith(f"left out: {unknown} was")
    assert "settings of no experiment in this report" in first
    assert "settings of no experiment in this report" in third
    assert "no validation yet" in second


def test_a_folder_that_is_no_run_is_a_users_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--runs .*metrics\.jsonl: the metrics of a training run cannot be read "):
        read_runs([tmp_path], EXPERIMENTS)
