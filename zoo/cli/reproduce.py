"""``zoo reproduce``: measure published numbers and write them next to the published values."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from zoo.cli.options import (
    Command,
    Group,
    LoaderOptions,
    Positive,
    option,
)
from zoo.errors import EXIT_USER_ERROR, EXIT_VERIFICATION_FAILED
from zoo.reproduce import DEFAULT_REPORT_DIR
from zoo.reproduce.options import ALL, ImageNetOptions, PaperOptions
from zoo.tasks.protocols import PROTOCOLS

HIDDEN = {"hidden": True}  # metadata of settings that are no options of a command


@dataclass(frozen=True, kw_only=True)
class ReproduceAll(Command, PaperOptions):
    """Measure every published number of the three papers, in about an hour on one CPU core."""

    paper: str = field(default=ALL, metadata=HIDDEN)
    only: tuple[str, ...] = option(default=(), metavar="ITEM")
    out: Path = option(default=DEFAULT_REPORT_DIR, metavar="DIR")
    runs: tuple[Path, ...] = option(default=(), metavar="PATH")

    def run(self) -> int:
        if "torch" not in sys.modules:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the memory profiler
        from zoo.reproduce.paper_run import reproduce_papers
        from zoo.reproduce.scoreboard import verdict_lines

        rows = reproduce_papers(self)
        for paper in dict.fromkeys(row.number.paper for row in rows):
            print(f"written to {self.out / paper}.md and .json, with plots next to them")
        counts, *off = verdict_lines(rows)
        print(counts, *(f"off: {line}" for line in off), sep="\n")
        print(f"all rows: {self.out / 'reproduction.html'} and .csv")
        return 0


@dataclass(frozen=True, kw_only=True)
class ReproduceInPlaceABN(ReproduceAll):
    """Measure the numbers of the InPlace-ABN paper, in about 10 minutes on one CPU core."""

    paper: str = field(default="inplace_abn", metadata=HIDDEN)


@dataclass(frozen=True, kw_only=True)
class ReproduceRevNet(ReproduceAll):
    """Measure the numbers of the RevNet paper, in a few minutes on one CPU core."""

    paper: str = field(default="revnet", metadata=HIDDEN)


@dataclass(frozen=True, kw_only=True)
class ReproduceRevNeXt(ReproduceAll):
    """Measure the numbers of the RevNeXt paper, in about an hour on one CPU core."""

    paper: str = field(default="revnext", metadata=HIDDEN)


@dataclass(frozen=True, kw_only=True)
class ReproduceImageNet(Command, LoaderOptions, ImageNetOptions):
    """Score the nine published networks on ImageNet by three protocols, with the published scores beside.

    Exit code: 0 if everything was measured, 2 if something is missing, 3 if a score is off by more than 0.1 points.
    """

    data: Path | None = option(metavar="DIR")
    protocols: tuple[str, ...] | None = option(choices=tuple(PROTOCOLS), metavar=None)
    limit: Positive | None = None
    batch_size: Positive | None = None
    out: Path = option(default=DEFAULT_REPORT_DIR, metavar="DIR")

    def run(self) -> int:
        from zoo.engine.process import open_process
        from zoo.reproduce.imagenet import SCORES_FILE, reproduce_imagenet, scores_table

        with open_process() as process:
            comparisons, left_out = reproduce_imagenet(self, process)
            if process.is_main:
                reasons = [f"left out: {name}: {reason}" for name, reason in left_out.items()]
                print(scores_table(comparisons), *reasons, f"written to {self.out / SCORES_FILE}", sep="\n\n")
        states = {verdict.state for each in comparisons if (verdict := each.verdict) is not None}
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
    metavar="BENCHMARK",
)
