"""`zoo reproduce PAPER` and `all`: measure the papers' items and write the reports and the scoreboard."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from zoo.benchmark.plot_style import check_matplotlib
from zoo.errors import ConfigError, join_names
from zoo.reproduce.comparison import Comparison
from zoo.reproduce.imagenet import read_scores
from zoo.reproduce.measurements import Measurement, measurements_of
from zoo.reproduce.paper_report import read_report, write_report
from zoo.reproduce.papers import PAPERS
from zoo.reproduce.scoreboard import Row
from zoo.reproduce.scoreboard_files import read_rows, write_forms
from zoo.reproduce.training_runs import draw_runs, read_runs, write_runs
from zoo.run.environment import describe_environment

logger = logging.getLogger(__name__)


class Reproduction(NamedTuple):
    """What `reproduce_papers` measured and wrote.

    Args:
    - `comparisons`: the comparisons of this call by item, with and without measurement.
    - `rows`: all rows of the papers, with measurements of earlier calls.
    - `files`: names of the files in the folder that this call wrote.
    """

    comparisons: list[Comparison]
    rows: list[Row]
    files: list[str]


def reproduce_papers(
    papers: Sequence[str], *, only: Sequence[str], runs: Sequence[Path], out: Path, plots: bool, command_line: str
) -> Reproduction:
    """Measure the items of ``papers``; write the paper's report and the scoreboard after each item.

    Stores ``runs`` and the runs of an earlier report in the folder in PAPER_runs.json, and plots them in
    PAPER_runs.png. Reads scores in the folder that `zoo reproduce imagenet` has written. Before measuring, raises
    ConfigError for unusable options, and if plots need matplotlib.
    """
    if plots:
        check_matplotlib()
    measurements = _of_items(only, [each for paper in papers for each in measurements_of(paper)])
    files = [file for paper in papers if (file := out / f"{paper}_runs.json").exists()]
    found = read_runs([*files, *runs], [name for paper in PAPERS.values() for name in paper.experiments])
    scores = read_scores(out)
    sections = {paper: {section.key: section for section in read_report(out, paper)} for paper in PAPERS}
    environment = describe_environment(torch.device("cpu"))
    comparisons: list[Comparison] = []
    written: list[str] = []
    for paper in papers:
        of_paper = [run for run in found if run.experiment in PAPERS[paper].experiments]
        if of_paper and runs:
            written.append(write_runs(out, paper, command_line, of_paper))
            if plots:
                written.append(draw_runs(out, paper, f"Training runs of experiments\n{PAPERS[paper].title}", of_paper))
    for index, measurement in enumerate(measurements, start=1):
        paper = measurement.paper
        logger.info("%s, %s (%d of %d)", paper, measurement.item, index, len(measurements))
        of_paper = [run for run in found if run.experiment in PAPERS[paper].experiments]
        given = {"": (), "runs": (of_paper,), "scores": (scores,)}[measurement.given]
        start_s = time.monotonic()
        section = measurement.function(*given)
        section.seconds = round(time.monotonic() - start_s, 1)
        section.command = shlex.join(["zoo", "reproduce", paper, "--only", measurement.item])
        section.environment = environment
        logger.info("measured in %.0f s", section.seconds)
        sections[paper][section.key] = section
        header = {"benchmark": paper, "command": command_line, "environment": environment}
        written += write_report(out, header, list(sections[paper].values()), with_plots=plots)
        written += write_forms(out)
        comparisons += section.comparisons
    rows = [row for row in read_rows(out) if row.number.paper in papers]
    return Reproduction(comparisons, rows, list(dict.fromkeys(written)))


def _of_items(names: Sequence[str], measurements: Sequence[Measurement]) -> list[Measurement]:
    """Return the measurements of the items with these names, or all if there are no names. Ignores case and blanks.

    Raises ConfigError, with a list of the items, for an unknown name.
    """
    known = {_plain(each.item) for each in measurements}
    if unknown := [name for name in names if _plain(name) not in known]:
        by_paper: dict[str, dict[str, None]] = {}
        for each in measurements:
            by_paper.setdefault(each.paper, {})[each.item] = None
        has = "; ".join(f"{paper} has {', '.join(items)}" for paper, items in by_paper.items())
        raise ConfigError(f"there is no measurement of {join_names(unknown)}", "--only", has)
    wanted = {_plain(name) for name in names} or known
    return [each for each in measurements if _plain(each.item) in wanted]


def _plain(item: str) -> str:
    return "".join(item.split()).lower()
