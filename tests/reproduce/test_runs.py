"""What is kept of training runs stands for their log folders: the same report follows from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.reproduce.test_reversible import EXPERIMENT, make_run
from zoo.errors import ConfigError
from zoo.reproduce import revnext
from zoo.reproduce.curves import NUM_RECONSTRUCTIONS, read_all_curves
from zoo.reproduce.revnet import EXPERIMENTS
from zoo.reproduce.run_files import draw_runs, groups_of, write_runs
from zoo.reproduce.runs import Run, read_runs

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
        {"event": "resume", "environment": {"commit": "abc"}},
        *(train(0, 2.5), train(0, 2.0), {"event": "validation", "epoch": 0, "top1": 20, "loss": 2.2, "count": 50}),
        *(train(1, 9.0), {"event": "validation", "epoch": 1, "top1": 1.0, "loss": 9.9, "count": 50}),
        *(train(1, 1.5), {"event": "validation", "epoch": 1, "top1": 30.0, "loss": 1.7, "count": 50}),
        train(2, 1.0),
    )
    (folder / "training_0.log").write_text("begin\nnow - stopped: NonFiniteLossError: the loss was not finite\n")
    (curves,) = read_all_curves([folder])
    assert curves.epochs == (
        {"epoch": 1, "train_loss": 2.0, "train_top1": 10.0, "val_loss": 2.2, "val_top1": 20.0},
        {"epoch": 2, "train_loss": 1.5, "train_top1": 10.0, "val_loss": 1.7, "val_top1": 30.0},
    )
    assert curves.environment == {"commit": "abc"}
    assert (curves.num_training_images, curves.num_validation_images) == (None, 50)
    assert curves.status == "stopped: NonFiniteLossError: the loss was not finite"


def test_reconstruction_errors_are_thinned_out_and_what_is_not_finite_stays_so(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", [10.0])
    steps = [{"event": "reconstruction", "step": step, "errors": {"0": 0.5, "1": step / 100}} for step in range(100)]
    add_records(folder, *steps, {"event": "reconstruction", "step": 100, "errors": {"0": None, "1": 2.0}})
    kept = read_all_curves([folder])[0].reconstruction
    assert len(kept) == NUM_RECONSTRUCTIONS
    assert (kept[0]["step"], kept[-1]["step"]) == (0, 100)
    assert (kept[0]["worst_relative_error"], kept[-1]["worst_relative_error"]) == (0.5, None)


def test_a_file_of_curves_stands_for_its_folders(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "a", [10.0, 20.0]), make_run(tmp_path / "b", [30.0], memory="plain", seed=7)]
    runs, _ = read_runs(folders, EXPERIMENTS)
    write_runs(tmp_path, "revnet", "zoo reproduce revnet", runs)
    again, remarks = read_runs([tmp_path / "revnet_runs.json"], EXPERIMENTS)
    assert (again, remarks) == (runs, [])
    kept = [[replace(run.curves, label="") for run in read if run.curves] for read in (again, runs)]
    assert kept[0] == kept[1]


def test_runs_that_were_trained_alike_share_their_axes(tmp_path: Path) -> None:
    names = (EXPERIMENT, "resnet32_cifar10_short", "revnet38_cifar10")
    folders = [make_run(tmp_path / name, [10.0], name) for name in names]
    runs, _ = read_runs(folders, EXPERIMENTS)
    assert [[run.experiment for run in group] for group in groups_of(runs)] == [[*names[:2]], [names[2]]]


@pytest.mark.parametrize("names", [["cifar10_revnet"], ["cifar10_revnext", "cifar10_flat"]])
def test_the_committed_curves_are_runs_of_the_experiments_and_can_be_drawn(names: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs, remarks = read_runs([RESULTS / f"{name}.json" for name in names], [*EXPERIMENTS, *revnext.EXPERIMENTS])
    assert [remark for remark in remarks if "left out" in remark] == []
    assert len(runs) == sum(len(json.loads((RESULTS / f"{name}.json").read_text())["runs"]) for name in names)
    draw_runs(tmp_path, "x", runs)
    assert (tmp_path / "x_runs.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"runs": [{}]}',
        '{"runs": [{"label": "", "seed": 1, "settings": {}, "epochs": [{"epoch": 1}]}]}',
        "[]",
    ],
)
def test_a_file_that_holds_no_curves_is_a_users_fault(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=r"--runs: no shortened logs .*x\.json"):
        read_runs([tmp_path / "x.json"], EXPERIMENTS)


def test_remarks_name_the_path_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report may be committed: it has no folder of one machine in it."""
    make_run(tmp_path / "a", [])
    monkeypatch.chdir(tmp_path)
    assert read_runs([Path("a")], EXPERIMENTS)[1] == ["left out: a has no validation yet"]


def test_runs_without_a_loss_have_an_accuracy_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs, _ = read_runs([make_run(tmp_path / "a", [10.0])], EXPERIMENTS)
    draw_runs(tmp_path, "x", runs)
    assert isinstance(runs[0], Run)
    assert (tmp_path / "x_runs.png").exists()
