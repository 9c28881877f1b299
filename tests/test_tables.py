"""Tables are aligned Markdown, and expected scores follow measured scores of the same protocol."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zoo.config.experiment import Expected, Experiment
from zoo.run.results_table import results_table
from zoo.tables import bytes_text, counted, markdown_table
from zoo.tasks.classification import LABELS, ClassificationResult, ClassificationTask


def test_columns_are_padded_and_numbers_stand_right() -> None:
    table = markdown_table(["model", "top-1"], [["resnet18", 9.5], ["wider_resnet38", 79.716], ["x", None]])
    assert table.splitlines() == [
        "| model          | top-1 |",
        "| -------------- | ----: |",
        "| resnet18       |  9.50 |",
        "| wider_resnet38 | 79.72 |",
        "| x              |       |",
    ]


def _result(protocol: str) -> ClassificationResult:
    return ClassificationResult(top1=77.5, top5=93.25, loss=0.9, count=50_000, protocol=protocol)


def test_expected_score_follows_measured_one_of_its_protocol() -> None:
    expected = Expected.model_validate({"source": "README", "scores": {"tencrop32": {"top1": 78.0, "top5": 94.0}}})
    lines = results_table("net", LABELS, [_result("center224"), _result("tencrop32-scale36")], expected).splitlines()
    assert [cell.strip() for cell in lines[3].split("|")[1:3]] == ["net", "tencrop32-scale36"]
    assert [cell.strip() for cell in lines[4].split("|")[1:-1]] == [
        *("expected: README", "tencrop32-scale36", "78.00", "94.00", "", "", "", ""),
    ]
    assert len(lines) == 5


def test_result_shows_all_numbers_and_standard_errors() -> None:
    lines = results_table("net", LABELS, [_result("center224")], None).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (lines[0], lines[2])]
    assert cells[0] == [*("network", "protocol", "top-1 %", "top-5 %", "± top-1", "± top-5", "loss", "images")]
    assert cells[1] == ["net", "center224", "77.50", "93.25", "0.19", "0.11", "0.90", "50000"]


@pytest.mark.parametrize(("num_classes", "has_top5"), [(3, False), (5, False), (6, True)])
def test_top_5_is_not_shown_if_it_is_always_correct(num_classes: int, has_top5: bool) -> None:
    task = ClassificationTask(Experiment.model_validate({"network": {"arch": "resnet18", "classes": num_classes}}))
    assert ("top5" in task.shown_labels) == has_top5
    table = results_table("net", task.shown_labels, [_result("center224")], None)
    assert "top-1 %" in table
    assert "± top-1" in table
    assert ("top-5" in table) == has_top5


@pytest.mark.parametrize(
    ("top1", "top5", "cells"),
    [
        (0.0, 100.0, ["0.00", "100.00", "", ""]),
        (0.0, 50.0, ["0.00", "50.00", "", "14.43"]),
        (100.0, 100.0, ["100.00", "100.00", "", ""]),
    ],
)
def test_scores_of_0_and_100_percent_have_no_standard_error(top1: float, top5: float, cells: list[str]) -> None:
    result = replace(_result("center224"), top1=top1, top5=top5, count=12)
    line = results_table("net", LABELS, [result], None).splitlines()[2]
    assert [cell.strip() for cell in line.split("|")[3:7]] == cells
    assert result.to_json(None, {})["standard_errors"]["top1"] is None


@pytest.mark.parametrize(
    ("count", "what", "text"),
    [
        (1, "image", "1 image"),
        (0, "image", "0 images"),
        (2000, "class", "2,000 classes"),
        (1, "class", "1 class"),
        (2, "batch", "2 batches"),
        (1, "batch", "1 batch"),
        (3, "class folder", "3 class folders"),
        (2, "process", "2 processes"),
    ],
)
def test_counted_nouns_have_their_plural(count: int, what: str, text: str) -> None:
    assert counted(count, what) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(61_400, "61.4 kB"), (0, "0 B"), (999, "999 B"), (1.5e6, "1.5 MB"), (146e9, "146 GB"), (2.34567e9, "2.35 GB")],
)
def test_bytes_have_suitable_unit(count: float, text: str) -> None:
    assert bytes_text(count) == text
