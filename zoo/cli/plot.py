"""``zoo plot``: draw the curves of training runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zoo.cli.options import Command, argument, check_writable, option


@dataclass(frozen=True, kw_only=True)
class Plot(Command):
    """Draw losses and scores of training runs over epochs."""

    example = "zoo plot runs/mine -o curves.pdf"
    runs: tuple[Path, ...] = argument("RUN")
    """Log folders of zoo train; running runs have curves, too."""
    output: Path = option("-o", default=Path("curves.png"))
    """The picture, in the format of its suffix: .png, .pdf, .svg and others."""

    def run(self) -> int:
        from zoo.run.curves import plot_runs

        check_writable(self.output)
        plot_runs(self.runs, self.output)
        print(self.output)
        return 0
