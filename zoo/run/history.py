"""The history of the checkout: which commits it has, and whether code has changed since one of them."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def git(*words: str) -> str | None:
    """Return what git prints in the checkout; None if it fails, or if there is no git or no checkout."""
    if not (ROOT / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


@cache
def commit_dates() -> dict[str, str]:
    """Return the dates of all commits that lead to the present one, in ISO 8601; empty if they are not all known."""
    if (git("rev-parse", "--is-shallow-repository") or "").strip() != "false":
        return {}
    lines = (git("log", "--format=%H %cI") or "").splitlines()
    return dict(line.split(" ", 1) for line in lines)


@cache
def has_changed(commit: str, paths: tuple[str, ...]) -> bool:
    """Return True if files in ``paths`` differ from those of a commit in more than comments and docstrings.

    False if the history is not known.
    """
    names = git("diff", "--name-only", "--no-renames", commit, "--", *paths) if paths else None
    return any(_differs(commit, name) for name in (names or "").splitlines())


def _differs(commit: str, name: str) -> bool:
    earlier, now = git("show", f"{commit}:{name}"), ROOT / name
    if earlier is None or not now.exists() or now.suffix != ".py":
        return now.suffix in (".py", ".cpp", ".h", ".json")
    return _code(earlier) != _code(now.read_text(encoding="utf-8"))


def _code(text: str) -> str:
    """Return Python code without comments, docstrings and layout."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body: Sequence[ast.stmt] = getattr(node, "body", ()) if not isinstance(node, (ast.Lambda, ast.IfExp)) else ()
        if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body[0].value.value = ""
    return ast.dump(tree)
