"""`zoo reproduce PAPER` and `all`: measure tables and figures one after another, write their reports and the ledger."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zoo.engine.process import open_process
from zoo.errors import ConfigError, DataError, listed, printable
from zoo.report.environment import describe_environment, warn_of_changes
from zoo.report.plot_style import check_matplotlib
from zoo.reproduce import OUT
from zoo.reproduce.comparison import Comparison, Section
from zoo.reproduce.imagenet_scores import ImageNetOptions, read_scores, reproduce_imagenet
from zoo.reproduce.ledger import Ledger, MeasuredBy
from zoo.reproduce.ledger_files import read_rows, write_ledger
from zoo.reproduce.paper_report import write_report
from zoo.reproduce.papers import PAPERS, ImageSet, Inputs, Measurement
from zoo.reproduce.training_runs import TrainingRun, draw_runs, read_runs, write_runs

logger = logging.getLogger(__name__)

ALL = "all"
NUM_CLASSES: dict[ImageSet, tuple[str, int]] = {"ImageNet": ("val", 1000), "CIFAR-10": ("train", 10)}


@dataclass(frozen=True)
class PaperOptions:
    """What `zoo reproduce` is asked for with the name of a paper, or with `ALL`.

    Args:
    - `paper`: a key of `zoo.reproduce.papers.PAPERS`, or `ALL` for all of them.
    - `data`: a folder of images, of ImageNet or CIFAR-10, which some numbers need.
    - `runs`: log folders of training runs, and files that hold the runs of such folders.
    - `items`: the tables, figures and sections to measure, such as "Table 1"; all of them without one.
    - `plots`: whether to draw plots, which needs matplotlib.
    - `workers`: processes that read the images of ImageNet.
    - `out`: the folder of the reports.
    """

    paper: str
    data: Path | None = None
    runs: Sequence[Path] = ()
    items: Sequence[str] = ()
    plots: bool = True
    workers: int = 4
    out: Path = OUT

    @property
    def papers(self) -> list[str]:
        """The names of the papers to measure."""
        return list(PAPERS) if self.paper == ALL else [self.paper]

    @property
    def command(self) -> str:
        """The command with these options."""
        words = ["zoo", "reproduce", self.paper, *self._words("data"), *self._words("runs")]
        words += ["--item", *self.items] if self.items else []
        words += ["--out", str(self.out)] if self.out != OUT else []
        words += [] if self.plots else ["--no-picture"]
        return shlex.join(words)

    def command_of(self, paper: str, item: str, comparison: Comparison) -> str:
        """Return the command that measures a comparison of an item, with those inputs that it needed."""
        words = ["zoo", "reproduce", paper, "--item", item]
        if comparison.environment is not None:
            words += self._words("runs")
        elif comparison.data:
            words += self._words("data")
        return shlex.join(words)

    def _words(self, name: str) -> list[str]:
        if name == "runs":
            return ["--runs", *map(str, self.runs)] if self.runs else []
        return ["--data", str(self.data)] if self.data is not None else []


class Reproduced(NamedTuple):
    """What `reproduce_papers` leaves: the reports as Markdown, by the papers' names, and the rows of the ledger."""

    reports: Mapping[str, str]
    rows: Sequence[Row]
