"""The table of a validation: what was measured, and below it what was published or is expected."""

from __future__ import annotations

from collections.abc import Sequence

from zoo.config import Expected
from zoo.engine.validation import Result
from zoo.report.tables import Cell, markdown_table

HEADERS = ("network", "protocol", "top-1 %", "top-5 %", "loss", "images", "left out")


def results_table(title: str, results: Sequence[Result], expected: Expected | None) -> str:
    """Return a Markdown table with a row per result, each followed by the expected score if there is one.

    Expected scores are named by crop only (``center32``): they hold for the experiment's own scale.
    """
    rows: list[list[Cell]] = []
    for result in results:
        rows.append(_row(title, result))
        score = expected.scores.get(result.protocol.partition("-")[0]) if expected else None
        if expected and score:
            rows.append([f"expected: {expected.source}", result.protocol, score.top1, score.top5, None, None, None])
    return markdown_table(HEADERS, rows)


def _row(title: str, result: Result) -> list[Cell]:
    return [title, result.protocol, result.top1, result.top5, result.loss, result.count, result.skipped]
