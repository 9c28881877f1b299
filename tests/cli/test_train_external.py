"""Networks of other packages are trained, resumed, scored and shown like networks of this package."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.engine.tiny import differences, make_images
from zoo.cli import main
from zoo.engine.checkpoint import read
from zoo.registry.load_network import load_network
from zoo.remat.lean import is_lean

NETWORK = {"arch": "torchvision:shufflenet_v2_x0_5", "classes": 2}  # a small one


def _settings(**network: Any) -> str:
    """Return an experiment on images of 48 px, whose maps are too large to be kept as small tensors."""
    optimizer = {"batch_size": 8, "learning_rate": 0.01, "ema_decay": 0.9, "schedule": {"epochs": 2}}
    images = {"crop_train": 48, "scale_val": 48, "crop_val": 48}
    return json.dumps({"network": {**NETWORK, **network}, "optimizer": optimizer, "input": images})


def _train(config: Path, data: Path, log_dir: Path, *options: str) -> int:
    return main(["train", str(config), str(data), "--log-dir", str(log_dir), "-j", "0", "-p", "1", *options])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Runs of two epochs of 3 steps: plain and lean."""
    root = tmp_path_factory.mktemp("elsewhere")
    data = make_images(root / "data", num_train=24, num_val=7)
    for memory in ("plain", "lean"):
        (root / f"{memory}.json").write_text(_settings(memory=memory))
        assert _train(root / f"{memory}.json", data, root / memory) == 0
    return {memory: Run(root / f"{memory}.json", data, root / memory) for memory in ("plain", "lean")}


def _curve(run: Run) -> list[tuple[Any, ...]]:
    events = map(json.loads, (run.log_dir / "metrics.jsonl").read_text().splitlines())
    return [(event["event"], event.get("step"), event.get("loss"), event.get("top1")) for event in events]


def test_lean_run_is_bit_identical_to_plain_run(runs: dict[str, Run]) -> None:
    assert [event for event, *_ in _curve(runs["lean"])].count("train") == 6
    assert _curve(runs["lean"]) == _curve(runs["plain"])
    assert [is_lean(load_network(run.checkpoint).model) for run in runs.values()] == [False, True]
    plain, lean = (read(run.checkpoint) for run in runs.values())
    for read_from in (plain, lean):
        assert read_from["config"]["network"].pop("memory") == read_from["network"].pop("memory")
    assert {key for key in plain if differences(plain[key], lean[key])} == {"config_digest"}


def test_checkpoint_is_scored_used_and_shown(
    runs: dict[str, Run], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = runs["lean"]
    checkpoint, last = str(run.checkpoint), _curve(run)[-2]
    assert main(["validate", checkpoint, str(run.data), "-j", "0", "--json", str(tmp_path / "scores.json")]) == 0
    assert json.loads((tmp_path / "scores.json").read_text())["top1"] == last[3]
    assert main(["validate", NETWORK["arch"], str(run.data), "--weights", checkpoint, "-j", "0"]) == 0
    capsys.readouterr()
    assert main(["predict", checkpoint, str(run.data / "val" / "class0" / "0.png")]) == 0
    assert "class1" in capsys.readouterr().out, "the checkpoint has the class names of the training data"
    assert main(["show", checkpoint]) == 0
    assert re.search("arch +torchvision:shufflenet", capsys.readouterr().out)
    assert main(["show", NETWORK["arch"]]) == 0
    assert "auto, plain, lean" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ({"arch": "torchvision:resnet19"}, "network.arch 'torchvision:resnet19': torchvision has no network called"),
        ({"arch": "torchvision:vit_b_16"}, "input.crop_train = 48: torchvision:vit_b_16 cannot be run on images of"),
        ({"options": {"blocks": 3}}, "': torchvision:shufflenet_v2_x0_5 cannot be built: "),
    ],
)
def test_untrainable_settings_fail_before_log_folder_exists(
    network: dict[str, Any], words: str, runs: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.json").write_text(_settings(**network))
    assert _train(tmp_path / "x.json", runs["plain"].data, tmp_path / "log") == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "log").exists()
