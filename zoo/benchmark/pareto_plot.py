"""Plot of a pareto benchmark: memory against step time of each strategy, relative to std-BN.

Tested by tests/benchmark/test_benchmark.py.
"""

from __future__ import annotations

from typing import Any

from zoo.benchmark.strategies import BASELINE
from zoo.run.plot_style import Line, Panel, draw_panels
from zoo.tables import counted


def draw(content: dict[str, Any]) -> bytes:
    """Return a PNG plot of a pareto benchmark's JSON ``content``, with panels for peak and held memory."""
    x_label = f"time of a step / {BASELINE}"
    panels = [
        Panel("", x_label, f"{metric} bytes / {BASELINE}", lines_of(content, f"{metric} ratio"))
        for metric in ("peak", "held")
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
    for provider, medians in values.items():
        if {"step ratio", metric} <= medians.keys():
            name = provider.rpartition(" ")[0] if provider.startswith("compiled ") else provider
            points.setdefault(name, []).append((medians["step ratio"], medians[metric]))
    return [Line(name, [x for x, _ in of_name], [y for _, y in of_name]) for name, of_name in points.items()]


def _title(content: dict[str, Any]) -> str:
    record, machine, threads = content["records"][0], content["machine"], content["settings"]["threads"]
    case = [record["subject"], "x".join(map(str, record["shape"])), record["dtype"], record["layout"]]
    place = [machine["cpu"], f"device {machine['device']}", counted(threads, "thread")]
    return f"{', '.join(case)}\n{', '.join(place)}, torch {content['versions']['torch']}"
