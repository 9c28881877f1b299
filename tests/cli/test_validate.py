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

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

import zoo
from scripts.test_imagenet import ScoreImageNet
from tests.cli.conftest import NUM_VAL, Cli, Run, events
from tests.data.sample_labels import IGNORE, make_labeled
from zoo.cli import run_script
from zoo.weights import digests_of, read_checkpoint

SCRIPTS = Path(__file__).parents[2] / "scripts"
Score = Callable[..., dict[str, Any]]


@pytest.fixture
def score(cli: Cli, tmp_path: Path) -> Score:
    """Return the function that runs ``zoo validate``, or a script, and returns the content of its JSON file."""

    def run(*words: object, **options: Any) -> dict[str, Any]:
        command = words if options else ("validate", *words)
        cli(*command, "-j", 0, "--json", tmp_path / "result.json", **options)
        content: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
        return content

    return run


def test_json_file_holds_scores_protocol_weights_and_machine(finished: Run, score: Score) -> None:
    words = [finished.config, finished.checkpoint, finished.data, "-c", 10, "-s", 12]
    result = score(*words, run=partial(run_script, ScoreImageNet))
    last = next(event for event in reversed(events(finished.log_dir)) if event["event"] == "validation")
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


def test_checkpoint_describes_its_network(finished: Run, score: Score) -> None:
    by_config = score(finished.config, finished.data, "--weights", finished.checkpoint)
    assert score(finished.checkpoint, finished.data) == by_config


def test_options_set_crops_and_number_of_images(finished: Run, score: Score) -> None:
    limited = score(finished.checkpoint, finished.data, "--limit", 3)
    assert limited["count"] == 3
    assert limited["val"] == score(finished.checkpoint, finished.data)["val"]
    assert (limited["val"]["images"], limited["val"]["classes"]) == (NUM_VAL, 2)
    options = ["--crop", 8, "--scale", -1, "--ten_crops", "--batch-size", 2, "--limit", 3]
    result = score(finished.checkpoint, finished.data, *options)
    assert (result["protocol"], result["count"]) == ("tencrop8-scaleoriginal", 3)
    options = ["--interpolation", "bicubic", "--crop-mode", "squash"]
    assert score(finished.checkpoint, finished.data, *options)["protocol"] == "center10-scale12-bicubic-squash"


def test_moving_average_is_scored(finished: Run, score: Score, tmp_path: Path) -> None:
    content = read_checkpoint(finished.checkpoint)
    averaged = {key: tensor.clone() for key, tensor in content["state_dict"].items()}
    averaged["classifier.fc.weight"].zero_()
    averaged["classifier.fc.bias"].copy_(torch.tensor([0.0, 1000.0]))
    torch.save({**content, "ema": averaged}, tmp_path / "checkpoint.pth.tar")
    result = score(tmp_path / "checkpoint.pth.tar", finished.data)
    assert result["top1"] == pytest.approx(100 * 3 / 7)  # 3 of 7 images are of the second class


def test_predictions_agree_with_scores_image_by_image(finished: Run, score: Score, tmp_path: Path) -> None:
    file = tmp_path / "predictions.csv"
    result = score(finished.checkpoint, finished.data, "--predictions", file, "--batch-size", 3)
    rows = list(csv.DictReader(file.read_text().splitlines()))
    names = sorted(path.relative_to(finished.data).as_posix() for path in finished.data.glob("val/*/*.png"))
    assert [row["path"] for row in rows] == names
    assert [row["target"] for row in rows] == [name.split("/")[1].removeprefix("class") for name in names]
    hits = sum(row["class1"] == row["target"] for row in rows)
    assert result["top1"] == pytest.approx(100 * hits / NUM_VAL)
    assert all(float(row["probability1"]) >= float(row["probability2"]) for row in rows)


@pytest.mark.dist
def test_launched_processes_score_every_image_once(finished: Run, score: Score, tmp_path: Path) -> None:
    alone = score(finished.checkpoint, finished.data, "--predictions", tmp_path / "alone.csv")
    launcher = [sys.executable, "-m", "torch.distributed.launch", "--standalone", "--nproc_per_node", "2"]
    script = [SCRIPTS / "test_imagenet.py", finished.config, finished.checkpoint, finished.data]
    options = ["-j", 0, "-c", 10, "-s", 12, "--batch-size", 2, "--json", tmp_path / "launched.json"]
    words = [*launcher, *script, *options, "--predictions", tmp_path / "launched.csv"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS.parent)}
    done = subprocess.run([*map(str, words)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    launched = json.loads((tmp_path / "launched.json").read_text())
    assert [launched[key] for key in ("top1", "top5", "count")] == [alone[key] for key in ("top1", "top5", "count")]
    assert launched["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert done.stdout.count("| center10-scale12") == 1
    files = tmp_path / "alone.csv", tmp_path / "launched.csv"
    classes = [[line.rsplit(",", 2)[0] for line in file.read_text().splitlines()] for file in files]
    assert classes[0] == classes[1]


CLASSES = ["0", "1", "2", "3"]
SCENES = {
    "network": {"arch": "deeplab_resnet18", "activation": "leaky_relu", "norm": "inplace", "classes": len(CLASSES)},
    "input": {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.25]},
    "expected": {"source": "a paper", "scores": {"whole": {"miou": 43.21}}},
}


def counted(model: torch.nn.Module, folder: Path) -> np.ndarray:
    """Count pixels by label and prediction with plain code; only the network is zoo's."""
    counts = np.zeros((len(CLASSES), len(CLASSES)), dtype=np.int64)
    for path in sorted((folder / "images").rglob("*.png")):
        pixels = torch.from_numpy(np.array(Image.open(path).convert("RGB"))).double() / 255
        image = (pixels - torch.tensor(SCENES["input"]["mean"])) / torch.tensor(SCENES["input"]["std"])
        with torch.no_grad():
            logits = model.forward_logits(image.float().permute(2, 0, 1)[None])
        logits = F.interpolate(logits, pixels.shape[:2], mode="bilinear", align_corners=False)
        labels = np.array(Image.open(folder / "labels" / path.relative_to(folder / "images")))
        for label, prediction in zip(labels.flat, logits.argmax(1).flatten().tolist(), strict=True):
            if label != IGNORE:
                counts[label, prediction] += 1
    return counts


@pytest.mark.usefixtures("small_networks")
def test_scores_of_segmentation_equal_count_of_each_pixel(cli: Cli, tmp_path: Path) -> None:
    (config := tmp_path / "tiny.json").write_text(json.dumps(SCENES))
    data = make_labeled(tmp_path / "data", num_train=1, num_val=5, num_classes=len(CLASSES))
    (data / "classes.txt").write_text("sky\nsea\nland\nship\n")
    torch.manual_seed(0)
    model = zoo.get("deeplab_resnet18", norm="inplace", num_classes=len(CLASSES)).eval()
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    counts = counted(model, data / "val")
    file, matrix, table = (tmp_path / name for name in ("result.json", "x.json", "x.csv"))
    command = ["validate", config, data, "--weights", tmp_path / "weights.pth", "-j", 0]
    printed = cli(*command, "--json", file, "--confusion", matrix, table)
    result = json.loads(file.read_text())
    hits, rows, columns = counts.diagonal(), counts.sum(1), counts.sum(0)
    iou = 100 * hits / (rows + columns - hits)
    assert result["confusion"] == counts.tolist()
    assert result["iou"] == pytest.approx(iou)
    assert result["miou"] == pytest.approx(iou.mean())
    assert result["pixel_accuracy"] == pytest.approx(100 * hits.sum() / rows.sum())
    assert result["mean_class_accuracy"] == pytest.approx(100 * (hits / rows).mean())
    assert result["frequency_weighted_iou"] == pytest.approx((iou * rows).sum() / rows.sum())
    assert (result["protocol"], result["count"], result["classes"]) == ("whole", 5, CLASSES)
    assert {"loss", "weights_md5", "environment"} <= result.keys()
    assert "the classes of the label maps in sorted order (sky, sea, land and 1 more)" in printed.err
    for text in (f" {iou.mean():.2f} |", "expected: a paper", "43.21", f"| 3     | {iou[3]:5.2f} |"):
        assert text in printed.out
    content = json.loads(matrix.read_text())
    assert content["matrix"] == counts.tolist()
    assert [(row["name"], row["pixels"]) for row in content["classes"]] == [*zip(CLASSES, rows.tolist(), strict=True)]
    assert table.read_text().startswith("name,pixels,recall,precision,f1,predicted 0,")
