"""Confusion matrices are counted image by image, on any number of processes, and written in the form of the suffix."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import zoo
from tests.cli.conftest import Cli, Run
from tests.dist.spawn import run_distributed
from tests.refusals import refused
from zoo.engine._process import open_process
from zoo.run.confusion_files import write_matrix
from zoo.run.results_table import class_table
from zoo.tasks.classification import ClassificationResult
from zoo.tasks.confusion import MAX_CLASSES
from zoo.tasks.segmentation import SegmentationResult


def test_matrix_counts_predictions_and_is_written_in_all_forms(finished: Run, cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    predictions, *files = (tmp_path / name for name in ("p.csv", "x.json", "x.csv", "x.png"))
    options = ["--predictions", predictions, "--confusion", *files]
    cli("validate", finished.checkpoint, finished.data, "-j", 0, *options)
    counts = [[0, 0], [0, 0]]
    for line in csv.DictReader(predictions.read_text().splitlines()):
        counts[int(line["target"])][int(line["class1"])] += 1
    content = json.loads(files[0].read_text())
    assert content["matrix"] == counts
    assert (content["unit"], content["protocol"]) == ("images", "center10-scale12")
    for index, row in enumerate(content["classes"]):
        hits, labeled, predicted = counts[index][index], sum(counts[index]), counts[0][index] + counts[1][index]
        assert (row["name"], row["images"]) == (f"class{index}", labeled)
        assert row["recall"] == pytest.approx(100 * hits / labeled)
        assert row["precision"] == (pytest.approx(100 * hits / predicted) if predicted else None)
        assert row["f1"] == pytest.approx(200 * hits / (labeled + predicted))
    lines = list(csv.DictReader(files[1].read_text().splitlines()))
    assert [[int(line[f"predicted class{index}"]) for index in range(2)] for line in lines] == counts
    assert [float(line["recall"]) for line in lines] == pytest.approx(
        [row["recall"] for row in content["classes"]], abs=1e-4
    )
    with Image.open(files[2]) as picture:
        assert picture.format == "PNG"

    result = zoo.score(finished.checkpoint, finished.data, verbose=False)
    assert isinstance(result, ClassificationResult)
    assert result.confusion == counts
    assert sum(map(sum, counts)) == result.count == 7
    assert result.top1 == pytest.approx(100 * (counts[0][0] + counts[1][1]) / 7)
    assert "confusion" not in result.record()
    assert "confusion" not in result.to_json(None, {})


def _score(checkpoint: Path, data: Path) -> Any:
    with open_process() as process:
        result: Any = zoo.score(checkpoint, data, process=process, batch_size=2, verbose=False)
        return result.confusion


@pytest.mark.dist
def test_processes_count_together(finished: Run) -> None:
    alone = _score(finished.checkpoint, finished.data)
    assert run_distributed(_score, 2, finished.checkpoint, finished.data, group=False) == [alone] * 2


@pytest.mark.parametrize("num_classes", [3, 30, 200])
def test_pictures_of_few_and_many_classes_are_written(num_classes: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    counts = [[int(row == column) for column in range(num_classes)] for row in range(num_classes)]
    result = ClassificationResult(100.0, 100.0, 0.1, num_classes, "center224", confusion=counts)
    write_matrix(tmp_path / "x.pdf", result, [f"class {n}" for n in range(num_classes)], "net")
    assert (tmp_path / "x.pdf").read_bytes().startswith(b"%PDF")


def test_result_without_matrix_raises(tmp_path: Path) -> None:
    result = ClassificationResult(100.0, 100.0, 0.1, 3, "center224")
    refused(zoo.ConfigError, lambda: write_matrix(tmp_path / "x.json", result, ["a"], "net"), "net: ")
    assert MAX_CLASSES == 2000


def test_class_without_pixels_has_empty_cells() -> None:
    scores = dict.fromkeys(("miou", "pixel_accuracy", "mean_class_accuracy", "frequency_weighted_iou", "loss"), 0.0)
    confusion = [[6, 2, 0], [0, 2, 0], [0, 0, 0]]
    result = SegmentationResult(**scores, iou=[75.0, 50.0, None], count=1, protocol="whole", confusion=confusion)
    lines = class_table(result, ["a", "b", "c"]).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert rows[2:] == [["a", "75.00", "75.00", "80.00"], ["b", "50.00", "100.00", "20.00"], ["c", "", "", "0.00"]]
