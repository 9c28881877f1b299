"""Plots of a pareto benchmark: memory against step time of each strategy, relative to std-BN.

``python -m zoo.benchmark.pareto_plot FILE.json`` redraws the plots from the results of an earlier run.

Tested by tests/benchmark/test_benchmark.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zoo.benchmark.strategies import BASELINE
from zoo.files import write_bytes
from zoo.run.plot_style import Line, Panel, draw_panels
from zoo.tables import counted


def write_plots(stem: Path, content: dict[str, Any]) -> None:
    """Write the peak memory to ``stem``.png, and peak and held memory to ``stem``_both.png."""
    write_bytes(stem.with_name(stem.name + ".png"), draw(content, ["peak"]))
    write_bytes(stem.with_name(stem.name + "_both.png"), draw(content, ["peak", "held"]))


def draw(content: dict[str, Any], metrics: Sequence[str]) -> bytes:
    """Return a PNG plot of a pareto benchmark's JSON ``content``, with a panel per metric."""
    x_label = f"time of a step / {BASELINE}"
    panels = [
        Panel("", x_label, f"{metric} bytes / {BASELINE}", lines_of(content, f"{metric} ratio")) for metric in metrics
    ]
    return draw_panels(_title(content), panels)


def lines_of(content: dict[str, Any], metric: str) -> list[Line]:
    """Return the strategies with a step time and the ``metric``.

    A strategy is a point; the budgets of a compiled network are the points of one curve.
    """
    values: dict[str, dict[str, float]] = {}
    for record in content["records"]:
        values.setdefault(record["provider"], {})[record["metric"]] = record["median"]
    points: dict[str, list[tuple[float, float]]] = {}
    budgets: dict[str, list[str]] = {}
    for provider, medians in values.items():
        if {"step ratio", metric} <= medians.keys():
            name, _, budget = provider.rpartition(" ") if provider.startswith("compiled ") else (provider, "", "")
            points.setdefault(name, []).append((medians["step ratio"], medians[metric]))
            budgets.setdefault(name, []).append(budget)
    labels = {name: f"{name}, budget {' '.join(of_name)}" if of_name[0] else name for name, of_name in budgets.items()}
    return [Line(labels[name], [x for x, _ in of_name], [y for _, y in of_name]) for name, of_name in points.items()]


def _title(content: dict[str, Any]) -> str:
    record, machine, threads = content["records"][0], content["machine"], content["settings"]["threads"]
    case = [record["subject"], "x".join(map(str, record["shape"])), record["dtype"], record["layout"]]
    place = [machine["cpu"], f"device {machine['device']}", counted(threads, "thread")]
    return f"{', '.join(case)}\n{', '.join(place)}, torch {content['versions']['torch']}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        write_plots(path.with_suffix(""), json.loads(path.read_text(encoding="utf-8")))
