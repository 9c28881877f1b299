"""Test errors of trained networks beside the published ones; networks not yet trained get the command to do it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev

from zoo.reproduce.comparison import Comparison, Panel, PublishedValue, Section, not_run
from zoo.reproduce.training_runs import TrainingRun

CLOSE = 0.5  # points, by which single runs of the same settings differ (two implementations in the README of memcnn)
ERRORS = (
    "Test error in percent after the last epoch, mean of n finished runs. Its standard error is given twice: estimated "
    "from the differences between the runs (from n = 2 on), and as expected from the number of images scored."
)
SETTING = f"{ERRORS} Close means within {CLOSE} points. Short experiments have no published counterpart."


def report_errors(
    key: str,
    title: str,
    published: Mapping[str, PublishedValue | None],
    runs: Sequence[TrainingRun],
    short: Sequence[str] = (),
) -> Section:
    """Return the test errors of the experiments in ``published``, and of those ``short`` ones that have runs."""
    section = Section(key, title, SETTING)
    for name, error in published.items():
        section.comparisons += errors_of(name, error, runs)
    for name in short:
        section.comparisons += errors_of(name, None, runs) if any(run.experiment == name for run in runs) else []
    shown = [run for run in runs if run.experiment in {*published, *short}]
    section.panels += [error_curves("runs", shown)] if shown else []
    return section


def errors_of(name: str, published: PublishedValue | None, runs: Sequence[TrainingRun]) -> list[Comparison]:
    """Return the error of an experiment: of runs that reconstruct and, if there are any, of runs that store."""
    comparisons = []
    for is_stored in (False, True):
        runs_of_kind = [run for run in runs if run.experiment == name and run.is_stored == is_stored]
        if runs_of_kind or not is_stored:
            comparisons.append(_error(name + ", stored" * is_stored, name, published, runs_of_kind))
    return comparisons


def _error(what: str, name: str, published: PublishedValue | None, runs: Sequence[TrainingRun]) -> Comparison:
    finished = [run for run in runs if run.is_finished]
    if not finished:
        started = max((len(run.epochs) for run in runs), default=0)
        if not started:
            return not_run(what, published, "%", command_of(name))
        return Comparison(what, published, None, "%", f"not finished: {started} of {runs[0].num_epochs} epochs")
    measured = 100 - mean(run.top1[-1] for run in finished)
    what = f"{what} (n = {len(finished)}{_image_counts(finished)})"
    if published is None:
        verdict = "nothing published"
    else:
        difference = measured - float(published.value)
        verdict = f"within {CLOSE} points" if abs(difference) <= CLOSE else f"off by {difference:+.2f} points"
    return Comparison(what, published, measured, "%", f"{verdict}; standard error {standard_error(finished)}")


def command_of(experiment: str) -> str:
    """Return the command that trains an experiment; DATA is a folder with train/ and val/."""
    return f"zoo train {experiment} DATA"


def error_curves(title: str, runs: Sequence[TrainingRun]) -> Panel:
    """Return the panel of the runs' test errors over their epochs."""
    lines = [
        run.line([*range(1, len(run.top1) + 1)], [100 - top1 for top1 in run.top1], run.stop_reason) for run in runs
    ]
    return Panel(title, "epoch", "test error, %", lines)


def standard_error(*groups: Sequence[TrainingRun]) -> str:
    """Return the standard error of a group's mean, or of the difference between the means of two, in points.

    There are two estimates of it: from the differences between runs, and from the number of images scored.
    """
    between, by_images = _combined(map(_between_runs, groups)), _combined(map(_by_images, groups))
    text = "unknown between runs" if between is None else f"{between:.2f} between runs"
    return text if by_images is None else f"{text}, {by_images:.2f} by the images"


def _combined(errors: Iterable[float | None]) -> float | None:
    """Return the standard error of the sum or difference of independent values; None if one is unknown."""
    known = list(errors)
    return None if None in known else math.hypot(*(error for error in known if error is not None))


def _between_runs(runs: Sequence[TrainingRun]) -> float | None:
    """Return the standard error of the mean over runs, in points; None for one run."""
    return stdev(run.top1[-1] for run in runs) / math.sqrt(len(runs)) if len(runs) > 1 else None


def _by_images(runs: Sequence[TrainingRun]) -> float | None:
    """Return the binomial standard error of a score, in points; None if not all runs scored the same number."""
    counts = {run.num_validation_images for run in runs}
    count = counts.pop()
    share = mean(run.top1[-1] for run in runs) / 100
    return 100 * math.sqrt(share * (1 - share) / count) if count and not counts else None


def _image_counts(runs: Sequence[TrainingRun]) -> str:
    """Return the numbers of images that the runs were trained on and scored on, as far as they are known."""
    text = ""
    for what, counts in (
        ("training", {run.num_training_images for run in runs}),
        ("validation", {run.num_validation_images for run in runs}),
    ):
        known = sorted(count for count in counts if count)
        text += f", {' or '.join(f'{count:,}' for count in known)} {what} images" * bool(known)
    return text
