"""Draws panels with curves in one style, with matplotlib."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo.errors import ConfigError
from zoo.memory.plot import BLUE, GRAY, ORANGE, STYLE

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

# Colors are readable on white and dark pages. They are equally bright, so markers distinguish curves, too.
COLORS = (BLUE, ORANGE, "#0E8F66", "#C8609F", "#8A6BD8", "#97770A", "#178A9A")
MARKERS = "os^vDXP"
LINE_STYLES = ("-", ":", "-.")  # the style changes when the colors repeat
WIDTH = 7.0  # inches of a plot; a page shows an inch in about 100 pixels
HEIGHT, POINTS_HEIGHT = 2.6, 3.4  # inches of a panel, without and with named points
LEGEND_LINE, TITLE_LINE = 0.19, 0.2  # inches
TITLE_CHARACTERS = 100  # maximum per line
NUM_MARKERS, MAX_MARKERS = 12, 50  # a curve with more than MAX_MARKERS points has about NUM_MARKERS markers
MAX_LABEL_CHARACTERS = 40  # maximum in a legend of two columns
# Offsets of a name from its point, in typographic points: beside, above, below, then farther away with a line.
OFFSETS = [
    (x * distance, y * distance)
    for distance in range(6, 80, 6)
    for x, y in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
]
NEAR = 12  # maximum offset without a line, in typographic points


@dataclass(frozen=True)
class Line:
    """A curve of a panel.

    Args:
    - `label`: entry of the legend. Curves with the same label share color, marker and entry.
    - `x`, `y`: coordinates.
    - `is_theory`: the curve follows from a formula, not from a measurement.
    - `names`: names of the points. They replace the legend, and named points are not connected.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    is_theory: bool = False
    names: Sequence[str] | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes, each linear or logarithmic, with at least one curve.

    With ``is_bars``, each curve becomes a bar with the length of its largest x.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    x_log: bool = False
    y_log: bool = False
    is_bars: bool = False


def draw_panels(title: str, panels: Sequence[Panel]) -> bytes:
    """Draw the ``panels``, at least one, in at most two columns with one legend. Return a transparent PNG file."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    title = "\n".join(textwrap.fill(line, TITLE_CHARACTERS) for line in title.splitlines())
    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines if not line.is_theory))
    have_names = any(line.names is not None for panel in panels for line in panel.lines)
    columns = 1 if have_names else min(2, len(panels))
    rows = -(-len(panels) // columns)
    height = rows * (POINTS_HEIGHT if have_names else HEIGHT if columns == 2 else HEIGHT + 0.6)
    legend_columns = 1 if max(map(len, labels)) > MAX_LABEL_CHARACTERS else 2
    height += TITLE_LINE * len(title.splitlines()) + LEGEND_LINE * (len(labels) + 1) / legend_columns
    with rc_context(STYLE):
        figure = Figure((WIDTH, height), layout="constrained")
        canvas = FigureCanvasAgg(figure)
        figure.suptitle(title, parse_math=False)
        entries: dict[str, Artist] = {}
        for place, panel in enumerate(panels, start=1):
            _draw(figure.add_subplot(rows, columns, place), panel, labels, entries)
        entries = {label: entries[label] for label in (*labels, *entries) if label in entries}  # laws last
        if have_names:
            _add_names(figure, canvas, panels, labels)
        elif len(panels) < rows * columns:
            free = figure.add_subplot(rows, columns, rows * columns)
            free.axis("off")
            free.legend(entries.values(), entries, loc="center")
        elif entries:
            figure.legend(entries.values(), entries, loc="outside lower center", ncols=legend_columns)
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


def color_of(label: str, labels: Sequence[str]) -> str:
    """Return the color of the curves with a label among all ``labels`` of a plot."""
    return COLORS[labels.index(label) % len(COLORS)]


def _draw(axes: Axes, panel: Panel, labels: Sequence[str], entries: dict[str, Artist]) -> None:
    """Draw the curves of a panel, and add their labels to the ``entries`` of the legend.

    Beside a theoretical curve, measurements are open markers of growing size, so that equal values remain visible. For
    the same reason, a curve that covers an earlier one is dashed.
    """
    from matplotlib.ticker import MaxNLocator

    if panel.is_bars:
        _draw_bars(axes, panel, labels)
        return
    have_theory = any(line.is_theory for line in panel.lines)
    drawn: set[tuple[float, ...]] = set()
    for number, line in enumerate(panel.lines):
        if line.is_theory:
            (curve,) = axes.plot(line.x, line.y, color=GRAY, linewidth=1)
            entries.setdefault(line.label, curve)
            continue
        index = labels.index(line.label)
        style = LINE_STYLES[index // len(COLORS) % len(LINE_STYLES)]
        values = (*line.x, *line.y)
        covers = values in drawn
        drawn.add(values)
        (curve,) = axes.plot(
            line.x, line.y,
            color=color_of(line.label, labels),
            linestyle="none" if have_theory or line.names else (0, (3, 3)) if covers else style,
            linewidth=1.3,
            marker=MARKERS[index % len(MARKERS)],
            markersize=4 + 2.5 * number if have_theory else 4,
            markevery=None if have_theory or len(line.x) <= MAX_MARKERS else -(-len(line.x) // NUM_MARKERS),
            fillstyle="none" if have_theory else "full",
        )  # fmt: skip
        entries.setdefault(line.label, curve)
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.set_xscale("log" if panel.x_log else "linear")
    axes.set_yscale("log" if panel.y_log else "linear")
    if not panel.x_log and all(isinstance(x, int) for line in panel.lines for x in line.x):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid()


def _draw_bars(axes: Axes, panel: Panel, labels: Sequence[str]) -> None:
    """Draw a bar with its value for each curve of a panel, from top to bottom."""
    names, values = [line.label for line in panel.lines], [max(line.x) for line in panel.lines]
    bars = axes.barh(names, values, color=[color_of(name, labels) for name in names])
    axes.bar_label(bars, padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(panel.title, loc="right")
    axes.set_xlabel(panel.x_label)


def _add_names(figure: Figure, canvas: FigureCanvasAgg, panels: Sequence[Panel], labels: Sequence[str]) -> None:
    """Place the names of points so that they cover neither each other nor another point."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    for axes in figure.axes:
        axes.margins(0.1, 0.15)
    canvas.draw()
    figure.set_layout_engine("none")  # otherwise the names would move the axes
    renderer = canvas.get_renderer()
    for axes, panel in zip(figure.axes, panels, strict=True):
        points = [
            (line, *point) for line in panel.lines for point in zip(line.x, line.y, line.names or (), strict=True)
        ]
        places = [axes.transData.transform((x, y)) for _, x, y, _ in points]
        taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in places]
        for line, x, y, name in points:
            for right, up in OFFSETS:
                has_line = max(abs(right), abs(up)) > NEAR
                text = axes.annotate(
                    name, (x, y), (right, up), textcoords="offset points", color=color_of(line.label, labels),
                    fontsize=8,
                    ha="left" if right > 0 else "right" if right < 0 else "center",
                    va="bottom" if up > 0 else "top" if up < 0 else "center",
                    arrowprops={"arrowstyle": "-", "color": GRAY, "linewidth": 0.5} if has_line else None,
                )  # fmt: skip
                text.update_positions(renderer)
                box = Text.get_window_extent(text, renderer)  # without the line
                if axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max) and not box.count_overlaps(taken):
                    break
                text.remove()
            else:
                axes.add_artist(text)
            taken.append(box)
