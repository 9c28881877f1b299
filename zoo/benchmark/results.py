"""The format that all benchmarks share: a header with machine and settings, and a record per measured quantity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from zoo.errors import MAX_SHOWN_CHARS
from zoo.files import write_json, write_text
from zoo.run.cost import CostMeter
from zoo.run.environment import describe_environment
from zoo.tables import Cell, markdown_table

SPREAD = "interquartile range"
# Where the header has what describes the environment; all else is among its versions, and threads among its settings.
MACHINE = ("device", "cpu", "platform")
TOP = ("commit", "date")
CASE = ("subject", "shape", "dtype", "layout", "provider")  # the records that stand in one row of a table share these


@dataclass(frozen=True)
class Case:
    """What is measured: a layer or a network, and the shape, dtype and memory layout of its input."""

    subject: str
    shape: tuple[int, ...]
    dtype: str
    layout: str


@dataclass(frozen=True)
class Record:
    """One quantity of one provider (a norm, a strategy): median and interquartile range of ``n`` values."""

    subject: str
    provider: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    metric: str
    unit: str
    median: float
    spread: float
    n: int


@dataclass
class Results:
    """Everything that one run of a benchmark has measured, with what is needed to repeat it.

    Args:
    - `benchmark`: the kind of benchmark: "layer", "model", "pareto", "fit", "lean", "data", "scaling",
      "checkpoint" or "predict".
    - `command`: the command line that runs it.
    - `device`: device on which it runs.
    - `settings`: what times depend on, such as the number of threads.
    - `summary`: what the JSON file has besides, for programs that look for a few numbers.
    """

    benchmark: str
    command: str
    device: torch.device
    settings: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._cost = CostMeter(self.device)

    def add(self, case: Case, provider: str, metric: str, unit: str, values: Sequence[float]) -> None:
        """Add a record of ``values`` (at least one)."""
        self._cost.update()
        middle, spread = median_and_spread(values)
        self.records.append(
            Record(
                case.subject, provider, case.shape, case.dtype, case.layout, metric, unit, middle, spread, len(values)
            )
        )

    def note(self, text: str) -> None:
        """Add a remark, unless it is there already."""
        if text not in self.notes:
            self.notes.append(text)

    def content(self) -> dict[str, Any]:
        """Return what the JSON file holds: the header (machine, versions, commit, settings), notes and records."""
        environment = describe_environment(self.device)
        return {
            "benchmark": self.benchmark,
            "command": self.command,
            "machine": {key: environment[key] for key in MACHINE},
            "versions": {key: value for key, value in environment.items() if key not in (*MACHINE, *TOP, "threads")},
            **{key: environment[key] for key in TOP},
            "cost": self._cost.read(),
            "settings": {**self.settings, "spread": SPREAD},
            "notes": self.notes,
            **self.summary,
            "records": [asdict(record) | {"shape": list(record.shape)} for record in self.records],
        }

    def write(self, stem: Path) -> str:
        """Write ``stem``.json and ``stem``.md, and return the text of the latter."""
        content = self.content()
        text = markdown(content)
        write_json(stem.with_name(stem.name + ".json"), content)
        write_text(stem.with_name(stem.name + ".md"), text)
        return text


def told(error: Exception) -> str:
    """Return the kind of an error and the first line of its message, which may have none."""
    first_line = str(error).partition("\n")[0][:MAX_SHOWN_CHARS]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and the interquartile range, which is 0 for a single value."""
    if len(values) < 2:
        return values[0], 0.0
    low, _, high = quantiles(values, n=4, method="inclusive")
    return float(median(values)), high - low


def markdown(content: dict[str, Any]) -> str:
    """Return the JSON ``content`` as Markdown: the header, and tables of a row per provider and a column per metric.

    A cell is the median, with the spread in parentheses where there are several values. Two rows are in the same table
    if they have a metric in common, or if a chain of other rows links them in this way: a benchmark that answers two
    questions has two tables.
    """
    rows: dict[tuple[str, ...], dict[tuple[str, str], Cell]] = {}
    for record in content["records"]:
        case = tuple("x".join(map(str, record[key])) if key == "shape" else record[key] for key in CASE)
        spread = "" if record["n"] == 1 else f" ({_number(record['spread'])})"
        rows.setdefault(case, {})[record["metric"], record["unit"]] = _number(record["median"]) + spread
    tables: list[dict[tuple[str, str], None]] = []  # the metrics of each, in order
    for cells in rows.values():
        metrics_of_row, joined = dict.fromkeys(cells), [table for table in tables if table.keys() & cells.keys()]
        for other in (*joined[1:], metrics_of_row):
            (joined or [metrics_of_row])[0].update(other)
        tables = [table for table in tables if not any(table is other for other in joined[1:])]
        tables += [] if joined else [metrics_of_row]
    texts = []
    for metrics in tables:
        headers = [*CASE, *(metric if unit == "1" else f"{metric}, {unit}" for metric, unit in metrics)]
        shown = [[*case, *map(cells.get, metrics)] for case, cells in rows.items() if cells.keys() & metrics.keys()]
        texts.append(markdown_table(headers, shown))
    return "\n".join([*_header(content), *(line for text in texts for line in ("", text)), ""])


def _header(content: dict[str, Any]) -> list[str]:
    def line(title: str, values: dict[str, Any]) -> str:
        return f"- {title}: " + ", ".join(f"{key} {value}" for key, value in values.items() if value is not None)

    return [
        f"# zoo benchmark {content['benchmark']}",
        "",
        f"- command: `{content['command']}`",
        line("machine", content["machine"]),
        line("versions", content["versions"] | {"commit": content["commit"], "date": content.get("date")}),
        line("settings", content["settings"]),
        *(f"- {note}" for note in content["notes"]),
    ]


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1e6 else f"{value:.4g}"
