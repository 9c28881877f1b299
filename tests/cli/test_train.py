"""``zoo train`` writes a run that can be continued, and scores nothing that was not trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.cli.conftest import NUM_VAL, SETTINGS, Run
from zoo.cli import main
from zoo.weights import read_checkpoint


def _events(log_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_checkpoints_text_metrics_and_tensorboard(finished: Run) -> None:
    names = {path.name for path in finished.log_dir.iterdir() if not path.name.startswith("events.")}
    assert names >= {"checkpoint.pth.tar", "model_best.pth.tar", "training_0.log", "metrics.jsonl"}
    assert [event["event"] for event in _events(finished.log_dir)] == [
        *("start", "train", "train", "train", "validation", "train", "train", "train", "validation"),
    ]
    board = EventAccumulator(str(finished.log_dir))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in board.Scalars("val/top1")] == [3, 6]
    assert "classifier.fc.weight" in board.Tags()["histograms"]
    assert board.Tags()["images"] == ["train/inputs"]


def test_resume_auto_of_a_finished_run_only_says_so(finished: Run, tmp_path: Path) -> None:
    shutil.copytree(finished.log_dir, tmp_path / "log")
    before = read_checkpoint(tmp_path / "log" / "checkpoint.pth.tar")["position"]
    command = ["train", str(finished.config), str(finished.data), "--log-dir", str(tmp_path / "log")]
    assert main([*command, "--resume", "auto", "-j", "0"]) == 0
    assert read_checkpoint(tmp_path / "log" / "checkpoint.pth.tar")["position"] == before
    assert "all 2 epochs are done" in (tmp_path / "log" / "training_0.log").read_text()
    sizes = [
        {path.name: path.stat().st_size for path in folder.iterdir() if path.name != "training_0.log"}
        for folder in (finished.log_dir, tmp_path / "log")
    ]
    assert sizes[0] == sizes[1]


def test_a_run_goes_on_where_its_checkpoint_is(finished: Run, tmp_path: Path) -> None:
    log_dir = Path(shutil.copytree(finished.log_dir, tmp_path / "log"))
    (log_dir / "checkpoint.previous.pth.tar").rename(log_dir / "checkpoint.pth.tar")
    command = ["train", str(finished.config), str(finished.data), "--log-dir", str(log_dir), "-p", "1", "-j", "0"]
    assert main([*command, "--resume", "auto"]) == 0
    again = _events(log_dir)[len(_events(finished.log_dir)) :]
    assert [(event["event"], event["step"]) for event in again] == [
        *(("resume", 3), ("train", 4), ("train", 5), ("train", 6), ("validation", 6)),
    ]
    assert [event["top1"] for event in again[1:]] == [event["top1"] for event in _events(finished.log_dir)[-4:]]


def test_evaluate_scores_the_given_weights(finished: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["train", str(finished.config), str(finished.data), "-e", "-j", "0", "--log-dir"]
    assert main([*command, str(tmp_path), "--resume", str(finished.checkpoint)]) == 0
    table = capsys.readouterr().out
    assert main([*command, str(finished.log_dir), "--resume", "auto"]) == 0
    assert capsys.readouterr().out == table
    cells = [cell.strip() for cell in table.splitlines()[2].split("|")]
    scored = _events(finished.log_dir)[-1]
    assert cells[1:4] == ["tiny", "center10-scale12", f"{scored['top1']:.2f}"]
    assert cells[6] == str(NUM_VAL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sources", [[], ["--resume", "auto", "--weights", "file"]])
def test_evaluate_needs_exactly_one_source_of_weights(
    finished: Run, sources: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(finished.config), str(finished.data), "--evaluate", *sources]) == 2
    assert f"--evaluate with {len(sources) // 2} sources of weights" in capsys.readouterr().err


def test_training_begins_with_given_weights(finished: Run, tmp_path: Path) -> None:
    config = tmp_path / "frozen.json"
    config.write_text(json.dumps({**SETTINGS, "optimizer": {**SETTINGS["optimizer"], "learning_rate": 1e-12}}))
    command = ["train", str(config), str(finished.data), "--log-dir", str(tmp_path / "log"), "-j", "0"]
    assert main([*command, "--weights", str(finished.checkpoint)]) == 0
    old, new = (
        read_checkpoint(path)["state_dict"] for path in (finished.checkpoint, tmp_path / "log/checkpoint.pth.tar")
    )
    assert (old["classifier.fc.weight"] - new["classifier.fc.weight"]).abs().max() < 1e-4


def test_a_batch_that_cannot_be_shared_out_is_refused_before_anything_is_written(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "odd.json"
    config.write_text(json.dumps({**SETTINGS, "optimizer": {"batch_size": 9, "accumulate_steps": 2}}))
    assert main(["train", str(config), str(finished.data), "--log-dir", str(tmp_path / "log")]) == 2
    assert "optimizer.batch_size = 9" in capsys.readouterr().err
    assert not (tmp_path / "log" / "checkpoint.pth.tar").exists()


def test_different_classes_of_the_two_parts_are_refused(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = shutil.copytree(finished.data, tmp_path / "data")
    (data / "val" / "class1").rename(data / "val" / "class2")
    assert main(["train", str(finished.config), str(data), "--log-dir", str(tmp_path / "log"), "-j", "0"]) == 2
    assert "different classes" in capsys.readouterr().err
