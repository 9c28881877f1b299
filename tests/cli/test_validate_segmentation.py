"""``zoo validate`` and ``zoo.score`` of a network that segments: one confusion matrix of whole images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

import zoo
from tests.data.sample_labels import IGNORE, make_labeled
from zoo.cli import main

NUM_CLASSES, NUM_VAL = 4, 5
SETTINGS = {
    "network": {"arch": "deeplab_resnet18", "activation": "leaky_relu", "bn_mode": "inplace", "classes": NUM_CLASSES},
    "input": {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.25]},
    "expected": {"source": "a paper", "scores": {"whole": {"miou": 43.21}}},
}


class Files(NamedTuple):
    """An experiment, weights for it, images with label maps, and the counts of labels and predictions by plain code."""

    config: Path
    weights: Path
    data: Path
    counts: np.ndarray

    def run(self, *words: object) -> int:
        """Return the exit code of ``zoo validate`` with further arguments."""
        return main(["validate", *map(str, (self.config, self.data, "--weights", self.weights, "-j", 0, *words))])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    root = tmp_path_factory.mktemp("segmentation")
    (config := root / "tiny.json").write_text(json.dumps(SETTINGS))
    data = make_labeled(root / "data", num_train=1, num_val=NUM_VAL, num_classes=NUM_CLASSES)
    (data / "classes.txt").write_text("sky\nsea\nland\nship\n")
    torch.manual_seed(0)
    model = zoo.get("deeplab_resnet18", norm="inplace", num_classes=NUM_CLASSES).eval()
    torch.save(model.state_dict(), root / "weights.pth")
    return Files(config, root / "weights.pth", data, counted(model, data / "val"))


def counted(model: torch.nn.Module, folder: Path) -> np.ndarray:
    """Count pixels by label and prediction with plain code; only the network is zoo's."""
    counts = np.zeros((NUM_CLASSES, NUM_CLASSES), dtype=np.int64)
    for path in sorted((folder / "images").rglob("*.png")):
        pixels = torch.from_numpy(np.array(Image.open(path).convert("RGB"))).double() / 255
        image = (pixels - torch.tensor(SETTINGS["input"]["mean"])) / torch.tensor(SETTINGS["input"]["std"])
        with torch.no_grad():
            logits = model.forward_logits(image.float().permute(2, 0, 1)[None])
        logits = F.interpolate(logits, pixels.shape[:2], mode="bilinear", align_corners=False)
        labels = np.array(Image.open(folder / "labels" / path.relative_to(folder / "images")))
        for label, prediction in zip(labels.flat, logits.argmax(1).flatten().tolist(), strict=True):
            if label != IGNORE:
                counts[label, prediction] += 1
    return counts


def test_scores_equal_count_of_each_pixel(files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert files.run("--json", tmp_path / "result.json") == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["confusion"] == files.counts.tolist()
    hits, rows, columns = files.counts.diagonal(), files.counts.sum(1), files.counts.sum(0)
    iou = 100 * hits / (rows + columns - hits)
    assert result["iou"] == pytest.approx(iou)
    assert result["miou"] == pytest.approx(iou.mean())
    assert result["pixel_accuracy"] == pytest.approx(100 * hits.sum() / rows.sum())
    assert result["mean_class_accuracy"] == pytest.approx(100 * (hits / rows).mean())
    assert result["frequency_weighted_iou"] == pytest.approx((iou * rows).sum() / rows.sum())
    assert (result["protocol"], result["count"], result["classes"]) == ("whole", NUM_VAL, ["0", "1", "2", "3"])
    assert {"loss", "weights_md5", "environment"} <= result.keys()
    printed, logged = capsys.readouterr()
    assert "the classes of the label maps in sorted order (sky, sea, land and 1 more)" in logged
    assert f" {iou.mean():.2f} |" in printed
    assert "expected: a paper" in printed
    assert "43.21" in printed
    assert f"| 3     | {iou[3]:5.2f} |" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--crop", "8"], "which are scored whole and one at a time; leave out --crop"),
        (["--scale", "-1", "--ten-crops"], "leave out --scale, --ten-crops"),
        (["--batch-size", "2"], "leave out --batch-size"),
        (["--predictions", "lines.csv"], "leave out --predictions"),
        (["--protocol", "center224"], "'center224' is not a published protocol; those are whole, whole-flip"),
    ],
)
def test_invalid_options_fail(files: Files, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert files.run(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_body_weights_without_classifier_get_no_score(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(zoo.get("resnet18", norm="inplace", num_classes=2).state_dict(), tmp_path / "body.pth")
    assert files.run("--weights", tmp_path / "body.pth") == 2
    assert "weights for the body only, and head and cls would be random; " in capsys.readouterr().err


def test_confusion_matrix_of_pixels_is_written(files: Files, tmp_path: Path) -> None:
    assert files.run("--confusion", tmp_path / "x.json", tmp_path / "x.csv") == 0
    content = json.loads((tmp_path / "x.json").read_text())
    assert content["matrix"] == files.counts.tolist()
    assert [(row["name"], row["pixels"]) for row in content["classes"]] == list(
        zip(["0", "1", "2", "3"], files.counts.sum(1).tolist(), strict=True)
    )
    assert (tmp_path / "x.csv").read_text().startswith("name,pixels,recall,precision,f1,predicted 0,")
