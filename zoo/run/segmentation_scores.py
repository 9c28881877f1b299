"""Report of a segmentation: a table of the classes, and example images with labels and predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from zoo.data.folder import Batch
from zoo.data.reading import read_image
from zoo.errors import escape
from zoo.run.label_images import Palette, overlay_with_legend, write_png
from zoo.tables import Cell, markdown_table
from zoo.tasks.confusion import ConfusionMatrix

if TYPE_CHECKING:
    from zoo.engine.task import Task
    from zoo.tasks.segmentation import SegmentationResult

MIN_SIDE_PX = 256  # smaller images are enlarged to make their legends readable
TITLE_PX, LETTER_PX = 18, 12


def class_table(result: SegmentationResult, names: Sequence[str]) -> str:
    """Return a Markdown table with a row per class: intersection over union, accuracy, and share of the pixels.

    A class without labeled pixels has no accuracy, and without predicted pixels no intersection over union either.
    """
    confusion = ConfusionMatrix(torch.tensor(result.confusion))
    shares = (100 * confusion.counts.sum(1) / confusion.pixels).tolist()
    columns = zip(names, result.iou, confusion.class_accuracy, shares, strict=True)
    rows: list[list[Cell]] = [list(row) for row in columns]
    return markdown_table(["class", "IoU %", "accuracy %", "% of the pixels"], rows)


def write_examples(folder: Path, task: Task, palette: Palette, count: int) -> Callable[[Batch, Tensor], None]:
    """Return a callback, for ``record`` of a validation, that writes the first ``count`` images to ``folder``.

    Each file, NUMBER-NAME.png, shows the image, and overlays of its labels and predictions with legends.
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
        sheets = {path.name: large}
        for title, classes in maps.items():
            numbers = classes.clamp(max=len(palette)).numpy()  # maps the ignore label to the entry "no label"
            sheets[title] = overlay_with_legend(large, numbers.repeat(factor, 0).repeat(factor, 1), shown)
        write_png(folder / f"{written}-{path.stem}.png", _side_by_side(sheets))

    return record


def _side_by_side(images: Mapping[str, Image.Image]) -> Image.Image:
    """Return the images in a row on a white background, each below its title."""
    width, height = sum(image.width for image in images.values()), max(image.height for image in images.values())
    row = Image.new("RGB", (width, height + TITLE_PX), "white")
    draw, font, left = ImageDraw.Draw(row), ImageFont.load_default(LETTER_PX), 0
    for title, image in images.items():
        draw.text((left + 2, TITLE_PX // 2), escape(title), fill="black", font=font, anchor="lm")
        row.paste(image, (left, TITLE_PX))
        left += image.width
    return row
