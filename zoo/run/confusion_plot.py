"""Plot of a confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from zoo.run.plot_style import LABEL_SIZE, new_figure, png_of

MAX_CLASSES_WITH_NUMBERS = 24  # with more classes, the numbers do not fit into the cells
CELL_SIZE, SMALL_CELL_SIZE = 0.42, 0.16  # inches of a cell with and without a number
MARGIN = 2.6  # inches around the cells, for names and color bar
EMPTY_ROW_COLOR = "0.85"  # gray, for classes without pixels
MAX_NAME_LENGTH = 28  # characters


def confusion_plot(matrix: npt.NDArray[np.int64], names: Sequence[str], title: str) -> bytes:
    """Return a PNG of a confusion matrix, each row divided by its sum.

    Args:
    - `matrix`: numbers of pixels (classes, classes); rows are labels, columns predictions.
    - `names`: names of the classes.
    - `title`: title of the plot.
    """
    from matplotlib import colormaps

    pixels = matrix.sum(axis=1, keepdims=True)
    shares = np.where(pixels > 0, 100 * matrix / np.maximum(pixels, 1), np.nan)
    has_numbers = len(names) <= MAX_CLASSES_WITH_NUMBERS
    cell, size = (CELL_SIZE, LABEL_SIZE - 2) if has_numbers else (SMALL_CELL_SIZE, LABEL_SIZE - 3)
    side = cell * len(names) + MARGIN
    figure = new_figure(side + 0.8, side, title)
    axes = figure.subplots()
    colors = colormaps["Blues"].with_extremes(bad=EMPTY_ROW_COLOR)
    shown = axes.imshow(np.ma.masked_invalid(shares), cmap=colors, vmin=0, vmax=100)
    shortened = [name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 3]}..." for name in names]
    # Class names such as "$a" or "^_^" are not formulas.
    axes.set_xticks(range(len(names)), shortened, rotation=90, fontsize=size, parse_math=False)
    axes.set_yticks(range(len(names)), shortened, fontsize=size, parse_math=False)
    axes.set_xlabel("prediction", fontsize=LABEL_SIZE)
    axes.set_ylabel("label (gray: no pixels)" if np.isnan(shares).any() else "label", fontsize=LABEL_SIZE)
    scale = figure.colorbar(shown, ax=axes, shrink=0.7)
    scale.set_label("% of the pixels of a label", fontsize=LABEL_SIZE)
    scale.ax.tick_params(labelsize=LABEL_SIZE - 2)
    if has_numbers:
        for (row, column), share in np.ndenumerate(shares):
            if share >= 0.5:  # rounds to at least 1; False for NaN
                color = "white" if share > 60 else "black"
                axes.text(column, row, f"{share:.0f}", ha="center", va="center", fontsize=size, color=color)
    return png_of(figure)
