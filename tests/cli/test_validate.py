"""``zoo validate`` and scripts/test_imagenet.py score weights by name, file and protocol."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.test_imagenet import ScoreImageNet
from tests.cli.conftest import NUM_VAL, SETTINGS, Run
from zoo.cli import main, run_script
from zoo.weights import digests_of, read_checkpoint

SCRIPTS = Path(__file__).parents[2] / "scripts"


def _result(command: list[str], folder: Path, run: Callable[[list[str]], int] = main) -> dict[str, Any]:
    assert run([*command, "--json", str(folder / "result.json")]) == 0
    content: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return content


def test_json_file_holds_scores_protocol_weights_and_machine(finished: Run, tmp_path: Path) -> None:
    command = [str(finished.config), str(finished.checkpoint), str(finished.data), "-j", "0", "-c", "10", "-s", "12"]
    result = _result(command, tmp_path, partial(run_script, ScoreImageNet))
    lines = (finished.log_dir / "metrics.jsonl").read_text().splitlines()
    last = next(record for record in map(json.loads, reversed(lines)) if record["event"] == "validation")
    assert {key: result[key] for key in ("top1", "top5", "loss", "count")} == {
        "top1": last["top1"],
        "top5": last["top5"],
        "loss": pytest.approx(last["loss"], rel=1e-5),
        "count": NUM_VAL,
    }
    assert result["protocol"] == "center10-scale12"
    assert {kind: result[f"weights_{kind}"] for kind in ("md5", "sha256")} == digests_of(finished.checkpoint)
    assert result["environment"]["torch"] == torch.__version__
    share = result["top1"] / 100
    assert result["standard_errors"]["top1"] == pytest.approx(100 * (share * (1 - share) / NUM_VAL) ** 0.5)


def test_checkpoint_describes_its_network(finished: Run, tmp_path: Path) -> None:
    by_config = ["validate", str(finished.config), str(finished.data), "--weights", str(finished.checkpoint)]
    by_checkpoint = ["validate", str(finished.checkpoint), str(finished.data)]
    assert _result([*by_config, "-j", "0"], tmp_path) == _result([*by_checkpoint, "-j", "0"], tmp_path)


def test_json_file_counts_all_images_and_scored_images_separately(finished: Run, tmp_path: Path) -> None:
    command = ["validate", str(finished.checkpoint), "-j", "0"]
    whole, limited = (_result([*command, str(finished.data), *limit], tmp_path) for limit in ([], ["--limit", "3"]))
    assert (limited["count"], limited["val"]["images"], limited["val"]["classes"]) == (3, NUM_VAL, 2)
    assert limited["val"] == whole["val"]


def test_crop_scale_and_ten_crops_make_protocol_of_their_own(finished: Run, tmp_path: Path) -> None:
    command = ["validate", str(finished.checkpoint), str(finished.data), "-j", "0", "--limit", "3"]
    result = _result([*command, "--crop", "8", "--scale", "-1", "--ten_crops", "--batch-size", "2"], tmp_path)
    assert (result["protocol"], result["count"]) == ("tencrop8-scaleoriginal", 3)


def test_architecture_without_published_weights_needs_file(finished: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "resnet18", str(finished.data)]) == 2
    assert "resnet18 has no published weights" in capsys.readouterr().err
    assert main(["validate", str(finished.config), str(finished.data)]) == 2
    assert "no published weights of tiny" in capsys.readouterr().err


def test_weights_with_other_classifier_get_no_score(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "three.json"
    config.write_text(json.dumps({**SETTINGS, "network": {**SETTINGS["network"], "classes": 3}}))
    assert run_script(ScoreImageNet, [str(config), str(finished.checkpoint), str(finished.data)]) == 2
    assert "the classifier of the file does not fit the network" in capsys.readouterr().err


def test_moving_average_is_scored(finished: Run, tmp_path: Path) -> None:
    content = read_checkpoint(finished.checkpoint)
    averaged = {key: tensor.clone() for key, tensor in content["state_dict"].items()}
    averaged["classifier.fc.weight"].zero_()
    averaged["classifier.fc.bias"].copy_(torch.tensor([0.0, 1000.0]))
    torch.save({**content, "ema": averaged}, tmp_path / "checkpoint.pth.tar")
    result = _result(["validate", str(tmp_path / "checkpoint.pth.tar"), str(finished.data), "-j", "0"], tmp_path)
    assert result["top1"] == pytest.approx(100 * 3 / 7)  # 3 of 7 images are of the second class


def test_file_without_settings_asks_for_name_of_its_network(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(read_checkpoint(finished.checkpoint)["state_dict"], tmp_path / "bare.pth")
    assert main(["validate", str(tmp_path / "bare.pth"), str(finished.data)]) == 2
    assert "does not describe its network" in capsys.readouterr().err


def test_predictions_agree_with_scores_image_by_image(finished: Run, tmp_path: Path) -> None:
    file = tmp_path / "predictions.csv"
    command = ["validate", str(finished.checkpoint), str(finished.data), "-j", "0", "--predictions", str(file)]
    result = _result([*command, "--batch-size", "3"], tmp_path)
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    names = sorted(path.relative_to(finished.data).as_posix() for path in finished.data.glob("val/*/*.png"))
    assert [row["path"] for row in rows] == names
    assert [row["target"] for row in rows] == [name.split("/")[1].removeprefix("class") for name in names]
    hits = sum(row["class1"] == row["target"] for row in rows)
    assert result["top1"] == pytest.approx(100 * hits / NUM_VAL)
    assert all(float(row["probability1"]) >= float(row["probability2"]) for row in rows)


def test_contradictory_weights_get_no_score(finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "resnet164.json"
    config.write_text(json.dumps({**SETTINGS, "network": {**SETTINGS["network"], "arch": "resnet164_cifar"}}))
    assert run_script(ScoreImageNet, [str(config), str(finished.checkpoint), str(finished.data)]) == 2
    assert "but arch='resnet164_cifar' is asked for by the experiment" in capsys.readouterr().err


def test_mismatched_file_logs_no_assumptions(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    torch.save({"layer1.0.conv1.weight": torch.ones(64, 64, 3, 3)}, tmp_path / "tv.pth")
    assert main(["validate", "resnet18", str(finished.data), "--weights", str(tmp_path / "tv.pth")]) == 2
    assert "the keys of a torchvision ResNet" in capsys.readouterr().err
    assert "assuming" not in caplog.text


@pytest.mark.dist
def test_launched_processes_score_every_image_once(finished: Run, tmp_path: Path) -> None:
    command = ["validate", str(finished.checkpoint), str(finished.data), "-j", "0"]
    alone = _result([*command, "--predictions", str(tmp_path / "alone.csv")], tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.launch", "--standalone", "--nproc_per_node", "2"]
    script = [str(SCRIPTS / "test_imagenet.py"), str(finished.config), str(finished.checkpoint), str(finished.data)]
    options = ["-j", "0", "-c", "10", "-s", "12", "--batch-size", "2", "--json", str(tmp_path / "launched.json")]
    files = tmp_path / "alone.csv", tmp_path / "launched.csv"
    options += ["--predictions", str(files[1])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS.parent)}
    done = subprocess.run(
        [*launcher, *script, *options], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    launched = json.loads((tmp_path / "launched.json").read_text())
    assert {key: launched[key] for key in ("top1", "top5", "count")} == {
        key: alone[key] for key in ("top1", "top5", "count")
    }
    assert launched["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert done.stdout.count("| center10-scale12") == 1
    classes = [[line.rsplit(",", 2)[0] for line in file.read_text().splitlines()] for file in files]
    assert classes[0] == classes[1]
