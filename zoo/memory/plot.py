"""Draws the memory of a training step over time, plain and lean."""

from __future__ import annotations

import io
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.errors import ConfigError, join_names
from zoo.files import write_bytes
from zoo.memory.trial import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Plots are transparent, with colors that are readable on white and dark pages.
GRAY, BLUE, ORANGE = "#7E7E86", "#2A7FC0", "#D55E00"
STYLE: Any = {
    "savefig.transparent": True, "savefig.dpi": 160, "font.size": 9, "axes.titlesize": 9, "figure.titlesize": 10,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "grid.color": GRAY,
    "grid.alpha": 0.25, "text.color": GRAY, "axes.labelcolor": GRAY, "axes.edgecolor": GRAY, "xtick.color": GRAY,
    "ytick.color": GRAY, "legend.frameon": False,
}  # fmt: skip
LINE_COLORS = (ORANGE, BLUE)  # plain, lean
WIDTH, HEIGHT = 7, 3.6  # inches; a page shows an inch in about 100 pixels
MIN_DISTANCE = 0.04  # minimum between two names on the axis, as a share of forward
FORMATS = ("pdf", "svg", "png", "jpg", "jpeg", "webp", "tif", "tiff", "eps", "ps")  # need no package but matplotlib


@contextmanager
def draw_figure(where: str, height: float = HEIGHT) -> Iterator[Figure]:
    """Yields an empty figure and applies the style of this package. Notebooks show the figure.

    Raises ConfigError for ``where`` if matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib", where, "pip install matplotlib") from error

    class InlineFigure(Figure):
        """A figure that notebooks show even if pyplot is not imported."""

        def _repr_png_(self) -> bytes:
            return _encode(self, "png")

    with rc_context(STYLE):
        figure = InlineFigure((WIDTH, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def draw_timelines(title: str, timelines: Mapping[str, Timeline]) -> Figure:
    """Plot timelines and their peaks. The axis names modules at their start in the first timeline.

    Notebooks show the figure. Raises ConfigError if matplotlib is not installed.
    """
    with draw_figure("MemoryReport.plot") as figure:
        axes = figure.add_subplot()
        for (name, timeline), color in zip(timelines.items(), LINE_COLORS, strict=False):
            times = [timeline.time_of(index) for index in range(len(timeline.bytes))]
            megabytes = [each / 1e6 for each in timeline.bytes]
            axes.fill_between(times, megabytes, step="post", color=color, alpha=0.25, linewidth=0)
            axes.step(times, megabytes, where="post", color=color, linewidth=1.2, label=name)
            peak = megabytes.index(max(megabytes))
            axes.plot(times[peak], megabytes[peak], "o", color=color)
            axes.annotate(
                f"{megabytes[peak]:.0f} MB",
                (times[peak], megabytes[peak]),
                (6, 4),
                textcoords="offset points",
                color=color,
            )
        first = next(iter(timelines.values()))
        ticks: list[float] = []
        labels: list[str] = []
        for change, name in first.starts:
            place = first.time_of(change)
            if place <= 1 and bisect_left(ticks, place - MIN_DISTANCE) == len(ticks):
                ticks.append(place)
                labels.append(name)
        axes.set_xticks(ticks, labels, rotation=60, ha="right", fontsize=8)
        axes.axvline(1, color=GRAY, linewidth=0.8, linestyle="--")
        for place, text in ((0.5, "forward"), (1.5, "backward")):
            axes.text(place, 1.01, text, transform=axes.get_xaxis_transform(), ha="center", va="bottom")
        axes.set_xlim(0, 2)
        axes.set_ylim(0, 1.1 * max(each.peak for each in timelines.values()) / 1e6)
        axes.set_ylabel("tensors in memory, MB")
        axes.set_title(title, pad=18)
        axes.legend(loc="upper left")
    return figure


def format_of(path: Path) -> str:
    """Return the format of an image file, which is its suffix. Raises ConfigError unless it is one of `FORMATS`."""
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in FORMATS:
        what = f"{path.suffix!r} is not the suffix of an image file" if suffix else "the file name has no suffix"
        raise ConfigError(what, path, f"use one of {join_names(f'.{each}' for each in FORMATS)}")
    return suffix


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format that the suffix of ``path`` names."""
    write_bytes(path, _encode(figure, format_of(path)))


def _encode(figure: Figure, kind: str) -> bytes:
    """Return a figure as a transparent image file."""
    from matplotlib import rc_context

    content = io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(content, format=kind)
    return content.getvalue()
