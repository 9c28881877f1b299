"""Writes the files of the scoreboard, which are computed from the reports of the papers.

``python -m zoo.reproduce.scoreboard_files FOLDER`` regenerates them.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo.files import write_text
from zoo.reproduce.comparison import RULES
from zoo.reproduce.model_index import model_index
from zoo.reproduce.paper_report import read_report
from zoo.reproduce.papers import PAPERS
from zoo.reproduce.scoreboard import Row, rows_of
from zoo.reproduce.scoreboard_page import scoreboard_page
from zoo.reproduce.scoreboard_summary import CSV, HTML, INDEX, PAGE, scoreboard_summary


def read_rows(folder: Path) -> list[Row]:
    """Return the rows of all papers, from their reports in ``folder``; raises ConfigError for other files there."""
    return rows_of({paper: read_report(folder, paper) for paper in PAPERS})


def write_forms(folder: Path) -> None:
    """Write the forms of the scoreboard into the folder of the reports."""
    for name, text in forms_of(read_rows(folder)).items():
        write_text(folder / name, text)


def forms_of(rows: Sequence[Row]) -> dict[str, str]:
    """Return the contents of the files of the scoreboard by file name."""
    return {
        PAGE: scoreboard_summary(rows),
        HTML: scoreboard_page(rows),
        CSV: csv_text(rows),
        INDEX: model_index(rows),
    }


def csv_text(rows: Sequence[Row]) -> str:
    """Return the rows as CSV."""
    lines = [fields_of(row) for row in rows]
    file = io.StringIO()
    writer = csv.DictWriter(file, list(dict.fromkeys(key for line in lines for key in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def fields_of(row: Row) -> Mapping[str, Any]:
    """Return the columns of a row by name: those of the number, of both measurements, and of their provenance."""
    number, is_measured = row.number, row.is_measured
    return {
        "id": number.id,
        "paper": number.paper,
        "state": row.state,
        **{key: getattr(number, key) for key in ("item", "quantity")},
        "published": number.text,
        **{key: getattr(number, key) for key in ("unit", "kind", "evidence")},
        **{
            f"{side}_{key}": value
            for side, each in (("paper", row.paper), ("shipped", row.shipped))
            for key, value in {
                "what": each.what, "measured": each.measured, "unit": each.unit if is_measured else "",
                "n": each.n if is_measured else None, "spread": each.spread, "state": each.verdict.state,
                "verdict": each.verdict.reason, "note": each.note,
            }.items()
        },
        "repeats": RULES[number.evidence].repeats,
        "spread_of": RULES[number.evidence].spread,
        **{key: getattr(number, key) for key in ("finding", "place", "quotation", "network", "settings")},
        "operations": row.paper.operations,
        "command": row.command,
        "commit": row.commit,
        "date": row.date,
        "weights_md5": row.paper.weights_md5,
        "data": row.paper.data,
        **({k: v for k, v in row.environment.items() if k not in ("commit", "date")} if is_measured else {}),
    }  # fmt: skip


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write_forms(Path(name))
