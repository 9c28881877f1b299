"""Formatting of Markdown pages, lists, aligned tables and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Cell = str | int | float | None


def markdown_page(blocks: Iterable[str]) -> str:
    """Join the non-empty blocks (headings, paragraphs, lists, tables) into a Markdown page."""
    return "\n\n".join(filter(None, blocks)) + "\n"


def markdown_list(items: Iterable[str]) -> str:
    """Return a Markdown list, or "" without items."""
    return "\n".join(f"- {item}" for item in items)


def counted(count: int, what: str) -> str:
    """Return a count with its noun in singular or plural, such as "1 image", "2 images", "2 classes"."""
    plural = "es" if what.endswith(("s", "tch")) else "s"
    return f"{count:,} {what}{plural * (count != 1)}"


def bytes_text(count: float) -> str:
    """Return a number of bytes with three digits and a suitable unit, such as "61.4 kB"."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def key_value_text(values: Mapping[str, object]) -> str:
    """Return "key value, key value", omitting values that are None or empty."""
    return ", ".join(f"{key} {value}" for key, value in values.items() if value not in (None, ""))


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a Markdown table with aligned columns, without a trailing newline.

    Floats have two decimals, None is an empty cell, and columns of numbers are right-aligned.
    """
    numeric = [_is_numeric([row[index] for row in rows]) for index in range(len(headers))]
    texts = [[_text(header) for header in headers], *([_text(cell) for cell in row] for row in rows)]
    widths = [max(3, *(len(line[index]) for line in texts)) for index in range(len(headers))]
    rule = ["-" * (width - 1) + ":" if right else "-" * width for width, right in zip(widths, numeric, strict=True)]
    lines = [texts[0], rule, *texts[1:]]
    return "\n".join(_line(line, widths, numeric) for line in lines)


def number_text(value: Cell) -> str:
    """Return a number with four significant digits, or all digits of an integer below 1e9.

    Numbers from 10,000 to 1e9 are rounded to integers with commas. Text is returned unchanged, None as "".
    """
    if value is None or isinstance(value, str):
        return value or ""
    if 1e4 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return str(value) if isinstance(value, int) and abs(value) < 1e4 else f"{value:.4g}"


def _is_numeric(column: Sequence[Cell]) -> bool:
    filled = [cell for cell in column if cell is not None]
    return bool(filled) and all(isinstance(cell, (int, float)) for cell in filled)


def _text(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.2f}"
    return str(cell).replace("|", "\\|")


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    padded = [
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(cells, widths, numeric, strict=True)
    ]
    return f"| {' | '.join(padded)} |"
