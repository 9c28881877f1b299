"""The common format of benchmark results: a header with machine and settings, and a record per measurement."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from zoo.errors import MAX_SHOWN_CHARS
from zoo.files import write_json, write_text
from zoo.run.environment import describe_environment
from zoo.tables import Cell, key_value_text, markdown_list, markdown_page, markdown_table, number_text

SPREAD = "interquartile range"
# Entries of the environment outside "versions" in the header; "threads" is among the settings.
MACHINE_KEYS = ("device", "cpu", "platform")
TOP_KEYS = ("commit", "date")
TITLES = {  # benchmark -> title of its Markdown page
    "depth": "Memory of vision transformers over depth",
    "grid": "Reversible networks with and without a grid",
    "layer": "Norms with their activations",
    "lean": "Lean and plain training",
    "libraries": "Lean training with other libraries",
    "loaders": "Throughput of training loaders",
    "model": "Networks with each norm and memory strategy",
    "pareto": "Memory against time of networks",
    "step": "Whole training steps",
}
YES_OR_NO = ("trains", "same bits")  # metrics that are 1 or 0
CASE_KEYS = ("subject", "shape", "dtype", "layout", "provider")  # together they identify a row of a table


@dataclass(frozen=True)
class Case:
    """The measured layer or network, and the shape, dtype and memory layout of its input."""

    subject: str
    shape: tuple[int, ...]
    dtype: str
    layout: str


@dataclass
class Results:
    """The measurements of a benchmark run, and the information needed to repeat it.

    Args:
    - `benchmark`: the subcommand: "layer", "model" or "lean".
    - `command`: the command line.
    - `device`: the device of the measurements.
    - `settings`: settings that affect times, such as the number of threads.
    - `records`: one per measured metric, as in the JSON file.
    - `summary`: additional entries of the JSON file.
    """

    benchmark: str
    command: str
    device: torch.device
    settings: dict[str, Any]
    records: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._start_s = time.monotonic()

    def add(self, case: Case, provider: str, metric: str, unit: str, values: Sequence[float]) -> None:
        """Add a record of a metric of a ``provider`` (a norm, a strategy): the median and spread of ``values``."""
        middle, spread = median_and_spread(values)
        record = {"subject": case.subject, "provider": provider, "shape": list(case.shape), "dtype": case.dtype,
                  "layout": case.layout, "metric": metric, "unit": unit, "median": middle, "spread": spread,
                  "n": len(values)}  # fmt: skip
        self.records.append(record)

    def note(self, text: str) -> None:
        """Add a note, unless it exists already."""
        if text not in self.notes:
            self.notes.append(text)

    def content(self) -> dict[str, Any]:
        """Return the content of the JSON file: header (machine, versions, commit, settings), notes and records."""
        environment = describe_environment(self.device)
        return {
            "benchmark": self.benchmark,
            "command": self.command,
            "machine": {key: environment[key] for key in MACHINE_KEYS},
            "versions": {
                key: value for key, value in environment.items() if key not in (*MACHINE_KEYS, *TOP_KEYS, "threads")
            },
            **{key: environment[key] for key in TOP_KEYS},
            "cost": {"seconds": round(time.monotonic() - self._start_s, 1)},
            "settings": {**self.settings, "spread": SPREAD},
            "notes": self.notes,
            **self.summary,
            "records": self.records,
        }

    def write(self, stem: Path) -> str:
        """Write ``stem``.json and ``stem``.md, and return the Markdown."""
        content = self.content()
        text = markdown(content)
        write_json(stem.with_name(stem.name + ".json"), content)
        write_text(stem.with_name(stem.name + ".md"), text)
        return text


def describe_error(error: Exception) -> str:
    """Return the class of an error and the first line of its message, if any."""
    first_line = str(error).partition("\n")[0][:MAX_SHOWN_CHARS]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and the interquartile range, which is 0 for a single value."""
    if len(values) < 2:
        return values[0], 0.0
    low, _, high = quantiles(values, n=4, method="inclusive")
    return float(median(values)), high - low


def markdown(content: dict[str, Any]) -> str:
    """Return the JSON ``content`` as Markdown: a header, and a table with a row per provider and a column per metric.

    A cell is the median, followed by the spread in parentheses if there are several values, or "yes" or "no".
    """
    rows: dict[tuple[str, ...], dict[tuple[str, str], Cell]] = {}
    for record in content["records"]:
        case = tuple("x".join(map(str, record[key])) if key == "shape" else record[key] for key in CASE_KEYS)
        rows.setdefault(case, {})[record["metric"], record["unit"]] = _cell(record)
    metrics = dict.fromkeys(metric for cells in rows.values() for metric in cells)
    headers = [*CASE_KEYS, *(metric if unit == "1" else f"{metric}, {unit}" for metric, unit in metrics)]
    table = markdown_table(headers, [[*case, *map(cells.get, metrics)] for case, cells in rows.items()])
    versions = {**content["versions"], "commit": content["commit"], "date": content.get("date")}
    facts = {"machine": content["machine"], "versions": versions, "settings": content["settings"]}
    header = [f"command: `{content['command']}`", *(f"{key}: {key_value_text(facts[key])}" for key in facts)]
    title = TITLES.get(content["benchmark"], f"zoo benchmark {content['benchmark']}")
    return markdown_page([f"# {title}", markdown_list([*header, *content["notes"]]), table])


def _cell(record: dict[str, Any]) -> str:
    if record["metric"] in YES_OR_NO:
        return "yes" if record["median"] else "no"
    spread = "" if record["n"] == 1 else f" ({number_text(record['spread'])})"
    return number_text(record["median"]) + spread
