"""Plots with matplotlib: panels with curves in one style.

Tested by tests/reproduce/test_paper_report.py.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

from zoo.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, which color-blind readers can distinguish; markers distinguish curves without colors.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
MARKERS = "os^vDxP*"  # one more than colors, which repeat with other markers
LINE_STYLES = ("-", "--", ":", "-.")
WIDTH, HEIGHT, LEGEND_LINE = 5.0, 3.8, 0.17  # inches of a panel, and of a line of its legend
TITLE_CHARACTERS = 12  # per inch
TITLE_SIZE, LABEL_SIZE = 10, 8  # points


@dataclass(frozen=True)
class Line:
    """A curve of a panel.

    Args:
    - `label`: entry of the legend.
    - `x`, `y`: coordinates; a single point is drawn as a marker.
    - `is_theory`: the curve follows from a formula, not from a measurement.
    - `group`: curves of the same group share color and marker; "" for its own group.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    is_theory: bool = False
    group: str = ""


@dataclass(frozen=True)
class Panel:
    """One pair of axes, each linear or logarithmic, with at least one curve."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    x_log: bool = False
    y_log: bool = False


def draw_panels(title: str, panels: Sequence[Panel]) -> bytes:
    """Return a PNG plot of the ``panels`` (at least one) in at most two columns."""
    from matplotlib.figure import Figure

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    height = HEIGHT + LEGEND_LINE * max(len(panel.lines) for panel in panels)
    figure = Figure(figsize=(WIDTH * columns, height * rows), dpi=100, layout="constrained")
    lines = [textwrap.fill(line, int(TITLE_CHARACTERS * WIDTH * columns)) for line in title.splitlines()]
    figure.suptitle("\n".join(lines), fontsize=TITLE_SIZE, parse_math=False)
    for place, panel in enumerate(panels, start=1):
        _draw(figure.add_subplot(rows, columns, place), panel)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def check_matplotlib() -> None:
    """Raise ConfigError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        how = "pip install matplotlib (the package's extra `plot`), or leave the plot out: no --plot, or --no-plot"
        raise ConfigError(f"the plot needs matplotlib: {how}") from error


def _draw(axes: Axes, panel: Panel) -> None:
    """Draw the curves of a panel: color and marker by their group, the dash pattern by their place in the group.

    Next to a theoretical curve, measurements are markers without a line.
    """
    styles = ["none"] if any(line.is_theory for line in panel.lines) else LINE_STYLES
    groups: dict[str, list[Line]] = {}
    for line in panel.lines:
        groups.setdefault(line.group or line.label, []).append(line)
    for lines, color, marker in zip(groups.values(), cycle(COLORS), cycle(MARKERS), strict=False):
        for line, style in zip(lines, cycle(styles), strict=False):
            if line.is_theory:
                axes.plot(line.x, line.y, label=line.label, color="0.45", linewidth=1)
            else:
                axes.plot(line.x, line.y, label=line.label, color=color, marker=marker, markersize=4, linestyle=style)
    axes.set_title(panel.title, fontsize=TITLE_SIZE)
    axes.set_xlabel(panel.x_label, fontsize=LABEL_SIZE)
    axes.set_ylabel(panel.y_label, fontsize=LABEL_SIZE)
    axes.set_xscale("log" if panel.x_log else "linear")
    axes.set_yscale("log" if panel.y_log else "linear")
    axes.tick_params(labelsize=LABEL_SIZE)
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), fontsize=LABEL_SIZE, frameon=False)
