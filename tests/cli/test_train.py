"""``zoo train`` writes a run that can be resumed."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scripts.train_imagenet import OriginalTrain
from tests.cli.conftest import NUM_VAL, SETTINGS, Run
from tests.dist.spawn import run_distributed
from tests.engine.tiny import make_images
from zoo.cli import main, run_script
from zoo.config.parse import load_experiment
from zoo.weights import read_checkpoint


def _events(log_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]


def test_run_leaves_checkpoints_text_metrics_and_tensorboard(finished: Run) -> None:
    names = {path.name for path in finished.log_dir.iterdir() if not path.name.startswith("events.")}
    assert names >= {"checkpoint.pth.tar", "model_best.pth.tar", "training_0.log", "metrics.jsonl"}
    assert [event["event"] for event in _events(finished.log_dir)] == [
        *("start", "train", "train", "train", "validation", "train", "train", "train", "validation", "end"),
    ]
    end = _events(finished.log_dir)[-1]
    assert end["seconds"] > 0
    board = EventAccumulator(str(finished.log_dir))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in board.Scalars("val/top1")] == [3, 6]


def test_run_resumes_from_its_checkpoint(finished: Run, tmp_path: Path) -> None:
    log_dir = Path(shutil.copytree(finished.log_dir, tmp_path / "log"))
    (log_dir / "checkpoint.previous.pth.tar").rename(log_dir / "checkpoint.pth.tar")
    command = ["train", str(finished.config), str(finished.data), "--log-dir", str(log_dir), "-p", "1", "-j", "0"]
    assert main([*command, "--resume", "auto"]) == 0
    *again, end = _events(log_dir)[len(_events(finished.log_dir)) :]
    assert end["event"] == "end"
    assert [(event["event"], event["step"]) for event in again] == [
        *(("resume", 3), ("train", 4), ("train", 5), ("train", 6), ("validation", 6)),
    ]
    assert [event["top1"] for event in again[1:]] == [event["top1"] for event in _events(finished.log_dir)[-5:-1]]


def test_original_projects_script_scores_weights_of_run(finished: Run, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(finished.config), str(finished.data), "-e", "-j", "0"]
    assert run_script(OriginalTrain, [*words, "--resume", str(finished.checkpoint)]) == 0
    cells = [cell.strip() for cell in capsys.readouterr().out.splitlines()[2].split("|")]
    scored = _events(finished.log_dir)[-2]
    assert cells[1:4] == ["tiny", "center10-scale12", f"{scored['top1']:.2f}"]
    assert run_script(OriginalTrain, words) == 2
    assert "--evaluate scores the weights of --resume" in capsys.readouterr().err


def test_named_experiment_has_its_own_log_folder(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "work").mkdir()
    shutil.copy(finished.config, tmp_path / "experiments" / "tiny.json")
    monkeypatch.setattr("zoo.config.parse.experiments_dir", lambda: tmp_path / "experiments")
    monkeypatch.chdir(tmp_path / "work")
    assert main(["train", "tiny", str(finished.data), "-j", "0"]) == 0
    assert [path.name for path in Path().iterdir()] == ["runs"]
    assert [path.name for path in Path("runs").iterdir()] == ["tiny"]
    assert Path("runs/tiny/checkpoint.pth.tar").is_file()


def test_settings_of_run_are_experiment_file_beside_its_log(finished: Run) -> None:
    path = finished.log_dir / "experiment.json"
    assert load_experiment(path) == load_experiment(finished.config)
    assert json.loads(path.read_text())["optimizer"]["momentum"] == 0.9  # a default


def test_run_logs_summary_at_its_beginning_and_end(finished: Run) -> None:
    text = (finished.log_dir / "training_0.log").read_text()
    validations = [event for event in _events(finished.log_dir) if event["event"] == "validation"]
    best = max(validations, key=lambda event: event["top1"])
    for part in (
        "training resnet32_cifar: 463,634 parameters, inplace norms with leaky_relu, 2 classes",
        f"images      24 to train on, {NUM_VAL} to validate on; {finished.data}",
        "schedule    2 epochs of 3 steps, batch 8",
        "device      cpu, 1 process",
        f"log folder  {finished.log_dir}",
        f"best top-1 {best['top1']:.2f} % after epoch {best['epoch'] + 1}; {finished.log_dir}/model_best.pth.tar",
    ):
        assert part in text
    assert text.splitlines()[-1].partition(" - ")[2].startswith("best top-1")


def test_finished_run_is_extended_by_more_epochs(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_dir = Path(shutil.copytree(finished.log_dir, tmp_path / "log"))
    command = ["train", str(finished.config), str(finished.data), "--log-dir", str(log_dir), "-j", "0", "--resume"]
    assert main([*command, "auto", "--epochs", "3"]) == 0
    assert read_checkpoint(log_dir / "checkpoint.pth.tar")["position"]["epoch"] == 3
    assert load_experiment(log_dir / "experiment.json").optimizer.schedule.epochs == 3
    assert "prolonged from 2 to 3 epochs; " in (log_dir / "training_0.log").read_text()
    new = _events(log_dir)[len(_events(finished.log_dir)) :]
    assert [event["epoch"] for event in new if event["event"] == "validation"] == [2]
    assert main([*command, "auto"]) == 2
    assert "optimizer.schedule.epochs: 3 before and 2 now" in capsys.readouterr().err


def test_seed_comes_from_command(finished: Run, tmp_path: Path) -> None:
    command = ["train", str(finished.config), str(finished.data), "-j", "0", "--log-dir", str(tmp_path / "log")]
    assert main([*command, "--epochs", "1", "--seed", "3"]) == 0
    assert json.loads((tmp_path / "log" / "experiment.json").read_text())["seed"] == 3


@pytest.mark.dist
def test_replicas_log_same_digests_on_one_process_and_on_two(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", str(finished.config), str(finished.data), "--replicas", "4", "-j", "0", "--log-dir"]
    log_dirs = [tmp_path / "one", tmp_path / "two"]
    assert main([*command, str(log_dirs[0])]) == 0
    assert not torch.are_deterministic_algorithms_enabled()
    assert run_distributed(main, 2, [*command, str(log_dirs[1])], group=False) == [0, 0]
    digests = [[each["sha256"] for each in _events(folder) if each["event"] == "digest"] for folder in log_dirs]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 2
    assert f"epoch 2 digest: {digests[0][1]}" in (log_dirs[1] / "training_1.log").read_text()
    capsys.readouterr()
    assert main(["show", *(str(folder / "checkpoint.pth.tar") for folder in log_dirs)]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith(digests[0][1])
    assert main([*command, str(tmp_path / "three"), "--batch-size", "6"]) == 2
    assert "6: is not a multiple of 4, optimizer.replicas" in capsys.readouterr().err


def test_run_ends_with_commands_that_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_images(tmp_path / "my data", num_train=4, num_val=2)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.json").write_text(json.dumps(SETTINGS))
    assert main(["train", "x.json", str(data), "--log-dir", "run 1", "-j", "0"]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert list(lines) == ["score", "use", "curves", "TensorBoard"]
    for name in ("score", "curves"):
        assert main(shlex.split(lines[name])[1:]) == 0
    image = str(next((data / "val").rglob("*.png")))
    assert main([image if word == "IMAGE" else word for word in shlex.split(lines["use"])[1:]]) == 0
    assert shlex.split(lines["TensorBoard"]) == ["tensorboard", "--logdir", "run 1"]
