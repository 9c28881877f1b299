"""Plots of reproduced figures, drawn from their panels."""

from __future__ import annotations

import io
import textwrap
from typing import TYPE_CHECKING, Any

from zoo.reproduce.comparison import Panel, Section

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Told apart by colour-blind readers (Okabe and Ito's palette) and without colour, by their markers.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "v", "D", "x", "P")
THEORY = {"color": "0.45", "linestyle": "-", "linewidth": 1.0, "zorder": 1}
COLUMNS = 3
WIDTH, HEIGHT = 5.6, 4.2  # inches of a panel
TITLE_WIDTH = 55  # characters to a panel


def draw(section: Section, columns: int = COLUMNS) -> bytes:
    """Return the PNG plot of a section's panels, of which there is at least one, in at most so many columns."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(columns, len(section.panels))
    rows = -(-len(section.panels) // columns)
    figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(textwrap.fill(section.title, TITLE_WIDTH * columns), fontsize=11)
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for place, panel in zip(axes, section.panels, strict=False):
        _draw_panel(place, panel)
    for place in list(figure.axes)[len(section.panels) :]:
        place.set_axis_off()
    file = io.BytesIO()
    figure.savefig(file, dpi=110, format="png")
    return file.getvalue()


def _draw_panel(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    measured = [line for line in panel.lines if not line.is_theory]
    for line in panel.lines:
        style = THEORY if line.is_theory else _style(measured.index(line), on_theory=len(measured) < len(panel.lines))
        axes.plot(line.x, line.y, label=line.label, **style)
    axes.set_title(panel.title, fontsize=10)
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    axes.set_xscale("log" if panel.x_log else "linear")
    axes.set_yscale("log" if panel.y_log else "linear")
    if not panel.x_log:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not panel.y_log:
        axes.set_ylim(bottom=0)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, framealpha=0.8)


def _style(index: int, on_theory: bool) -> dict[str, Any]:
    """Return the style of a measured curve; where a formula is drawn too, hollow marks that lie around each other."""
    color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
    if on_theory:
        return {
            "color": color,
            "marker": marker,
            "linestyle": "none",
            "markerfacecolor": "none",
            "markersize": 4 + 3 * index,
        }
    return {"color": color, "marker": marker, "markersize": 4.5}
