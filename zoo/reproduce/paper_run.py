"""`zoo reproduce PAPER` and `all`: measure the papers' items and write the reports and the scoreboard.

Tested by tests/cli/test_reproduce_papers.py.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zoo.errors import ConfigError, join_names
from zoo.reproduce.comparison import Section
from zoo.reproduce.imagenet import read_scores
from zoo.reproduce.options import ALL, PaperOptions
from zoo.reproduce.paper_report import merged, read_report, write_report
from zoo.reproduce.papers import PAPERS, Measurement
from zoo.reproduce.scoreboard import Row
from zoo.reproduce.scoreboard_files import read_rows, write_forms
from zoo.reproduce.training_runs import TrainingRun, draw_runs, read_runs, write_runs
from zoo.run.cost import CostMeter
from zoo.run.environment import describe_environment, warn_of_changes
from zoo.run.plot_style import check_matplotlib

logger = logging.getLogger(__name__)


def papers_of(options: PaperOptions) -> list[str]:
    """Return the papers to measure."""
    return list(PAPERS) if options.paper == ALL else [options.paper]


def reproduce_papers(options: PaperOptions) -> list[Row]:
    """Measure all items, and write the paper's report and the scoreboard after each.

    Returns the rows of the measured papers. Stores the curves of training runs in PAPER_runs.json and plots them in
    PAPER_runs.png. Reads the scores that `zoo reproduce imagenet` has written into the folder of the reports. Raises
    ConfigError for unusable options, and if plots need matplotlib, before the measurements.
    """
    if not options.no_plot:
        check_matplotlib()
    warn_of_changes()
    found = {paper: _read_runs(options, paper) for paper in papers_of(options)}
    earlier = {paper: read_report(options.out, paper) for paper in PAPERS}
    scores = read_scores(options.out)
    measurements_of = {paper: PAPERS[paper].measurements(runs, scores) for paper, (runs, _) in found.items()}
    chosen = of_items(options.only, measurements_of)
    _make_folder(options.out)
    device = torch.device("cpu")
    environment = describe_environment(device)
    for paper, measurements in chosen.items():
        runs, remarks = found[paper]
        _keep_runs(options, paper, runs)
        header = {"benchmark": paper, "command": options.command_line, "environment": environment,
                  "cost": {}, "remarks": remarks, "plots": not options.no_plot}  # fmt: skip
        cost = CostMeter(device)
        sections, measured = {section.key: section for section in earlier[paper]}, set[str]()
        logger.info(
            "%s: %d of %d measurements; all of them take about %d minutes on one core",
            paper, len(measurements), len(measurements_of[paper]), PAPERS[paper].minutes,
        )  # fmt: skip
        for index, measurement in enumerate(measurements, start=1):
            logger.info("%s, %s (%d of %d)", paper, measurement.item, index, len(measurements))
            section = _measure(options, paper, measurement, environment)
            measured.add(section.key)
            sections[section.key] = merged(section, sections.get(section.key))
            if not options.only:
                sections[section.key] = sections.pop(section.key)  # in the order of measurement
            header["cost"] = cost.read()
            write_report(options.out, header, list(sections.values()))
        if not options.only and measured != set(sections):
            write_report(options.out, header, [sections[key] for key in sections if key in measured])
        write_forms(options.out)
    return [row for row in read_rows(options.out) if row.number.paper in chosen]


def of_items(names: Sequence[str], measurements: Mapping[str, Sequence[Measurement]]) -> dict[str, list[Measurement]]:
    """Return the items with these names by paper, or all items without names. Case and blanks are ignored.

    Raises ConfigError, with a list of the items, for an unknown name.
    """
    known = {_plain(each.item) for of_paper in measurements.values() for each in of_paper}
    unknown = [name for name in names if _plain(name) not in known]
    if unknown:
        there_are = "; ".join(
            f"{paper}: {', '.join(dict.fromkeys(each.item for each in of_paper))}"
            for paper, of_paper in measurements.items()
        )
        raise ConfigError(
            f"there is no measurement of {join_names(name or 'an item without a name' for name in unknown)}",
            "--only",
            f"there are measurements of {there_are}",
        )
    wanted = {_plain(name) for name in names} or known
    chosen = {paper: [each for each in of_paper if _plain(each.item) in wanted]
              for paper, of_paper in measurements.items()}  # fmt: skip
    return {paper: of_paper for paper, of_paper in chosen.items() if of_paper}


def _plain(item: str) -> str:
    return "".join(item.split()).lower()


def _command_of(options: PaperOptions, paper: str, item: str, section: Section) -> str:
    """Return the command that measures a section, including its inputs."""
    words = ["zoo", "reproduce", paper, "--only", item]
    if any(each.environment is not None for each in section.comparisons):
        words += ["--runs", *map(str, options.runs)] if options.runs else []
    return shlex.join(words)


def _read_runs(options: PaperOptions, paper: str) -> tuple[list[TrainingRun], list[str]]:
    """Return the runs of a paper's experiments, and remarks on runs that belong to none of the measured papers."""
    others = [name for other in papers_of(options) if other != paper for name in PAPERS[other].experiments]
    return read_runs(options.runs, PAPERS[paper].experiments, others)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder cannot be created ({error.strerror})", f"--out {folder}", "give another"
        ) from error


def _keep_runs(options: PaperOptions, paper: str, runs: Sequence[TrainingRun]) -> None:
    """Write the curves of the runs of a paper, and draw them."""
    if runs and any(path.is_dir() for path in options.runs):  # PAPER_runs.json files already hold these curves
        write_runs(options.out, paper, options.command_line, runs)
    if runs and not options.no_plot:
        draw_runs(options.out, paper, runs)


def _measure(options: PaperOptions, paper: str, measurement: Measurement, environment: Mapping[str, Any]) -> Section:
    start_s = time.monotonic()
    section = measurement.measure()
    section.seconds = round(time.monotonic() - start_s, 1)
    section.command, section.environment = _command_of(options, paper, measurement.item, section), environment
    logger.info("measured in %.0f s", section.seconds)
    return section
