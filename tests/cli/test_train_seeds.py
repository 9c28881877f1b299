"""``zoo train --seeds`` trains what as many single runs would, and no run loses the scores of another."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch

from tests.cli.conftest import SETTINGS, Run
from zoo.cli import build_parser, main
from zoo.config import Experiment, load_experiment
from zoo.errors import EXIT_NOT_FINITE, NonFiniteLossError, TrainingInterrupted
from zoo.run.training import train_experiment
from zoo.weights import read_checkpoint

ONE_EPOCH = {**SETTINGS, "optimizer": {**SETTINGS["optimizer"], "schedule": {"epochs": 1}}}


def _last_top1(log_dir: Path) -> float:
    events = [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]
    return float([event["top1"] for event in events if event["event"] == "validation"][-1])


@pytest.fixture(scope="module")
def two_seeds(finished: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log folder without its endings; the runs of seeds 0, which is the default, and 2."""
    log_dir = tmp_path_factory.mktemp("seeds") / "log"
    command = ["train", str(finished.config), str(finished.data), "--log-dir", str(log_dir), "-j", "0", "-p", "1"]
    assert main([*command, "--seeds", "0", "2"]) == 0
    return log_dir


def _state_of(path: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = read_checkpoint(path / "checkpoint.pth.tar")["state_dict"]
    return state


def test_each_seed_has_the_run_that_it_would_have_alone(finished: Run, two_seeds: Path) -> None:
    folders = [two_seeds.with_name(f"log-seed{seed}") for seed in (0, 2)]
    assert sorted(two_seeds.parent.iterdir()) == sorted([*folders, two_seeds.with_name("log-seeds.json")])
    alone, first, second = (_state_of(folder) for folder in (finished.log_dir, *folders))
    assert all(torch.equal(alone[key], first[key]) for key in alone)
    assert not torch.equal(first["classifier.fc.weight"], second["classifier.fc.weight"])
    assert load_experiment(folders[1] / "experiment.json").seed == 2


def test_the_summary_is_that_of_the_last_validations(two_seeds: Path) -> None:
    content = json.loads(two_seeds.with_name("log-seeds.json").read_text())
    top1 = [_last_top1(two_seeds.with_name(f"log-seed{seed}")) for seed in (0, 2)]
    assert [(run["seed"], run["scores"]["top1"]) for run in content["runs"]] == list(zip((0, 2), top1, strict=True))
    summary = content["summary"]["top1"]
    assert (summary["runs"], summary["mean"]) == (2, mean(top1))
    assert summary["standard_error"] == pytest.approx(stdev(top1) / 2**0.5)
    assert content["environment"]["torch"] == torch.__version__
    build_parser().parse_args(shlex.split(content["command"])[1:])


def test_finished_seeds_are_only_read_and_others_are_added(
    finished: Run, two_seeds: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(two_seeds.parent)
    command = ["train", str(finished.config), str(finished.data), "--log-dir", "log", "-j", "0", "--resume", "auto"]
    assert main([*command, "--seeds", "0", "1", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("all 2 epochs are done") == 4  # said twice of each
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in captured.out.splitlines()]
    assert [row[0] for row in rows[2:]] == [
        *("seed 0", "seed 1", "seed 2", "mean", "standard deviation", "standard error")
    ]
    assert rows[4][1] == f"{_last_top1(Path('log-seed2')):.2f}"
    assert json.loads(Path("log-seeds.json").read_text())["summary"]["top1"]["runs"] == 3


def _train_with(
    error: Exception, of_seed: int, config: Experiment, data: Path, log_dir: Path, *arguments: Any
) -> object:
    if config.seed == of_seed:
        raise error
    return train_experiment(config, data, log_dir, *arguments)


@pytest.fixture
def short(finished: Run, tmp_path: Path) -> list[str]:
    (tmp_path / "short.json").write_text(json.dumps(ONE_EPOCH))
    return ["train", str(tmp_path / "short.json"), str(finished.data), "--log-dir", str(tmp_path / "log"), "-j", "0"]


def test_a_seed_whose_loss_is_not_finite_is_told_and_the_others_are_trained(
    short: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = partial(_train_with, NonFiniteLossError("the loss was not finite at step 3"), 1)
    monkeypatch.setattr("zoo.run.training.train_experiment", stand_in)
    assert main([*short, "--seeds", "1", "2"]) == EXIT_NOT_FINITE
    captured = capsys.readouterr()
    assert "seed 1 has failed: the loss was not finite at step 3" in captured.err
    assert "| seed 1, failed " in captured.out
    content = json.loads((tmp_path / "log-seeds.json").read_text())
    assert [run["fault"] for run in content["runs"]] == ["the loss was not finite at step 3", None]
    assert content["summary"]["top1"]["runs"] == 1


def test_a_signal_ends_the_command_and_keeps_the_summary_of_the_seeds_that_finished(
    short: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.run.training.train_experiment", partial(_train_with, TrainingInterrupted("SIGTERM"), 2))
    assert main([*short, "--seeds", "1", "2", "3"]) == TrainingInterrupted.exit_code
    content = json.loads((tmp_path / "log-seeds.json").read_text())
    assert [run["seed"] for run in content["runs"]] == [1]
    assert not (tmp_path / "log-seed3").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seeds", "1", "2", "--evaluate"], "--seeds trains several runs"),
        (["--seeds", "1", "2", "--resume", "runs/a/checkpoint.pth.tar"], "--resume auto"),
        (["--seeds", "1", "2", "1"], "a seed is repeated (1, 2, 1)"),
        (["--seeds", "1", str(2**32)], "4294967296"),
    ],
)
def test_what_cannot_be_done_with_seeds_is_refused_before_anything_is_trained(
    options: list[str], message: str, short: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*short, *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "log-seed1").exists()
