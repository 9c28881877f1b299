"""``zoo reproduce``: measure published numbers and write them next to the published values."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from zoo.cli.options import (
    Command,
    Group,
    LoaderOptions,
    Positive,
    ProcessOptions,
    WholeNumber,
    default_workers,
    option,
)
from zoo.errors import EXIT_USER_ERROR, EXIT_VERIFICATION_FAILED
from zoo.reproduce import OUT
from zoo.tasks.protocols import PROTOCOLS


@dataclass(frozen=True, kw_only=True)
class ReproducePaper(Command):
    """Base of the commands that measure the tables and figures of papers."""

    paper: ClassVar[str]
    only: tuple[str, ...] = option(default=(), metavar="ITEM")
    """Measure only these, such as "Table 1" or table1 (default: all tables, figures and sections)."""
    no_plot: bool = False
    """Do not draw plots, which need matplotlib."""
    out: Path = option(default=OUT, metavar="DIR")
    """Folder of the reports; rows measured there earlier are kept."""

    def run(self) -> int:
        """Measure and print the report of one paper, or counts for all papers."""
        if "torch" not in sys.modules:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the memory profiler
        from zoo.reproduce.paper_run import PaperOptions, reproduce_papers
        from zoo.reproduce.scoreboard import count_sentence

        inputs = {name: getattr(self, name) for name in ("data", "runs", "workers") if hasattr(self, name)}
        options = PaperOptions(
            self.paper,
            items=self.only,
            plots=not self.no_plot,
            out=self.out,
            command_line=self.command_line,
            **inputs,
        )
        reproduced = reproduce_papers(options)
        if self.paper != "all":
            print(*reproduced.reports.values())
        for paper in reproduced.reports:
            print(f"written to {self.out / paper}.md and .json, plots beside them")
        print(f"{count_sentence(reproduced.rows)} All rows: {self.out / 'REPRODUCTION.md'}, reproduction.csv and .json")
        return 0


@dataclass(frozen=True, kw_only=True)
class RunsOptions:
    """Options of papers that report trained networks."""

    runs: tuple[Path, ...] = option(default=(), metavar="PATH")
    """Log folders of zoo train, whose accuracies fill the tables and whose curves are saved in PAPER_runs.json and
    plotted; or such files instead of the folders."""


@dataclass(frozen=True, kw_only=True)
class ReproduceAll(ReproducePaper, RunsOptions):
    """Measure every published number of the three papers, in minutes on a CPU."""

    paper = "all"
    data: Path | None = option(metavar="DIR")
    """ImageNet or CIFAR-10, as train/ and val/ with one folder per class."""
    workers: WholeNumber = option("-j", default_factory=default_workers(4))
    """Worker processes that read the images of ImageNet (default: number of cores, at most 4)."""


@dataclass(frozen=True, kw_only=True)
class ReproduceInPlaceABN(ReproducePaper):
    """Measure the numbers of the InPlace-ABN paper, in minutes on a CPU."""

    paper = "inplace_abn"
    data: Path | None = option(metavar="DIR")
    """ImageNet, as train/ and val/ with one folder per class, to score the published networks on."""
    workers: WholeNumber = option("-j", default_factory=default_workers(4))
    """Worker processes that read the images of ImageNet (default: number of cores, at most 4)."""


@dataclass(frozen=True, kw_only=True)
class ReproduceRevNet(ReproducePaper, RunsOptions):
    """Measure the numbers of the RevNet paper, in minutes on a CPU."""

    paper = "revnet"
    data: Path | None = option(metavar="DIR")
    """CIFAR-10, as train/ and val/ with one folder per class (default: random images)."""


@dataclass(frozen=True, kw_only=True)
class ReproduceRevNeXt(ReproducePaper, RunsOptions):
    """Measure the numbers of the RevNeXt paper, in minutes on a CPU."""

    paper = "revnext"


@dataclass(frozen=True, kw_only=True)
class ReproduceImageNet(Command, LoaderOptions, ProcessOptions):
    """Measure the published ImageNet classification scores.

    Exit code: 0 if everything was measured, 2 if something is missing, 3 if a score is off by more than 0.1 points.
    """

    data: Path = option(metavar="DIR", required=True)
    """ImageNet, as val/ with one folder per class."""
    models: tuple[str, ...] = ("*",)
    """Published networks or shell-style patterns (default: all), and checkpoints of zoo train, which are scored with
    their own crop."""
    protocols: tuple[str, ...] | None = option(choices=tuple(PROTOCOLS), metavar=None)
    """Evaluation protocols (default: all)."""
    limit: Positive | None = None
    """Score only N evenly spaced images, to try the command; gives no verdict."""
    batch_size: Positive | None = None
    """Images per batch and process (default: the experiment's batch size over the number of processes)."""
    out: Path = option(default=OUT, metavar="DIR")
    """Folder of the reports; rows measured there earlier are kept."""

    def run(self) -> int:
        """Score the networks and print the report."""
        from zoo.engine.process import open_process
        from zoo.reproduce.imagenet_scores import ImageNetOptions, reproduce_imagenet

        options = ImageNetOptions(**{field.name: getattr(self, field.name) for field in fields(ImageNetOptions)})
        with open_process(self.local_rank, self.dist_backend) as process:
            scored = reproduce_imagenet(options, process)
            if process.is_main:
                print(scored.markdown)
                print(f"written to {self.out / 'imagenet.md'} and {self.out / 'imagenet.json'}")
        if scored.is_off:
            return EXIT_VERIFICATION_FAILED
        return 0 if scored.is_complete else EXIT_USER_ERROR


REPRODUCE = Group(
    "Measure published scores, tables and figures again",
    {
        "all": ReproduceAll,
        "inplace_abn": ReproduceInPlaceABN,
        "revnet": ReproduceRevNet,
        "revnext": ReproduceRevNeXt,
        "imagenet": ReproduceImageNet,
    },
    metavar="BENCHMARK",
)
