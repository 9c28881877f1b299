"""``zoo lean``: run a training script with lean networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from zoo.cli.options import Command, argument, option
from zoo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Lean(Command):
    """Run a training script in half the activation memory, bit for bit.

    Applies zoo.lean to the networks that the script trains; the script does not change. Arguments after the script
    belong to the script. At the end, or at Ctrl-C, a table shows the bytes that each network saves, lean and plain.
    """

    example = "zoo lean --budget 8GB train.py --epochs 3"
    script: str | None = argument("SCRIPT", None)
    """Python file to run."""
    module: str | None = option("-m", metavar="MODULE")
    """Module to run instead of a file, as with python -m."""
    budget: str | None = option(metavar="LIMIT")
    """Limit on memory: 8GB for the peak of a step, 40% or 0.4 for a fraction of what plain training saves."""
    compare: bool = False
    """Run one of eleven steps plainly, to compare the times. Changes no bits."""
    arguments: tuple[str, ...] = field(default=(), metadata={"hidden": True})
    owns_console: ClassVar[bool] = False

    def run(self) -> int:
        from zoo.run.script import LeanCalls, run_script

        target = self.module or self.script
        if target is None:
            raise ConfigError("nothing to run", "command line", "give a script, or -m and the name of a module")
        calls = LeanCalls(_number(self.budget), self.compare)
        return run_script(target, self.module is not None, self.arguments, calls)


def _number(budget: str | None) -> str | float | None:
    """Return a fraction as a number; other budgets unchanged."""
    try:
        return None if budget is None else float(budget) if "." in budget else budget
    except ValueError:
        return budget


def split_arguments(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split the words of ``zoo lean`` after the script or the module; return both parts.

    Arguments that launchers such as torch.distributed.launch insert before the command belong to the script.
    """
    words = list(words)
    start = words.index("lean") if "lean" in words else 0
    end = start + 1
    while end < len(words) and words[end].startswith("-"):
        is_last = words[end] == "-m" or words[end].startswith("--module")
        end += 2 if words[end] in ("-m", "--module", "--budget") else 1
        if is_last:
            break
    else:
        end += 1
    return words[start:end], (*words[:start], *words[end:])
