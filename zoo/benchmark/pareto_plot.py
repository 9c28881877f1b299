"""Plot of a benchmark of networks: memory against step time of each strategy, relative to std-BN.

Tested by tests/benchmark/test_benchmark.py.
"""

from __future__ import annotations

from typing import Any

from zoo.benchmark.strategies import BASELINE
from zoo.run.plot_style import Line, Panel, draw_panels
from zoo.tables import counted


def draw(content: dict[str, Any]) -> bytes:
    """Return a PNG plot of a benchmark's JSON ``content``, with panels for peak and held memory of each network."""
    panels = [
        Panel(
            subject, f"time of a step / {BASELINE}", f"{metric} bytes / {BASELINE}", lines_of(content, subject, metric)
        )
        for subject in dict.fromkeys(record["subject"] for record in content["records"])
        for metric in ("peak", "held")
    ]
    record, machine, threads = content["records"][0], content["machine"], content["settings"]["threads"]
    case = ["x".join(map(str, record["shape"])), record["dtype"], record["layout"]]
    place = [machine["cpu"], f"device {machine['device']}", counted(threads, "thread")]
    return draw_panels(f"{', '.join(case)}\n{', '.join(place)}, torch {content['versions']['torch']}", panels)


def lines_of(content: dict[str, Any], subject: str, metric: str) -> list[Line]:
    """Return the strategies of a network with a step time and the ratio of the ``metric``.

    A strategy is a point; the budgets of a compiled network are the points of one curve.
    """
    values: dict[str, dict[str, float]] = {}
    for record in content["records"]:
        if record["subject"] == subject:
            values.setdefault(record["provider"], {})[record["metric"]] = record["median"]
    points: dict[str, list[tuple[float, float]]] = {}
    for provider, medians in values.items():
        if {"step ratio", f"{metric} ratio"} <= medians.keys():
            name = provider.rpartition(" ")[0] if provider.startswith("compiled ") else provider
            points.setdefault(name, []).append((medians["step ratio"], medians[f"{metric} ratio"]))
    return [Line(name, [x for x, _ in of_name], [y for _, y in of_name]) for name, of_name in points.items()]
