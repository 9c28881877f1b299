"""Each number in the README is in a generated table, or has a source."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from docs.tables import MARKERS, ROOT

#: The numbers outside the tables, with their sources.
SOURCES = {
    "half the": "the first row of the table",
    "2.11": "pyproject.toml",
    "3.10": "pyproject.toml",
    "2": "min: make quickstart, on an idle machine",
    "18": "s: make quickstart, on an idle machine",
    "30": "s: make test, after the installation",
    "3": "GB to download: the sizes of the packages; min: make test, after the installation",
    "6": "GB of disk: the sizes of the packages",
    "4.0": "the name of a license",
}
CODE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|https?://\S+", re.DOTALL)  # includes addresses
COMMENT = re.compile(r"  # (.*)")
NUMBER = r"\d+(?:,\d{3})*"
# A number or a fraction, without the years of papers and numbers in names.
FIGURE = re.compile(
    rf"(?<![\w.,/-])(?!(?:19|20)\d\d\b){NUMBER}(?:\.\d+)?(?![\w.-]*[\w])"
    r"|\bhalf the\b|\b(?:a|one|two|three) (?:third|quarter|fifth|tenth|twentieth|hundredth)s?\b"
)


def figures_in(text: str) -> Iterator[str]:
    """Yield each number outside generated tables, code and addresses. Comments in code are text."""
    for pattern in (MARKERS, CODE):
        text = pattern.sub(lambda match: " ".join(COMMENT.findall(match[0])) + " ", text)
    for match in FIGURE.finditer(text):
        yield match[0]


def test_numbers_of_readme_have_source() -> None:
    assert {*figures_in((ROOT / "README.md").read_text())} == {*SOURCES}


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("A gain of 75 % and 1.13 times as long.", ["75", "1.13"]),
        ("Both 160 and 50,000 of ResNet-50 (CVPR 2018), 3 x 3 and v1.2.", ["160", "50,000", "3", "3"]),
        ("A quarter of it, a tenth, half the memory.", ["a tenth", "half the"]),
        ("```sh\nrun 7 MB  # takes 9 minutes\n```", ["9"]),
        ("Code `0.5 ms`, ```\n3.5\n``` and [a link](http://a.b/1.5 % )", []),
        ("<!-- held -->\n0.53\n<!-- /held -->\nand 0.54 by hand", ["0.54"]),
    ],
)
def test_figures_are_numbers_outside_code_and_tables(text: str, figures: list[str]) -> None:
    assert [*figures_in(text)] == figures
