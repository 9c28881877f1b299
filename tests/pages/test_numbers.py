"""A number on a page is in a generated table, or listed with its source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.pages.numbers import FIGURE_OF_FIRST_PAGE, figures_in, unbacked_figures
from tests.pages.tables import ROOT


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("It takes 1.13 times as long, 58 seconds and 2,000 MB.", ["1.13", "58", "2,000"]),
        ("A gain of 75 % and of 3 points.", ["75", "3"]),
        ("4 images of 224 x 224, seeds 1 to 3, Table 2, section 4.3, Section 7.2", ["4"]),
        (
            "160 and 50 epochs of 50,000 whole images",
            ["50", "50,000"],
        ),
        ("```sh\nrun 7 MB  # takes 9 minutes\n```", ["9"]),
        ("Version 0.1.0 of 2026-01-02, float32, resnet50, v1.5", []),
        ("Code `0.5 ms`, ```\n3.5\n``` and [a link](http://a.b/1.5 % )", []),
        ("<!-- held -->\n0.53\n<!-- /held -->\nand 0.54 by hand", ["0.54"]),
    ],
)
def test_figures_are_numbers_with_decimals_or_units(text: str, figures: list[str]) -> None:
    assert [figure for _, figure in figures_in(text)] == figures


def test_numbers_of_pages_have_source() -> None:
    assert unbacked_figures(ROOT) == []


def test_phrases_with_source_are_on_their_pages(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("Needs about\n6 GB of disk.\n")
    (tmp_path / "docs" / "a.md").write_text("Twice in 0.5 s.\n")
    given = {"README.md": {"about 6 GB of disk": "size of packages"}}
    (tmp_path / "docs" / "given_figures.json").write_text(json.dumps(given))
    (found,) = unbacked_figures(tmp_path)
    assert found.startswith("docs/a.md:1: '0.5' has no source: ")
    given |= {"docs/a.md": {"in 0.5 s": "a limit", "in 0.7 s": "gone"}, "docs/b.md": {}}
    (tmp_path / "docs" / "given_figures.json").write_text(json.dumps(given))
    assert unbacked_figures(tmp_path) == [
        "docs/given_figures.json: there is no page docs/b.md",
        "docs/given_figures.json: docs/a.md does not contain 'in 0.7 s'",
    ]


def test_first_page_has_only_sourced_numbers() -> None:
    text = "Both 160 and 50 of ResNet-50 (CVPR 2018), 3 x 3 and v1.2, a quarter of it, half the memory"
    assert [figure for _, figure in figures_in(text, (), FIGURE_OF_FIRST_PAGE)] == [
        "160", "50", "3", "3", "a quarter", "half the",
    ]  # fmt: skip
