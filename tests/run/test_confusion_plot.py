"""The plot of a confusion matrix: its colours are the shares of the rows."""

import io

import numpy as np
import pytest
from PIL import Image

from zoo.run.confusion_plot import confusion_plot

pytest.importorskip("matplotlib")


def colours(matrix: np.ndarray) -> np.ndarray:
    """Return the pixels of the plot, (H, W, 3)."""
    names = [f"class {number}" for number in range(len(matrix))]
    return np.asarray(Image.open(io.BytesIO(confusion_plot(matrix, names, "a title"))).convert("RGB"))


def test_rows_are_divided_by_their_sums() -> None:
    """So that a rare class is as dark on the diagonal as a frequent one."""
    rare = colours(np.array([[900, 100], [1, 9]]))
    assert np.array_equal(rare, colours(np.array([[90, 10], [100, 900]])))
    assert not np.array_equal(rare, colours(np.array([[900, 100], [2, 8]])))


@pytest.mark.parametrize("num_classes", [1, 11])
def test_classes_without_pixels_are_gray(num_classes: int) -> None:
    matrix = np.diag(np.full(num_classes, 7))
    all_there = np.sum(colours(matrix) == 216)  # of letters
    matrix[-1] = 0
    assert np.sum(colours(matrix) == 216) - all_there > 3 * 15**2 * num_classes
