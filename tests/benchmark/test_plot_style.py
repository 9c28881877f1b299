"""Plots have one legend or labeled points, and colors that are readable on white and dark pages."""

from __future__ import annotations

import io
import itertools
import sys
from typing import Any

import pytest
from PIL import Image

from tests.refusals import refused
from zoo.benchmark import plot_style
from zoo.benchmark.plot_style import COLORS, GRAY, LINE_STYLES, Line, Panel, draw_panels
from zoo.errors import ConfigError

WHITE, DARK = "#ffffff", "#1e2029"  # the pages of the documentation


def luminance(color: str) -> float:
    """Return the relative luminance by the W3C's accessibility guidelines."""
    values = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("color", [*COLORS, GRAY])
@pytest.mark.parametrize("page", [WHITE, DARK])
def test_colors_are_readable_on_pages(color: str, page: str) -> None:
    low, high = sorted((luminance(color), luminance(page)))
    assert (high + 0.05) / (low + 0.05) > 3.5  # the guidelines ask for 3 for pictures and large text


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures that are saved."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    saved: list[Any] = []
    save = figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda self, *args, **kw: [saved.append(self), save(self, *args, **kw)])
    return saved


def panel(*labels: str, **options: Any) -> Panel:
    return Panel("p", "x", "y", [Line(label, [1, 2], [3.0, 4.0 + len(label)], **options) for label in labels])


def legends(figure: Any) -> list[list[str]]:
    found = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    return [[text.get_text() for text in legend.get_texts()] for legend in found]


@pytest.mark.parametrize(("count", "axes"), [(1, 1), (2, 2), (3, 4), (4, 4)])
def test_plot_places_one_legend_in_free_space(figures: list[Any], count: int, axes: int) -> None:
    content = draw_panels("title", [panel("a", "bb")] * count)
    assert legends(figures[0]) == [["a", "bb"]]
    assert len(figures[0].axes) == axes
    with Image.open(io.BytesIO(content)) as image:
        assert image.mode == "RGBA"
        assert image.getpixel((0, 0))[3] == 0  # type: ignore[index]


def test_labels_have_unique_colors_in_all_panels(figures: list[Any]) -> None:
    labels = ["a" * length for length in range(1, 11)]  # curves of different heights
    assert len(COLORS) < len(labels) <= len(COLORS) * len(LINE_STYLES)
    draw_panels("title", [panel(*labels), panel(*reversed(labels))])
    first, second = ([(line.get_color(), line.get_linestyle()) for line in axes.lines] for axes in figures[0].axes)
    assert first == second[::-1]
    assert len(set(first)) == len(labels)


def test_covering_curve_and_law_are_distinguished(figures: list[Any]) -> None:
    draw_panels("title", [panel("a", "b")])
    assert [line.get_linestyle() for line in figures[0].axes[0].lines] == ["-", "--"]
    law = Line("law", [1, 2], [3.0, 5.0], is_theory=True)
    draw_panels("title", [Panel("p", "x", "y", [law, *panel("a", "b").lines])])
    _, a, b = figures[1].axes[0].lines
    assert a.get_markersize() < b.get_markersize()
    assert legends(figures[1]) == [["a", "b", "law"]]


def test_names_of_points_do_not_overlap(figures: list[Any]) -> None:
    from matplotlib.text import Text

    rows = [("a", 1.0, 1.0), ("b", 1.01, 1.0), ("c", 1.0, 1.01), ("d", 1.02, 1.02), ("e", 1.5, 2.0)]
    names = {label: f"strategy {label}, with a long name" for label, _, _ in rows}
    lines = [Line(label, [x], [y], names=[names[label]]) for label, x, y in rows]
    draw_panels("title", [Panel("p", "x", "y", lines)] * 2)
    (figure,) = figures
    assert legends(figure) == []
    figure.canvas.draw()
    for axes in figure.axes:
        assert sorted(text.get_text() for text in axes.texts) == sorted(names.values())
        boxes = [Text.get_window_extent(text) for text in axes.texts]
        assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]


def test_without_matplotlib_error_names_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(ConfigError, lambda: plot_style.check_matplotlib(), "--no-plot")


def test_bars_show_largest_values(figures: list[Any]) -> None:
    lines = [Line("a", [1, 7], [0.0, 0.0]), Line("b", [2, 3], [0.0, 0.0])]
    draw_panels("title", [Panel("p", "x", "y", lines, is_bars=True)])
    (axes,) = figures[0].axes
    assert [bar.get_width() for bar in axes.patches] == [7, 3]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
