"""A plot of a confusion matrix: which classes the pixels of each class are taken for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from zoo.run.plot_style import LABEL_SIZE, new_figure, png_of

MAX_WITH_NUMBERS = 24  # classes: with more of them the numbers would not fit into the cells
CELL, MARGIN = 0.42, 2.6  # inches of a cell with a number, and of the names and the scale around the cells
SMALL_CELL = 0.16
NO_PIXELS = "0.85"  # grey of the rows of classes that no pixel has
MAX_NAME = 28  # characters


def confusion_plot(matrix: npt.NDArray[np.int64], names: Sequence[str], title: str) -> bytes:
    """Return a PNG of a confusion matrix, each row divided by its sum.

    Args:
    - `matrix`: numbers of pixels (classes, classes); a row is a label, a column a prediction.
    - `names`: names of the classes.
    - `title`: text above the plot.
    """
    from matplotlib import colormaps

    pixels = matrix.sum(axis=1, keepdims=True)
    shares = np.where(pixels > 0, 100 * matrix / np.maximum(pixels, 1), np.nan)
    has_numbers = len(names) <= MAX_WITH_NUMBERS
    cell, size = (CELL, LABEL_SIZE - 2) if has_numbers else (SMALL_CELL, LABEL_SIZE - 3)
    side = cell * len(names) + MARGIN
    figure = new_figure(side + 0.8, side, title)
    axes = figure.subplots()
    colors = colormaps["Blues"].with_extremes(bad=NO_PIXELS)
    shown = axes.imshow(np.ma.masked_invalid(shares), cmap=colors, vmin=0, vmax=100)
    shortened = [name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 3]}..." for name in names]
    # A class may be called "$a" or "^_^", which is no formula.
    axes.set_xticks(range(len(names)), shortened, rotation=90, fontsize=size, parse_math=False)
    axes.set_yticks(range(len(names)), shortened, fontsize=size, parse_math=False)
    axes.set_xlabel("prediction", fontsize=LABEL_SIZE)
    axes.set_ylabel("label (grey: no pixels)" if np.isnan(shares).any() else "label", fontsize=LABEL_SIZE)
    scale = figure.colorbar(shown, ax=axes, shrink=0.7)
    scale.set_label("% of the pixels of a label", fontsize=LABEL_SIZE)
    scale.ax.tick_params(labelsize=LABEL_SIZE - 2)
    if has_numbers:
        for (row, column), share in np.ndenumerate(shares):
            if share >= 0.5:  # rounds to 1 at least; False for NaN
                color = "white" if share > 60 else "black"
                axes.text(column, row, f"{share:.0f}", ha="center", va="center", fontsize=size, color=color)
    return png_of(figure)
