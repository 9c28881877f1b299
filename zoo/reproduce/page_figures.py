"""Figures in the pages of the documentation: numbers that no file backs stand in no sentence unless they are listed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

GIVEN = "given_figures.json"
MARKERS = re.compile(r"(<!-- (\w+) -->\n?)(.*?)(\n?<!-- /\2 -->)", re.DOTALL)  # around what is made of files
CODE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|https?://\S+", re.DOTALL)  # and addresses
UNITS = "%|ms|seconds?|minutes?|hours?|days?|KB|MB|GB|GiB|MiB|points?|times|bytes|W|J"
NUMBER = r"\d[\d,]*"
# A number with decimals, or with a unit of something that is measured; not that of a paper's section.
FIGURE = re.compile(rf"(?<![\w.,/-])(?<!ection )(?:{NUMBER}\.\d+(?![\w.]*\d)|{NUMBER}(?= (?:{UNITS})\b| %))")


def unbacked_figures(root: Path) -> list[str]:
    """Return a line for each figure in README.md and docs/*.md of a checkout that no file backs.

    A figure between two markers is made of a file. Any other has to be in a phrase of docs/given_figures.json, which
    says of each phrase, by page, where it comes from. A phrase that no page has any more is a line too.
    """
    given = json.loads((root / "docs" / GIVEN).read_text(encoding="utf-8"))
    pages = ["README.md", *(f"docs/{path.name}" for path in sorted((root / "docs").glob("*.md")))]
    faults = [f"docs/{GIVEN}: there is no page {page}" for page in given if page not in pages]
    for page in pages:
        text = (root / page).read_text(encoding="utf-8")
        phrases = given.get(page, {})
        faults += [
            f"docs/{GIVEN}: {page} does not say {phrase!r}" for phrase in phrases if not _pattern(phrase).search(text)
        ]
        faults += [
            f"{page}:{line}: no file backs {figure!r}: let it be made of one, between markers, or list the phrase in "
            f"docs/{GIVEN} with its source"
            for line, figure in figures_in(text, phrases)
        ]
    return faults


def figures_in(text: str, given: Iterable[str] = ()) -> Iterator[tuple[int, str]]:
    """Yield line and text of each figure outside markers, code, addresses and the phrases that are ``given``."""
    for pattern in (MARKERS, CODE, *map(_pattern, given)):
        text = pattern.sub(lambda match: "\n" * match[0].count("\n") + " ", text)
    for match in FIGURE.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match[0]


def _pattern(phrase: str) -> re.Pattern[str]:
    """Return what finds a phrase wherever its lines are broken."""
    return re.compile(r"\s+".join(map(re.escape, phrase.split())))
