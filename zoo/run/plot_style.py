"""The style that all plots share: colours, markers, axes, and the PNG file that they become."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from zoo.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colour-blind readers can tell these colours apart (Okabe and Ito's palette), and without colours the markers do.
BLACK, ORANGE, GREEN, BLUE, PINK, AMBER, SKY = (
    "#000000", "#D55E00", "#009E73", "#0072B2", "#CC79A7", "#E69F00", "#56B4E9",
)  # fmt: skip
COLORS = (BLUE, ORANGE, GREEN, PINK, BLACK, AMBER, SKY)
MARKERS = ("o", "s", "^", "v", "D", "x", "P")
DPI = 120
TITLE_SIZE, LABEL_SIZE = 10, 9  # points of print


def check_matplotlib(without: str = "leave the plot out with --no-picture") -> None:
    """Raise ConfigError where there is no matplotlib; ``without`` says how to do without the plot."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the plot needs matplotlib: pip install matplotlib (the package's extra `plot`), or {without}"
        ) from error


def new_figure(width: float, height: float, title: str) -> Figure:
    """Return an empty figure of ``width`` x ``height`` inches, which is drawn without a window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=TITLE_SIZE, parse_math=False)
    return figure


def style_axes(axes: Axes, x_label: str, y_label: str) -> None:
    """Give the axes their labels and a grid behind the data, and take the upper and the right border away."""
    axes.set_xlabel(x_label, fontsize=LABEL_SIZE)
    axes.set_ylabel(y_label, fontsize=LABEL_SIZE)
    axes.tick_params(labelsize=LABEL_SIZE)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def png_of(figure: Figure) -> bytes:
    """Return the content of the figure's PNG file."""
    file = io.BytesIO()
    figure.savefig(file, dpi=DPI, format="png")
    return file.getvalue()
