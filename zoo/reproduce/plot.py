"""Plots of reproduced tables and figures, drawn from the panels of a report's sections.

``python -m zoo.reproduce.plot FILE.json`` draws them anew from the report of an earlier run.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.files import write_bytes
from zoo.reproduce.comparison import Line, Panel, Section
from zoo.run.plot_style import COLORS, LABEL_SIZE, MARKERS, TITLE_SIZE, new_figure, png_of, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

THEORY: dict[str, Any] = {"color": "0.45", "linestyle": "-", "linewidth": 1.0, "zorder": 1}
LINE_STYLES = ("-", "--", ":", "-.")
COLUMNS = 2
WIDTH, HEIGHT = 4.5, 3.4  # inches of a panel without its legend
SINGLE_WIDTH, SINGLE_HEIGHT = 7, 4.5  # the same, where it is the only one of a plot
LEGEND_LINE = 0.17  # inches
LEGEND_CHARACTERS = 6  # of the labels in two columns, to an inch of the panel
TITLE_CHARACTERS = 14  # to an inch
NOTE_CHARACTERS = 30  # in a line


def draw(section: Section, columns: int = COLUMNS) -> bytes:
    """Return the PNG plot of a section's panels (at least one) in at most ``columns`` columns."""
    from matplotlib.ticker import MaxNLocator

    columns = min(columns, len(section.panels))
    rows = -(-len(section.panels) // columns)
    width, height = (SINGLE_WIDTH, SINGLE_HEIGHT) if len(section.panels) == 1 else (WIDTH, HEIGHT)
    longest = max(len(line.label) for panel in section.panels for line in panel.lines)
    legend_columns = 2 if longest < LEGEND_CHARACTERS * width else 1
    height += LEGEND_LINE * -(-max(len(panel.lines) for panel in section.panels) // legend_columns)
    title = textwrap.fill(section.title, int(TITLE_CHARACTERS * width * columns))
    figure = new_figure(width * columns, height * rows, title)
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, panel in zip(places, section.panels, strict=False):
        _draw_lines(axes, panel)
        style_axes(axes, panel.x_label, panel.y_label)
        axes.set_title(panel.title, fontsize=TITLE_SIZE)
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
        axes.legend(**below, ncols=legend_columns, fontsize=LABEL_SIZE - 1, frameon=False)
        if not panel.x_log:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in places[len(section.panels) :]:
        axes.set_axis_off()
    return png_of(figure)


def _draw_lines(axes: Axes, panel: Panel) -> None:
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
    values = [value for line in panel.lines for value in line.y]
    if not panel.y_log and 0 <= min(values) < max(values) / 4:  # else the axis is as long as the curves
        axes.set_ylim(bottom=0)


def _style(group: int, member: int, has_theory: bool) -> dict[str, Any]:
    """Return the style of a measured curve: a colour and marker for its group, a dash pattern for its place there.

    Where a formula is drawn too, it is of hollow marks in place of a line, each larger than those before.
    """
    style = {
        "color": COLORS[group % len(COLORS)],
        "marker": MARKERS[group % len(MARKERS)],
        "markersize": 4.5,
        "linestyle": LINE_STYLES[member % len(LINE_STYLES)],
    }
    hollow = {"linestyle": "none", "markerfacecolor": "none", "markersize": 4 + 3 * group}
    return style | hollow if has_theory else style


def draw_report(path: Path) -> None:
    """Draw the plots of the report ``path``, a JSON file, into files beside it."""
    report = json.loads(path.read_text(encoding="utf-8"))
    for content in report["sections"]:
        panels = [Panel(**panel | {"lines": [Line(**line) for line in panel["lines"]]}) for panel in content["panels"]]
        if panels:
            section = Section(content["key"], content["title"], content["setting"], panels=panels)
            write_bytes(path.with_name(f"{path.stem}_{section.key}.png"), draw(section))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        draw_report(Path(name))
