"""Prediction files: reads and writes a CSV line per image, and draws a grid of images with their classes."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

from zoo.errors import DataError, truncate
from zoo.files import write_bytes, write_text
from zoo.tasks.prediction import DEFAULT_TOP, Prediction

TILE_PX = 192
MARGIN_PX = 8
LINE_PX = 14
MAX_COLUMNS = 6
BACKGROUND, TEXT_COLOR = "white", "black"
_REMEDY = "give a file written by zoo validate --predictions"


def write_predictions(path: Path, predictions: Sequence[Prediction]) -> None:
    """Write a CSV file with a header and a line per image, sorted by path.

    Columns: path, target, class1 to class5, probability1 to probability5; fewer if the network has fewer classes.
    Probabilities (0 to 1) have six decimals; further digits depend on the device's order of summation. The file is
    written atomically.
    """
    lines = sorted(predictions, key=lambda prediction: prediction.path)
    places = range(1, 1 + max((len(line.classes) for line in lines), default=0))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["path", "target", *(f"class{n}" for n in places), *(f"probability{n}" for n in places)])
    for line in lines:
        writer.writerow([line.path, line.target, *line.classes, *(f"{value:.6f}" for value in line.probabilities)])
    write_text(path, text.getvalue())


def read_predictions(path: Path) -> dict[str, Prediction]:
    """Return the predictions in a file of `write_predictions`, by image path, without probabilities.

    Raises DataError, with the line, for a malformed file and for a repeated image.
    """
    found: dict[str, Prediction] = {}
    try:
        with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
            reader = csv.reader(file)
            header = next(reader, [])
            places = [header.index(name) for name in (f"class{n}" for n in range(1, DEFAULT_TOP + 1)) if name in header]
            missing = [name for name in ("path", "target", "class1") if name not in header]
            if missing:
                raise DataError(f"the column {missing[0]} is missing", path, _REMEDY)
            name, target = header.index("path"), header.index("target")
            for cells in reader:
                line = f"{path}, line {reader.line_num}"
                numbers = [cells[place] for place in (target, *places)] if len(cells) == len(header) else [""]
                if not all(map(str.isdecimal, numbers)):
                    raise DataError("the line does not have a path, a target and classes", line, _REMEDY)
                if cells[name] in found:
                    raise DataError(f"{truncate(cells[name])} is repeated", line, _REMEDY)
                true_class, *classes = map(int, numbers)
                found[cells[name]] = Prediction(cells[name], true_class, tuple(classes), ())
    except (OSError, csv.Error, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"the predictions cannot be read: {reason}", path, _REMEDY) from error
    if not found:
        raise DataError("the file has no predictions", path, _REMEDY)
    return found


def image_grid(images: Sequence[tuple[Image.Image, Sequence[str]]]) -> Image.Image:
    """Return an RGB image with all ``images`` in a grid, each above its lines of text.

    Images are scaled to fit into 192 x 192 px; smaller ones are enlarged by nearest neighbor. The font is PIL's
    default; see `cut_line` for long lines.
    """
    columns = min(MAX_COLUMNS, max(1, math.ceil(math.sqrt(len(images)))))
    rows = max(1, math.ceil(len(images) / columns))
    num_lines = max((len(lines) for _, lines in images), default=0)
    width, height = TILE_PX + MARGIN_PX, TILE_PX + num_lines * LINE_PX + 2 * MARGIN_PX
    sheet = Image.new("RGB", (columns * width + MARGIN_PX, rows * height + MARGIN_PX), BACKGROUND)
    for index, (image, lines) in enumerate(images):
        row, column = divmod(index, columns)
        _draw_tile(sheet, MARGIN_PX + column * width, MARGIN_PX + row * height, image, lines)
    return sheet


def write_grid(path: Path, images: Sequence[tuple[Image.Image, Sequence[str]]]) -> None:
    """Write the `image_grid` of ``images`` to ``path`` as PNG, atomically."""
    content = io.BytesIO()
    image_grid(images).save(content, format="PNG")
    write_bytes(path, content.getvalue())


def _draw_tile(sheet: Image.Image, left: int, top: int, image: Image.Image, lines: Sequence[str]) -> None:
    enlarged = max(image.size) < TILE_PX
    method = Image.Resampling.NEAREST if enlarged else Image.Resampling.LANCZOS
    fitted = ImageOps.contain(image.convert("RGB"), (TILE_PX, TILE_PX), method)
    sheet.paste(fitted, (left + (TILE_PX - fitted.width) // 2, top + (TILE_PX - fitted.height) // 2))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for number, line in enumerate(lines):
        place = left, top + TILE_PX + MARGIN_PX // 2 + number * LINE_PX
        draw.text(place, cut_line(line, font, TILE_PX), fill=TEXT_COLOR, font=font)


def cut_line(line: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: float) -> str:
    """Return ``line`` shortened with "..." to at most ``width`` px; "?" replaces characters that the font lacks."""
    line = line.encode("latin-1", errors="replace").decode("latin-1")
    if font.getlength(line) <= width:
        return line
    while line and font.getlength(f"{line}...") > width:
        line = line[:-1]
    return f"{line}..."
