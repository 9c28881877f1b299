"""``zoo train`` trains segmentation networks, and their checkpoints can be scored and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.data.sample_labels import label_map, make_labeled
from zoo.cli import main
from zoo.weights import read_checkpoint

SCORES = ("miou", "pixel_accuracy", "mean_class_accuracy", "frequency_weighted_iou")


def _settings(path: Path, batch_size: int = 4) -> Path:
    content = {
        "network": {"arch": "deeplab_resnet18", "activation": "leaky_relu", "bn_mode": "inplace", "classes": 3},
        "optimizer": {
            "batch_size": batch_size,
            "learning_rate": 0.01,
            "schedule": {"type": "polynomial", "mode": "step", "epochs": 1},
        },
        "input": {"crop_train": 16},
    }
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of one epoch of two steps, its settings and its images."""
    root = tmp_path_factory.mktemp("segmentation")
    make_labeled(root / "data", num_train=8, num_val=5)
    config = _settings(root / "tiny.json")
    assert main(["train", str(config), str(root / "data"), "--log-dir", str(root / "log"), "-j", "0", "-p", "1"]) == 0
    return root


def test_run_logs_its_scores_everywhere(trained: Path) -> None:
    events = [json.loads(line) for line in (trained / "log" / "metrics.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", "train", "train", "validation", "end"]
    train, validation = events[2], events[3]
    assert {f"{prefix}{name}" for prefix in ("", "epoch_") for name in SCORES} <= train.keys()
    assert len(validation["iou"]) == 3
    assert "confusion" not in validation
    text = (trained / "log" / "training_0.log").read_text()
    assert (
        f"epoch 1 validation: mIoU {validation['miou']:.2f}, pixel accuracy {validation['pixel_accuracy']:.2f}" in text
    )
    assert f"best mIoU {validation['miou']:.2f} % after epoch 1" in text
    board = EventAccumulator(str(trained / "log"), size_guidance={"images": 0})
    board.Reload()
    assert [event.step for event in board.Scalars("val/miou")] == [2]
    assert board.Scalars("train/miou")


def test_checkpoint_has_score_of_its_validation(trained: Path, tmp_path: Path) -> None:
    checkpoint = trained / "log" / "checkpoint.pth.tar"
    file = tmp_path / "whole.json"
    command = ["validate", str(checkpoint), str(trained / "data"), "-j", "0", "--protocol", "whole"]
    assert main([*command, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert (result["protocol"], result["miou"]) == ("whole", read_checkpoint(checkpoint)["best_prec1"])
    assert np.array(result["confusion"]).shape == (3, 3)
    assert result["count"] == 5


@pytest.mark.parametrize("uniform", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_first_epoch_names_classes_without_pixel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uniform: bool
) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    data = make_labeled(tmp_path / "data", num_train=4, num_val=2)
    for path in data.rglob("labels/**/*.png"):
        label_map([[0, 255] * 6] * 10).save(path)
    config = _settings(tmp_path / "tiny.json")
    content = json.loads(config.read_text())
    content["network"]["classes"] = 2
    content["optimizer"]["schedule"]["epochs"] = 2
    config.write_text(json.dumps({**content, "segmentation": {"class_uniform": uniform}}))
    assert main(["train", str(config), str(data), "--log-dir", str(tmp_path / "log"), "-j", "0"]) == 0
    text = (tmp_path / "log" / "training_0.log").read_text()
    what = "1 of 2 classes have no pixel: 1; 255 is void: write 1 in place of 255 in masks of 0 and 255"
    assert text.count(f"{what}; the training crops of epoch 1\n") == 1
    assert text.count(f"{what}; the validation data\n") == 1
