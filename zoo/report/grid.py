"""Images with words below them, in rows and columns."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

from zoo.files import write_bytes

TILE_PX = 192
MARGIN_PX = 8
LINE_PX = 14
MAX_COLUMNS = 6
PAPER, INK = "white", "black"


def image_grid(images: Sequence[tuple[Image.Image, Sequence[str]]]) -> Image.Image:
    """Return one RGB image of all ``images``, row by row, each above its lines of text.

    Each is scaled to fit into a square of 192 px, its pixels kept as they are where it is smaller. The font is PIL's
    own; a line that is too long is cut, and what the font has no sign for becomes a question mark.
    """
    columns = min(MAX_COLUMNS, max(1, math.ceil(math.sqrt(len(images)))))
    rows = max(1, math.ceil(len(images) / columns))
    num_lines = max((len(lines) for _, lines in images), default=0)
    width, height = TILE_PX + MARGIN_PX, TILE_PX + num_lines * LINE_PX + 2 * MARGIN_PX
    sheet = Image.new("RGB", (columns * width + MARGIN_PX, rows * height + MARGIN_PX), PAPER)
    for index, (image, lines) in enumerate(images):
        row, column = divmod(index, columns)
        _draw_tile(sheet, MARGIN_PX + column * width, MARGIN_PX + row * height, image, lines)
    return sheet


def write_grid(path: Path, images: Sequence[tuple[Image.Image, Sequence[str]]]) -> None:
    """Write the grid of ``images`` to ``path`` as PNG, whole or not at all."""
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
        draw.text(place, _cut(line, font), fill=INK, font=font)


def _cut(line: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> str:
    line = line.encode("latin-1", errors="replace").decode("latin-1")
    if font.getlength(line) <= TILE_PX:
        return line
    while line and font.getlength(f"{line}...") > TILE_PX:
        line = line[:-1]
    return f"{line}..."
