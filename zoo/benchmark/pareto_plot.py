"""The plots of a pareto benchmark: bytes against the time of a step, of each strategy relative to std-BN.

``python -m zoo.benchmark.pareto_plot FILE.json`` draws them anew from the results of an earlier run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from zoo.benchmark.strategies import BASELINE
from zoo.files import write_bytes
from zoo.run.plot_style import BLACK, BLUE, GREEN, LABEL_SIZE, ORANGE, PINK, new_figure, png_of, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation

STYLES: dict[str, dict[str, Any]] = {
    "std-BN": {"color": BLACK, "marker": "s"},
    "iABN": {"color": ORANGE, "marker": "o"},
    "RevNet": {"color": GREEN, "marker": "D"},
    "compiled std-BN": {"color": BLUE, "marker": "^", "linestyle": "--"},
    "compiled iABN": {"color": PINK, "marker": "v", "linestyle": ":"},
}
WIDTH, HEIGHT = 7, 5  # inches of a panel
DISTANCES = (8, 16, 26, 38, 52, 68, 86)  # of a label from its point, in points of print
SIDES = ((1, 0), (1, 1), (1, -1), (-1, 0), (-1, 1), (-1, -1), (0, 1), (0, -1))  # across and up

Box = tuple[float, float, float, float]  # left, bottom, right, top in pixels


class Point(NamedTuple):
    """A strategy: time of a step and bytes, both relative to the baseline."""

    provider: str
    time: float
    bytes: float

    @property
    def family(self) -> str:
        """The style that the point is drawn in: the longest of `STYLES` that the strategy's name begins with."""
        return max((style for style in STYLES if self.provider.startswith(style)), key=len)

    @property
    def label(self) -> str:
        """The strategy's name, or of a compiled network the budget alone: a line joins those of one family."""
        return self.provider.replace(self.family, "budget") if "compiled" in self.family else self.provider


def write_plots(stem: Path, content: dict[str, Any]) -> None:
    """Write the peak bytes to ``stem``.png, and those and the held bytes on the same axes to ``stem``_both.png."""
    write_bytes(stem.with_name(stem.name + ".png"), draw(content, ["peak"]))
    write_bytes(stem.with_name(stem.name + "_both.png"), draw(content, ["peak", "held"]))


def draw(content: dict[str, Any], metrics: Sequence[str]) -> bytes:
    """Return the PNG plot of a pareto benchmark's JSON ``content``, with a panel for each of the ``metrics``."""
    figure = new_figure(WIDTH, HEIGHT * len(metrics), _title(content))
    panels = {}
    rows = figure.subplots(len(metrics), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    for axes, metric in zip(rows, metrics, strict=True):
        panels[axes] = points_of(content, f"{metric} ratio")
        _draw_points(axes, panels[axes])
        style_axes(axes, f"time of a step / {BASELINE}", f"{metric} bytes / {BASELINE}")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(STYLES), frameon=False, fontsize=LABEL_SIZE)
    figure.canvas.draw()  # what the places of labels depend on is fixed from here on
    figure.set_layout_engine("none")
    for axes, points in panels.items():
        _place_labels(axes, points)
    return png_of(figure)


def points_of(content: dict[str, Any], metric: str) -> list[Point]:
    """Return the points of all strategies that have both a time and the ``metric``."""
    values: dict[str, dict[str, float]] = {}
    for record in content["records"]:
        values.setdefault(record["provider"], {})[record["metric"]] = record["median"]
    return [
        Point(provider, medians["step ratio"], medians[metric])
        for provider, medians in values.items()
        if {"step ratio", metric} <= medians.keys()
    ]


def _title(content: dict[str, Any]) -> str:
    record, machine, threads = content["records"][0], content["machine"], content["settings"]["threads"]
    case = [record["subject"], "x".join(map(str, record["shape"])), record["dtype"], record["layout"]]
    place = [machine["cpu"], f"device {machine['device']}", f"{threads} thread{'s' * (threads != 1)}"]
    return f"{', '.join(case)}\n{', '.join(place)}, torch {content['versions']['torch']}"


def _draw_points(axes: Axes, points: Sequence[Point]) -> None:
    for family, style in STYLES.items():
        members = [point for point in points if point.family == family]
        if members:
            times, sizes = [point.time for point in members], [point.bytes for point in members]
            axes.plot(times, sizes, label=family, **{"linestyle": "none", "markersize": 7, "linewidth": 1, **style})
    axes.margins(x=0.18, y=0.12)  # room for labels on both sides


def _place_labels(axes: Axes, points: Sequence[Point]) -> None:
    """Write each label near its point, where it covers least of the points, lines, other labels and the border."""
    figure: Any = axes.get_figure(root=True)
    renderer = figure.canvas.get_renderer()
    taken = _covered_by_points(axes, points)
    for point in points:
        label = axes.annotate(
            point.label,
            (point.time, point.bytes),
            (0, 0),
            textcoords="offset points",
            fontsize=LABEL_SIZE,
            color=STYLES[point.family]["color"],
            arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.6},
        )
        places = list(product(DISTANCES, SIDES))
        boxes = [_move(label, renderer, *place) for place in places]
        covered = [_covered(box, np.array(taken), np.array(axes.bbox.extents)) for box in boxes]
        best = covered.index(min(covered))
        taken.append(_move(label, renderer, *places[best]))
        assert label.arrow_patch is not None
        label.arrow_patch.set_visible(best not in (0, SIDES.index((-1, 0))))  # not where the label is beside the point


def _move(label: Annotation, renderer: Any, distance: float, side: tuple[int, int]) -> Box:
    """Move a label to a place beside its point and return the box that it then covers."""
    from matplotlib.text import Text

    across, up = side
    label.set_position((across * distance, up * distance))
    label.set_horizontalalignment(("center", "left", "right")[across])
    label.set_verticalalignment(("center", "bottom", "top")[up])
    label.update_positions(renderer)
    left, bottom, right, top = Text.get_window_extent(label).extents  # without the arrow
    return left, bottom, right, top


def _covered_by_points(axes: Axes, points: Sequence[Point]) -> list[Box]:
    """Return the boxes of the points, and of small parts of the lines between those of a family."""

    def box(x: float, y: float, half: float) -> Box:
        return x - half, y - half, x + half, y + half

    places = {point: axes.transData.transform((point.time, point.bytes)) for point in points}
    boxes = [box(x, y, 8) for x, y in places.values()]
    for (start, from_), (end, to) in pairwise(places.items()):
        if start.family == end.family and "linestyle" in STYLES[start.family]:
            boxes += [box(x, y, 2) for x, y in np.linspace(from_, to, 41)]
    return boxes


def _covered(box: Box, taken: np.ndarray, inside: np.ndarray) -> float:
    """Return how bad a place ``box`` is: its area that is taken, and ten times its area outside of the axes."""
    outside = (box[2] - box[0]) * (box[3] - box[1]) - _overlap(box, inside[None])
    return _overlap(box, taken) + 10 * outside


def _overlap(box: Box, others: np.ndarray) -> float:
    """Return the sum of the areas that ``box`` shares with each of the others, shape (n, 4)."""
    width = np.minimum(box[2], others[:, 2]) - np.maximum(box[0], others[:, 0])
    height = np.minimum(box[3], others[:, 3]) - np.maximum(box[1], others[:, 1])
    return float((width.clip(0) * height.clip(0)).sum())


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        write_plots(file.with_suffix(""), json.loads(file.read_text(encoding="utf-8")))
