"""Reads and writes the files of the scoreboard: reproduction.json, and its CSV and Markdown forms.

``python -m zoo.reproduce.scoreboard_files FOLDER`` regenerates the two forms from reproduction.json.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo.errors import ConfigError
from zoo.files import write_json, write_text
from zoo.reproduce.papers import PAPERS
from zoo.reproduce.scoreboard import Row, count_states
from zoo.reproduce.scoreboard_page import CSV, JSON, scoreboard_page

PAGE = "REPRODUCTION.md"
FIELDS = [name for name in Row.model_fields if name not in ("environment", "section")]  # columns of the CSV file


def read_rows(folder: Path) -> dict[str, Row]:
    """Return the rows of reproduction.json in ``folder`` by id, or no rows if there is no such file.

    Raises ConfigError for a file of another kind.
    """
    path = folder / JSON
    if not path.exists():
        return {}
    try:
        rows = [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "this file was not written by zoo reproduce", path, "remove it, or give another --out"
        ) from error
    return {row.id: row for row in rows}


def write_scoreboard(folder: Path, rows: Sequence[Row], command: str, environment: Mapping[str, Any]) -> None:
    """Write the three files of the scoreboard; ``command`` and ``environment`` are those of the last run."""
    content: dict[str, Any] = {"benchmark": "reproduction", "command": command, "environment": environment}
    content |= {"states": count_states(rows), "rows": [row.model_dump() for row in rows]}
    write_json(folder / JSON, content)
    write_forms(folder, rows, command)


def write_forms(folder: Path, rows: Sequence[Row], command: str) -> None:
    """Write the CSV and the Markdown file."""
    for name, text in forms_of(rows, command).items():
        write_text(folder / name, text)


def forms_of(rows: Sequence[Row], command: str) -> dict[str, str]:
    """Return the contents of the CSV and the Markdown file by file name."""
    titles = {name: paper.title for name, paper in PAPERS.items()}
    return {CSV: csv_text(rows), PAGE: scoreboard_page(rows, titles, command)}


def csv_text(rows: Sequence[Row]) -> str:
    """Return the rows as CSV: their fields, then the entries of their environments."""
    keys = list(dict.fromkeys(key for row in rows for key in row.environment))
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*FIELDS, *keys])
    for row in rows:
        writer.writerow([*(getattr(row, name) for name in FIELDS), *(row.environment.get(key) for key in keys)])
    return file.getvalue()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        kept = list(read_rows(Path(name)).values())
        write_forms(Path(name), kept, json.loads((Path(name) / JSON).read_text(encoding="utf-8"))["command"])
