"""Options of the reproductions: the fields are options of ``zoo reproduce``, their docstrings its help texts.

Tested by tests/cli/test_reproduce_papers.py.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from zoo.reproduce import DEFAULT_REPORT_DIR

ALL = "all"


@dataclass(frozen=True, kw_only=True)
class PaperOptions:
    """Options of the measurement of one paper, or of all."""

    paper: str = ALL
    """A key of `zoo.reproduce.papers.PAPERS`, or `ALL`."""
    only: tuple[str, ...] = ()
    """Measure only these, such as "Table 1" or table1 (default: all tables, figures and sections)."""
    no_plot: bool = False
    """Do not draw plots, which need matplotlib."""
    out: Path = DEFAULT_REPORT_DIR
    """Folder of the reports; rows of earlier runs are kept."""
    runs: tuple[Path, ...] = ()
    """Log folders of zoo train, or PAPER_runs.json files of earlier reports. Their accuracies fill the tables; their
    curves are plotted and saved in PAPER_runs.json."""
    command_line: str = ""
    """The command that was typed, for the reports."""


@dataclass(frozen=True, kw_only=True)
class ImageNetOptions:
    """Options of the measurement of the published ImageNet scores."""

    data: Path | None = None
    """The ImageNet validation set, 50,000 images, as val/ with its 1000 class folders."""
    models: tuple[str, ...] = ("*",)
    """Published networks, or shell-style patterns (default: all nine)."""
    protocols: tuple[str, ...] | None = None
    """Evaluation protocols (default: all)."""
    limit: int | None = None
    """Score only N evenly spaced images, to try the command; their scores are underpowered."""
    batch_size: int | None = None
    """Images per batch and process (default: the experiment's batch size over the number of processes)."""
    workers: int = 4
    """Worker processes that read images, per process of the run."""
    log_every: int = 10
    """Batches between two log lines."""
    out: Path = DEFAULT_REPORT_DIR
    """Folder of the reports; rows of earlier runs are kept."""
    command_line: str = ""
    """The command that was typed, for the report."""

    def command_of(self, model: str) -> str:
        """Return the command that scores one model."""
        words = ["zoo", "reproduce", "imagenet", "--data", str(self.data), "--models", model]
        words += ["--protocols", *self.protocols] if self.protocols else []
        words += ["--out", str(self.out)] if self.out != DEFAULT_REPORT_DIR else []
        words += ["--limit", str(self.limit)] if self.limit else []
        return shlex.join(words)
