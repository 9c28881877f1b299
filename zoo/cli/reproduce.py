"""``zoo reproduce``: measure published numbers and write them next to the published values."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from zoo.cli.options import (
    Command,
    DataOptions,
    Group,
    Positive,
    option,
)
from zoo.errors import EXIT_USER_ERROR, EXIT_VERIFICATION_FAILED
from zoo.reproduce import DEFAULT_REPORT_DIR
from zoo.tasks.protocols import PROTOCOLS


@dataclass(frozen=True, kw_only=True)
class ReproduceAll(Command):
    """Measure every published number of the three papers, in about an hour on one CPU core."""

    example = "zoo reproduce all"
    papers: ClassVar[tuple[str, ...]] = ("inplace_abn", "revnet", "revnext")
    only: tuple[str, ...] = option(default=(), metavar="ITEM")
    """Measure only these items, such as "Table 1" or table1 (default: all tables, figures and sections)."""
    no_plot: bool = False
    """Do not draw plots, which need matplotlib."""
    out: Path = option(default=DEFAULT_REPORT_DIR, metavar="DIR")
    """Folder of the reports; rows of earlier runs are kept."""
    runs: tuple[Path, ...] = option(default=(), metavar="PATH")
    """Log folders of zoo train, or PAPER_runs.json files of other reports. Their accuracies fill the tables; their
    curves are plotted and added to PAPER_runs.json."""

    def run(self) -> int:
        if "torch" not in sys.modules:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the memory profiler
        from zoo.reproduce.paper_run import reproduce_papers
        from zoo.reproduce.scoreboard import measured_table, verdict_lines

        found = reproduce_papers(
            self.papers,
            only=self.only,
            runs=self.runs,
            out=self.out,
            plots=not self.no_plot,
            command_line=self.command_line,
        )
        counts, *off = verdict_lines(found.rows)
        verdicts = "\n".join([counts, *(f"off: {line}" for line in off)])
        written = "\n".join(f"written: {self.out / file}" for file in found.files)
        print("\n\n".join(filter(None, [measured_table(found.comparisons), verdicts, written])))
        return 0


@dataclass(frozen=True, kw_only=True)
class ReproduceInPlaceABN(ReproduceAll):
    """Measure the numbers of the InPlace-ABN paper, in about 10 minutes on one CPU core."""

    papers = ("inplace_abn",)
    example = "zoo reproduce inplace_abn"


@dataclass(frozen=True, kw_only=True)
class ReproduceRevNet(ReproduceAll):
    """Measure the numbers of the RevNet paper, in a few minutes on one CPU core."""

    papers = ("revnet",)
    example = 'zoo reproduce revnet --only "Table 1"'


@dataclass(frozen=True, kw_only=True)
class ReproduceRevNeXt(ReproduceAll):
    """Measure the numbers of the RevNeXt paper, in about an hour on one CPU core."""

    papers = ("revnext",)
    example = "zoo reproduce revnext --no-plot"


@dataclass(frozen=True, kw_only=True)
class ReproduceImageNet(Command, DataOptions):
    """Score the nine published networks on ImageNet by three protocols, next to the published scores.

    Exit code: 0 if everything was measured, 2 if something is missing, 3 if a score is off by more than 0.1 points.
    """

    example = "zoo reproduce imagenet --data IMAGENET --limit 1000"
    data: Path | None = option(metavar="DIR")
    """The ImageNet validation set, 50,000 images, as val/ with its 1000 class folders."""
    models: tuple[str, ...] = ("*",)
    """Published networks, or shell-style patterns (default: all nine)."""
    protocols: tuple[str, ...] = option(default=tuple(PROTOCOLS), choices=tuple(PROTOCOLS), metavar=None)
    """Evaluation protocols."""
    limit: Positive | None = None
    """Score only N evenly spaced images, to try the command; the scores are then underpowered."""
    batch_size: Positive | None = None
    """Images per batch and process (default: the experiment's batch size over the number of processes)."""
    out: Path = option(default=DEFAULT_REPORT_DIR, metavar="DIR")
    """Folder of the reports; rows of earlier runs are kept."""

    def run(self) -> int:
        from zoo.engine._process import open_process
        from zoo.reproduce.imagenet import SCORES_FILE, reproduce_imagenet, scores_table

        with open_process() as process:
            comparisons, left_out = reproduce_imagenet(
                self.data,
                self.models,
                self.protocols,
                process,
                out=self.out,
                command_line=self.command_line,
                limit=self.limit,
                batch_size=self.batch_size,
                workers=self.workers,
                log_every=self.log_every,
            )
            if process.is_main:
                reasons = [f"left out: {name}: {reason}" for name, reason in left_out.items()]
                print(scores_table(comparisons), *reasons, f"written to {self.out / SCORES_FILE}", sep="\n\n")
        states = {each.verdict.state for each in comparisons}
        if "off" in states:
            return EXIT_VERIFICATION_FAILED
        return EXIT_USER_ERROR if "not measured" in states else 0


REPRODUCE = Group(
    "Reproduce published scores, tables and figures",
    {
        "all": ReproduceAll,
        "inplace_abn": ReproduceInPlaceABN,
        "revnet": ReproduceRevNet,
        "revnext": ReproduceRevNeXt,
        "imagenet": ReproduceImageNet,
    },
)
