"""Files that a command of the tests generates: it writes those that change, and prints which."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def write_changed(path: Path, text: str) -> list[Path]:
    """Write a file if its text changes, and return its path in a list; an empty list if it does not."""
    if path.exists() and path.read_text() == text:
        return []
    path.write_text(text)
    return [path]


def print_changes(paths: Sequence[Path]) -> None:
    """Print the paths that were written."""
    print("\n".join(map(str, dict.fromkeys(paths))) or "nothing changed")
