"""Writes the files that ``python -m tests.golden`` generates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def write_changed(texts: Mapping[Path, str]) -> list[Path]:
    """Write the files whose text changes, and return their paths."""
    changed = {path: text for path, text in texts.items() if not path.exists() or path.read_text() != text}
    for path, text in changed.items():
        path.write_text(text)
    return list(changed)


def print_changes(paths: Sequence[Path]) -> None:
    """Print the paths that were written."""
    print("\n".join(map(str, dict.fromkeys(paths))) or "nothing changed")
