"""`zoo reproduce PAPER`: measure its tables and figures; write PAPER.md, PAPER.json and the plots."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from zoo.errors import ConfigError, listed, printable
from zoo.files import write_bytes, write_json, write_text
from zoo.report.environment import describe_environment, warn_of_changes
from zoo.report.plot_style import check_matplotlib
from zoo.report.tables import markdown_table
from zoo.reproduce import OUT
from zoo.reproduce.comparison import Comparison, Section, Value
from zoo.reproduce.papers import PAPERS, Inputs, Measurement
from zoo.reproduce.plot import draw
from zoo.reproduce.published_numbers import PublishedNumber
from zoo.reproduce.training_runs import draw_runs, read_runs, write_runs

logger = logging.getLogger(__name__)

HEADERS = ("what", "published", "kind and place", "measured", "unit", "verdict")
SHOWN = ("cpu", "device", "threads", "torch", "zoo", "commit")  # of the environment, in the Markdown file


@dataclass(frozen=True)
class PaperOptions:
    """What `zoo reproduce` is asked for with the name of a paper.

    Args:
    - `paper`: a key of `zoo.reproduce.papers.PAPERS`.
    - `data`: the folder of images, for a figure that can use real ones; None for random images.
    - `runs`: log folders of training runs, and files that hold the runs of such folders.
    - `items`: the tables, figures and sections to measure, such as "Table 1"; all of them without one.
    - `plots`: whether to draw plots, which needs matplotlib.
    - `out`: the folder of the report.
    """

    paper: str
    data: Path | None = None
    runs: Sequence[Path] = ()
    items: Sequence[str] = ()
    plots: bool = True
    out: Path = OUT

    @property
    def command(self) -> str:
        """The command with these options."""
        words = ["zoo", "reproduce", self.paper]
        words += ["--data", str(self.data)] if self.data is not None else []
        words += ["--runs", *map(str, self.runs)] if self.runs else []
        words += ["--item", *self.items] if self.items else []
        words += ["--out", str(self.out)] if self.out != OUT else []
        words += [] if self.plots else ["--no-picture"]
        return shlex.join(words)


def reproduce_paper(options: PaperOptions) -> str:
    """Measure one table or figure after another, write the report after each, and return it as Markdown.

    The curves of training runs are kept in PAPER_runs.json and drawn in PAPER_runs.png. Before anything is measured,
    raises ConfigError, CheckpointError or DataError for options that cannot be used, and ConfigError for plots without
    matplotlib.
    """
    paper = PAPERS[options.paper]
    if options.plots:
        check_matplotlib()
    warn_of_changes()
    runs, remarks = read_runs(options.runs, paper.experiments)
    measurements = of_items(options.items, paper.measurements(Inputs(runs, options.data)))
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out: this folder cannot be made ({error.strerror}); {printable(options.out)}: give another"
        ) from error
    if any(path.is_dir() for path in options.runs):  # files of runs alone hold all that would be written
        write_runs(options.out, options.paper, options.command, runs)
    if runs and options.plots:
        draw_runs(options.out, options.paper, runs)
    sections: list[Section] = []
    text = ""
    for measurement in measurements:
        start_s = time.monotonic()
        section = measurement.measure()
        section.seconds = round(time.monotonic() - start_s, 1)
        sections.append(section)
        text = write_report(options, paper.title, sections, remarks)
        logger.info("%s (%.0f s)", section.title, section.seconds)
    return text


def of_items(names: Sequence[str], measurements: Sequence[Measurement]) -> list[Measurement]:
    """Return those of the items that are named, or all of them without a name; case and blanks do not matter.

    Raises ConfigError, with the items that there are, for a name of none.
    """
    known = {_plain(measurement.item): measurement.item for measurement in measurements}
    unknown = [name for name in names if _plain(name) not in known]
    if unknown:
        raise ConfigError(f"--item: there is no measurement of {listed(unknown)}, but of {listed(known.values(), 100)}")
    chosen = {_plain(name) for name in names or known}
    return [measurement for measurement in measurements if _plain(measurement.item) in chosen]


def _plain(item: str) -> str:
    return "".join(item.split()).lower()


def write_report(options: PaperOptions, title: str, sections: Sequence[Section], remarks: Sequence[str] = ()) -> str:
    """Write the files of all ``sections`` and return the Markdown, which has the ``remarks`` on top."""
    folder, name, environment = options.out, options.paper, describe_environment(torch.device("cpu"))
    header = [f"# {title}", "", f"- command: `{options.command}`"]
    header += ["- " + ", ".join(f"{key} {environment[key]}" for key in SHOWN), *(f"- {remark}" for remark in remarks)]
    drawn = {section.key: f"{name}_{section.key}.png" for section in sections if section.panels and options.plots}
    text = "\n".join([*header, *(_markdown(section, drawn.get(section.key)) for section in sections)]) + "\n"
    content = {"benchmark": name, "command": options.command, "environment": environment, "remarks": list(remarks)}
    write_json(folder / f"{name}.json", {**content, "sections": [_to_json(section) for section in sections]})
    write_text(folder / f"{name}.md", text)
    for section in sections:
        if section.key in drawn:
            write_bytes(folder / drawn[section.key], draw(section))
    return text


def _to_json(section: Section) -> dict[str, Any]:
    """Return the section's fields; the files have always called the comparisons "figures"."""
    content = asdict(replace(section, comparisons=[]))
    del content["comparisons"]
    return {**content, "figures": [_comparison_to_json(comparison) for comparison in section.comparisons]}


def _comparison_to_json(comparison: Comparison) -> dict[str, Any]:
    number, verdict = comparison.published, comparison.verdict
    published = None if number is None else number.model_dump(include={"id", "kind", "place", "value"})
    content = {field.name: getattr(comparison, field.name) for field in fields(comparison)}
    return {**content, "published": published, "verdict": str(verdict), "state": verdict.state}


def _markdown(section: Section, plot: str | None) -> str:
    """Return the section's part of the report; ``plot`` is the name of the file with its plot."""
    lines = ["", f"## {section.title}", "", f"{section.setting} ({section.seconds:.0f} s)"]
    rows = [[each.what, *_published(each.published), _number(each.measured), each.unit, str(each.verdict)]
            for each in section.comparisons]  # fmt: skip
    lines += ["", markdown_table(HEADERS, rows)] if rows else []
    lines += ["", *(f"- {note}" for note in section.notes)] if section.notes else []
    lines += ["", f"![{section.title}]({plot})"] if plot else []
    return "\n".join(lines)


def _published(published: PublishedNumber | None) -> tuple[str, str]:
    """Return what was published, and its kind and place; empty texts for nothing."""
    return ("", "") if published is None else (_number(published.value), f"{published.kind}, {published.place}")


def _number(value: Value) -> str:
    """Return a number with four digits, or with all of them if it is a whole one; words as they are."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"
