"""Confusion matrices are counted image by image, on any number of processes, and written in the form of the suffix."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import zoo
from tests.cli.conftest import Run
from tests.dist.spawn import run_distributed
from tests.refusals import refused
from zoo.cli import main
from zoo.engine.process import open_process
from zoo.run.confusion_files import write_matrix
from zoo.tasks.classification import ClassificationResult
from zoo.tasks.confusion import MAX_CLASSES


def _expected(run: Run, folder: Path) -> list[list[int]]:
    """Count the predictions of the command, image by image."""
    file = folder / "predictions.csv"
    assert main(["validate", str(run.checkpoint), str(run.data), "-j", "0", "--predictions", str(file)]) == 0
    counts = [[0, 0], [0, 0]]
    for row in csv.DictReader(file.read_text().splitlines()):
        counts[int(row["target"])][int(row["class1"])] += 1
    return counts


def test_score_counts_images_by_label_and_prediction(finished: Run, tmp_path: Path) -> None:
    expected = _expected(finished, tmp_path)
    result = zoo.score(finished.checkpoint, finished.data, verbose=False)
    assert isinstance(result, ClassificationResult)
    assert result.confusion == expected
    assert sum(map(sum, expected)) == result.count == 7
    assert result.top1 == pytest.approx(100 * (expected[0][0] + expected[1][1]) / 7)
    assert "confusion" not in result.record()
    assert "confusion" not in result.to_json(None, {})


def _score(checkpoint: Path, data: Path) -> Any:
    with open_process() as process:
        result: Any = zoo.score(checkpoint, data, process=process, batch_size=2, verbose=False)
        return result.confusion


@pytest.mark.dist
def test_two_processes_count_all_images(finished: Run, tmp_path: Path) -> None:
    expected = _expected(finished, tmp_path)
    assert run_distributed(_score, 2, finished.checkpoint, finished.data, group=False) == [expected, expected]


def test_command_writes_all_forms(finished: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    counts = _expected(finished, tmp_path)
    files = [tmp_path / f"confusion{suffix}" for suffix in (".json", ".csv", ".png")]
    command = ["validate", str(finished.checkpoint), str(finished.data), "-j", "0", "--confusion", *map(str, files)]
    assert main(command) == 0
    content = json.loads(files[0].read_text())
    assert content["matrix"] == counts
    assert (content["unit"], content["protocol"]) == ("images", "center10-scale12")
    for index, row in enumerate(content["classes"]):
        hits, labeled, predicted = counts[index][index], sum(counts[index]), counts[0][index] + counts[1][index]
        assert (row["name"], row["images"]) == (f"class{index}", labeled)
        assert row["recall"] == pytest.approx(100 * hits / labeled)
        assert row["precision"] == (pytest.approx(100 * hits / predicted) if predicted else None)
        assert row["f1"] == pytest.approx(200 * hits / (labeled + predicted))
    rows = list(csv.DictReader(files[1].read_text().splitlines()))
    assert [[int(row[f"predicted class{index}"]) for index in range(2)] for row in rows] == counts
    assert [float(row["recall"]) for row in rows] == pytest.approx(
        [row["recall"] for row in content["classes"]], abs=1e-4
    )
    with Image.open(files[2]) as picture:
        assert picture.format == "PNG"


@pytest.mark.parametrize("num_classes", [3, 30, 200])
def test_pictures_of_few_and_many_classes_are_written(num_classes: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    counts = [[int(row == column) for column in range(num_classes)] for row in range(num_classes)]
    result = ClassificationResult(100.0, 100.0, 0.1, num_classes, "center224", confusion=counts)
    write_matrix(tmp_path / "x.pdf", result, [f"class {n}" for n in range(num_classes)], "net")
    assert (tmp_path / "x.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--confusion", "x.xyz"], "x.xyz: '.xyz' is not the suffix"),
        (["--confusion", "x.png", "x.png"], "two options name this file"),
        (["--confusion", "x.png", "--set", "imagenet-a"], "--set imagenet-a"),
    ],
)
def test_wrong_options_raise(
    options: list[str], error: str, finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["validate", str(finished.checkpoint), str(finished.data), "-j", "0", *options]) == 2
    assert error in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_result_without_matrix_raises(tmp_path: Path) -> None:
    result = ClassificationResult(100.0, 100.0, 0.1, 3, "center224")
    refused(zoo.ConfigError, lambda: write_matrix(tmp_path / "x.json", result, ["a"], "net"), "net: ")
    assert MAX_CLASSES == 2000
