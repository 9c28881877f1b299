"""Checks that each measured number in the documentation comes from a file or is listed with its source."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

GIVEN = "given_figures.json"
MARKERS = re.compile(r"(<!-- (\w+) -->\n)(.*?)(<!-- /\2 -->)", re.DOTALL)  # around generated tables
CODE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|https?://\S+", re.DOTALL)  # includes addresses
UNITS = (
    "%|ms|seconds?|minutes?|hours?|days?|KB|MB|GB|GiB|MiB|points?|times|bytes|W|J|"
    "epochs?|networks|layers|runs|seeds|images|operations|parameters"
)
NUMBER = r"\d+(?:,\d{3})*"
NOT_IN_A_NAME = r"(?<![\w.,/-])(?<!ection )"
# A number with decimals, or a whole one up to a word before its unit, except the number of a section.
FIGURE = re.compile(rf"{NOT_IN_A_NAME}(?:{NUMBER}\.\d+(?![\w.]*\d)|{NUMBER}(?=(?: [a-z]+)? (?:{UNITS})\b| %))")
# On the first page also fractions and any number, but for the years of papers.
FIRST_PAGE = "README.md"
FIGURE_OF_FIRST_PAGE = re.compile(
    rf"{FIGURE.pattern}|{NOT_IN_A_NAME}(?!(?:19|20)\d\d\b){NUMBER}(?![\w.-]*[\w])"
    r"|\bhalf the\b|\b(?:a|one|two|three) (?:third|quarter|fifth|tenth|twentieth|hundredth)s?\b"
)
COMMENT = re.compile(r"  # (.*)")


def unbacked_figures(root: Path) -> list[str]:
    """Return a line for each number in README.md and docs/*.md without a source.

    Numbers in generated tables have one. Any other number must be in a phrase of docs/given_figures.json, which gives
    the source of each phrase by page. A listed phrase that is not on its page is reported too.
    """
    given = json.loads((root / "docs" / GIVEN).read_text(encoding="utf-8"))
    pages = ["README.md", *(f"docs/{path.name}" for path in sorted((root / "docs").glob("*.md")))]
    faults = [f"docs/{GIVEN}: there is no page {page}" for page in given if page not in pages]
    for page in pages:
        text = (root / page).read_text(encoding="utf-8")
        phrases = given.get(page, {})
        faults += [
            f"docs/{GIVEN}: {page} does not contain {phrase!r}"
            for phrase in phrases
            if not _pattern(phrase).search(text)
        ]
        faults += [
            f"{page}:{line}: {figure!r} has no source: move it to a generated table, or list its phrase in docs/{GIVEN}"
            for line, figure in figures_in(text, phrases, FIGURE_OF_FIRST_PAGE if page == FIRST_PAGE else FIGURE)
        ]
    return faults


def figures_in(text: str, given: Iterable[str] = (), figure: re.Pattern[str] = FIGURE) -> Iterator[tuple[int, str]]:
    """Yield line and text of each number outside generated tables, code, addresses and the phrases ``given``.

    Comments in code are text.
    """

    def blank(match: re.Match[str]) -> str:
        """Return the match without all but its line breaks and the comments of its code."""
        lines = match[0].split("\n") if match[0].startswith("```") else [""] * (match[0].count("\n") + 1)
        return "\n".join(" ".join(COMMENT.findall(line)) for line in lines) + " "

    for pattern in (MARKERS, *map(_pattern, given), CODE):
        text = pattern.sub(blank, text)
    for match in figure.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match[0]


def _pattern(phrase: str) -> re.Pattern[str]:
    """Return a pattern that matches the phrase across line breaks."""
    return re.compile(r"\s+".join(map(re.escape, phrase.split())))
