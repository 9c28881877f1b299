"""Plots with matplotlib: the shared style, and figures of panels with curves.

Tested by tests/reproduce/test_paper_report.py.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zoo.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which color-blind readers can distinguish; markers distinguish curves without colors.
BLACK, ORANGE, GREEN, BLUE, PINK, AMBER, SKY = (
    "#000000", "#D55E00", "#009E73", "#0072B2", "#CC79A7", "#E69F00", "#56B4E9",
)  # fmt: skip
COLORS = (BLUE, ORANGE, GREEN, PINK, BLACK, AMBER, SKY)
MARKERS = ("o", "s", "^", "v", "D", "x", "P")
LINE_STYLES = ("-", "--", ":", "-.")
THEORY: dict[str, Any] = {"color": "0.45", "linestyle": "-", "linewidth": 1.0, "zorder": 1}
DPI = 120
TITLE_SIZE, LABEL_SIZE = 10, 9  # points
NUM_COLUMNS = 2
WIDTH, HEIGHT = 4.5, 3.4  # inches of a panel, without its legend
SINGLE_WIDTH, SINGLE_HEIGHT = 7, 4.5  # inches of the only panel of a plot
LEGEND_LINE = 0.17  # inches
LEGEND_CHARACTERS = 6  # per inch, for labels in two columns
TITLE_CHARACTERS = 14  # per inch
NOTE_CHARACTERS = 30  # per line


@dataclass(frozen=True)
class Line:
    """A curve of a panel.

    Args:
    - `label`: entry of the legend.
    - `x`, `y`: coordinates; a single point is drawn as a marker.
    - `is_theory`: the curve follows from a formula, not from a measurement.
    - `group`: curves of the same group share color and marker; "" for its own group.
    - `note`: text next to the last point.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    is_theory: bool = False
    group: str = ""
    note: str = ""


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
    """Return a PNG plot of the ``panels`` (at least one) in at most `NUM_COLUMNS` columns."""
    num_columns = min(NUM_COLUMNS, len(panels))
    num_rows = -(-len(panels) // num_columns)
    width, height = (SINGLE_WIDTH, SINGLE_HEIGHT) if len(panels) == 1 else (WIDTH, HEIGHT)
    longest = max(len(line.label) for panel in panels for line in panel.lines)
    legend_columns = 2 if longest < LEGEND_CHARACTERS * width else 1
    height += LEGEND_LINE * -(-max(len(panel.lines) for panel in panels) // legend_columns)
    title = "\n".join(textwrap.fill(line, int(TITLE_CHARACTERS * width * num_columns)) for line in title.splitlines())
    figure = new_figure(width * num_columns, height * num_rows, title)
    places = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    for axes, panel in zip(places, panels, strict=False):
        _draw_lines(axes, panel)
        style_axes(axes, panel.x_label, panel.y_label)
        axes.set_title(panel.title, fontsize=TITLE_SIZE)
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
        axes.legend(**below, ncols=legend_columns, fontsize=LABEL_SIZE - 1, frameon=False)
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    return png_of(figure)


def check_matplotlib() -> None:
    """Raise ConfigError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        how = "pip install matplotlib (the package's extra `plot`), or leave the plot out with --no-plot"
        raise ConfigError(f"the plot needs matplotlib: {how}") from error


def new_figure(width: float, height: float, title: str) -> Figure:
    """Return an empty figure of ``width`` x ``height`` inches that is rendered without a window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=TITLE_SIZE, parse_math=False)
    return figure


def style_axes(axes: Axes, x_label: str, y_label: str) -> None:
    """Set the axis labels, add a grid behind the data, and remove the top and right spines."""
    axes.set_xlabel(x_label, fontsize=LABEL_SIZE)
    axes.set_ylabel(y_label, fontsize=LABEL_SIZE)
    axes.tick_params(labelsize=LABEL_SIZE)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def png_of(figure: Figure) -> bytes:
    """Return the figure as PNG."""
    file = io.BytesIO()
    figure.savefig(file, dpi=DPI, format="png")
    return file.getvalue()


def _draw_lines(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    groups: dict[str, list[Line]] = {}
    for line in panel.lines:
        if not line.is_theory:
            groups.setdefault(line.group or line.label, []).append(line)
    has_theory = any(line.is_theory for line in panel.lines)
    axes.set_xscale("log" if panel.x_log else "linear")
    axes.set_yscale("log" if panel.y_log else "linear")
    for line in panel.lines:
        if line.is_theory:
            axes.plot(line.x, line.y, label=line.label, **THEORY)
            continue
        group = line.group or line.label
        style = _style([*groups].index(group), groups[group].index(line), has_theory)
        axes.plot(line.x, line.y, label=line.label, **style)
        if line.note:
            note, end = textwrap.fill(line.note, NOTE_CHARACTERS), (line.x[-1], line.y[-1])
            look = {"va": "center", "fontsize": LABEL_SIZE - 1, "color": style["color"]}
            axes.annotate(note, end, (10, 0), textcoords="offset points", **look)
    if not panel.x_log and all(float(x).is_integer() for line in panel.lines for x in line.x):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    values = [value for line in panel.lines for value in line.y]
    if not panel.y_log and 0 <= min(values) < max(values) / 4:  # otherwise the curves would be flat
        axes.set_ylim(bottom=0)


def _style(group: int, member: int, has_theory: bool) -> dict[str, Any]:
    """Return the style of a measured curve: color and marker of its group, dash pattern of its place in the group.

    Next to a theoretical curve, measurements are hollow markers without a line, larger for each further group.
    """
    style = {
        "color": COLORS[group % len(COLORS)],
        "marker": MARKERS[(group + group // len(COLORS)) % len(MARKERS)],  # the colors repeat with other markers
        "markersize": 4.5,
        "linestyle": LINE_STYLES[member % len(LINE_STYLES)],
    }
    hollow = {"linestyle": "none", "markerfacecolor": "none", "markersize": 4 + 3 * group}
    return style | hollow if has_theory else style
