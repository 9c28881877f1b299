"""What a segmentation is reported with: a table of its classes, and examples beside their labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from torch import Tensor

from zoo.data.folder import Batch
from zoo.data.reading import read_image
from zoo.report.label_images import Palette, overlay_with_legend, write_png
from zoo.report.tables import Cell, markdown_table

if TYPE_CHECKING:
    from zoo.engine.task import Task
    from zoo.tasks.segmentation import SegmentationResult

MIN_SIDE_PX = 256  # smaller images are enlarged, so that their legends can be read


def class_table(result: SegmentationResult, names: Sequence[str]) -> str:
    """Return a Markdown table with a row per class: intersection over union, accuracy, and its part of the pixels.

    A class that no pixel has has no accuracy, and no intersection over union either if it was never predicted.
    """
    confusion = np.array(result.confusion)
    labelled, hits, pixels = confusion.sum(axis=1), confusion.diagonal(), confusion.sum()
    rows: list[list[Cell]] = [
        [
            name,
            result.iou[index],
            100 * float(hits[index] / labelled[index]) if labelled[index] else None,
            100 * float(labelled[index] / pixels),
        ]
        for index, name in enumerate(names)
    ]
    return markdown_table(["class", "IoU %", "accuracy %", "% of the pixels"], rows)


def write_examples(folder: Path, task: Task, palette: Palette, count: int) -> Callable[[Batch, Tensor], None]:
    """Return a function for the ``record`` of a validation that writes its first ``count`` images to ``folder``.

    Each file, NAME.png, shows an image, the image under its labels, and under the predictions, each with a legend.
    """
    written = 0
    shown = Palette(np.vstack([palette.colors, np.zeros_like(palette.colors[:1])]), [*palette.names, "no label"])

    def record(batch: Batch, logits: Tensor) -> None:
        nonlocal written
        if written == count:
            return
        written += 1
        path = Path(batch.paths[0])
        image, maps = read_image(path), task.class_maps(logits, batch.targets)
        factor = -(-MIN_SIDE_PX // max(image.size))
        large = image.resize((factor * image.width, factor * image.height), Image.Resampling.NEAREST)
        sheets = [large]
        for classes in maps.values():
            numbers = classes.clamp(max=len(palette)).numpy()  # the ignore label is behind the classes
            sheets.append(overlay_with_legend(large, numbers.repeat(factor, 0).repeat(factor, 1), shown))
        write_png(folder / f"{path.stem}.png", _side_by_side(sheets))

    return record


def _side_by_side(images: Sequence[Image.Image]) -> Image.Image:
    """Return the images in a row, aligned at the top, on white."""
    row = Image.new("RGB", (sum(image.width for image in images), max(image.height for image in images)), "white")
    left = 0
    for image in images:
        row.paste(image, (left, 0))
        left += image.width
    return row
