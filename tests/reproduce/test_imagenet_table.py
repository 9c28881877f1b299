"""A verdict is given only where two numbers mean the same, and a number is shown only where it was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zoo.data.prepare.validation_set import ValidationSet
from zoo.reproduce.imagenet_table import Row, markdown_report

IMAGENET = ValidationSet("data/val", 50_000, 1000, (50, 50), "digest")
PART = replace(IMAGENET, difference="it has 7 images", is_part=True)
OTHER = replace(IMAGENET, difference="it has 7 images")
ENVIRONMENT = {"torch": "2.15", "device": "cpu"}
ROW = Row("net", "center224", {"top1": 77.04, "top5": 93.5}, "a paper", "md5", "zoo reproduce net")


def _measured(top1: float, top5: float = 93.5, count: int = 50_000, limit: int | None = None) -> Row:
    finished = "2026-01-02T03:04:05+00:00"
    values: dict[str, Any] = {"top1": top1, "top5": top5, "count": count, "limit": limit, "environment": ENVIRONMENT}
    return replace(ROW, measured={**values, "finished": finished, "data": IMAGENET.digest})


@pytest.mark.parametrize(
    ("top1", "top5", "verdict"),
    [
        (77.04, 93.5, "within 0.1 point"),
        (77.14, 93.4, "within 0.1 point"),
        (76.944, 93.5, "within 0.1 point"),
        (76.93, 93.5, "-0.11 points (top1)"),
        (77.1, 94.0, "+0.50 points (top5)"),
        (77.5, 93.0, "-0.50 points (top5)"),
    ],
)
def test_a_tenth_of_a_point_in_either_score_is_the_limit(top1: float, top5: float, verdict: str) -> None:
    row = _measured(top1, top5)
    assert row.verdict(IMAGENET).reason == verdict
    assert row.verdict(IMAGENET).state == ("reproduced" if verdict.startswith("within") else "off")
    assert (row.verdict(IMAGENET).state == "off") != verdict.startswith("within")


@pytest.mark.parametrize(
    ("row", "data", "verdict"),
    [(_measured(77.04, count=7), OTHER, "needs data: scored on 7 images that are not ImageNet's"),
     (_measured(77.04, count=7), PART, "underpowered: a subset of 7 of 50,000 images"),
     (_measured(77.04, count=7, limit=7), IMAGENET, "underpowered: a subset of 7 of 50,000 images"),
     (_measured(77.04, count=49_999), IMAGENET, "underpowered: a subset of 49,999 of 50,000 images")],
)  # fmt: skip
def test_other_data_a_limit_and_images_left_out_decide_nothing(row: Row, data: ValidationSet, verdict: str) -> None:
    assert str(row.verdict(data)) == verdict
    assert row.difference(data) is None
    assert row.verdict(data).state != "off"


def test_a_measurement_of_other_images_than_these_decides_nothing() -> None:
    """The fingerprint that was recorded counts, not that there are 50,000 images now."""
    row = replace(_measured(77.04), measured={**(_measured(77.04).measured or {}), "data": "another"})
    assert row.verdict(IMAGENET).state == "underpowered"


def test_the_standard_error_stands_beside_the_measured_score() -> None:
    text = " ".join(markdown_report([_measured(77.04)], IMAGENET, [], ENVIRONMENT).split())
    assert "| 77.04 / 93.50 | 77.04 / 93.50 | 0.19 / 0.11 | +0.00 / +0.00 |" in text


def test_a_row_not_run_shows_no_number_but_the_published() -> None:
    row = replace(ROW, reason="no weights")
    content = row.to_json(IMAGENET)
    assert [content[key] for key in ("measured", "difference", "standard_error")] == [None] * 3
    assert content["verdict"] == "needs data: not run"
    report = markdown_report([row], IMAGENET, ["the weights are missing"], ENVIRONMENT)
    cells = [cell.strip() for cell in report.split("\n| net ")[1].split("\n")[0].split("|")]
    assert cells == ["", "center224", "77.04 / 93.50", "", "", "", "needs data: not run", "", "", "md5", ""]
    assert "- the weights are missing" in report
    assert "- net, center224: no weights\n\n  `zoo reproduce net`" in report


def test_rows_not_run_for_one_reason_are_told_once() -> None:
    rows = [replace(ROW, reason="no data"), replace(ROW, protocol="center320", reason="no data")]
    assert markdown_report(rows, IMAGENET, [], ENVIRONMENT).count("`zoo reproduce net`") == 1


def test_a_network_without_published_scores_gets_no_verdict() -> None:
    row = replace(_measured(50.0), published=None)
    assert (str(row.verdict(IMAGENET)), row.difference(IMAGENET)) == ("nothing published", None)
    assert str(row.verdict(OTHER)) == "nothing published"


def test_a_score_measured_elsewhere_says_when_and_with_what() -> None:
    row = replace(_measured(77.0), reused=True)
    changed = markdown_report([row], IMAGENET, [], {**ENVIRONMENT, "device": "GPU"})
    assert "reused, from 2026-01-02, device cpu" in changed
    assert "reused, from 2026-01-02 |" in markdown_report([row], IMAGENET, [], ENVIRONMENT)
    assert "reused" not in markdown_report([_measured(77.0)], IMAGENET, [], ENVIRONMENT)


@pytest.mark.parametrize(
    ("data", "words"),
    [(IMAGENET, "50,000 images in 1,000 classes of 50, sha256 of names and sizes digest: the ImageNet validation set"),
     (OTHER, "not the ImageNet validation set** (it has 7 images)"),
     (PART, "a part of the ImageNet validation set** (it has 7 images)"),
     (ValidationSet("x", fault="there is no folder x"), "Data: none. there is no folder x")],
)  # fmt: skip
def test_the_report_says_which_data_it_is_about(data: ValidationSet, words: str) -> None:
    assert words in markdown_report([ROW], data, [], ENVIRONMENT)


def test_where_only_top1_was_published_only_top1_is_compared() -> None:
    row = replace(_measured(76.5, top5=10.0), published={"top1": 76.9})
    assert row.difference(IMAGENET) == {"top1": -0.4}
    assert str(row.verdict(IMAGENET)) == "off: -0.40 points (top1)"
    text = " ".join(markdown_report([row], IMAGENET, [], ENVIRONMENT).split())
    assert "| 76.90 | 76.50 / 10.00 | 0.19 / 0.13 | -0.40 | off: -0.40 points (top1) |" in text
