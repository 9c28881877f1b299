"""Test errors of trained networks beside the published ones; networks not yet trained get the command to do it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev

from zoo.reproduce.comparison import Comparison, Panel, Section, Verdict, not_measured
from zoo.reproduce.published_numbers import PublishedNumber
from zoo.reproduce.training_runs import TrainingRun

CLOSE = 0.5  # points, by which single runs of the same settings differ (two implementations in the README of memcnn)
ERRORS = (
    "Test error in percent after the last epoch, mean of n finished runs. Its standard error is given twice: estimated "
    "from the differences between the runs (from n = 2 on), and as expected from the number of images scored."
)
SETTING = (
    f"{ERRORS} Reproduced means within {CLOSE} points, from runs with all images of the data set. Short experiments "
    "have no published counterpart."
)
# Images for training and for validation of the data sets of the papers.
WHOLE_CIFAR, WHOLE_IMAGENET = (50_000, 10_000), (1_281_167, 50_000)


def report_errors(
    key: str,
    title: str,
    published: Mapping[str, PublishedNumber | None],
    runs: Sequence[TrainingRun],
    short: Sequence[str] = (),
    duration: str = "unknown duration",
) -> Section:
    """Return the test errors of the experiments in ``published``, and of those ``short`` ones that have runs.

    ``duration`` says how long a training takes, for those that have no runs.
    """
    section = Section(key, title, SETTING)
    for name, number in published.items():
        section.comparisons += errors_of(name, number, runs, duration)
    for name in short:
        section.comparisons += errors_of(name, None, runs) if any(run.experiment == name for run in runs) else []
    shown = [run for run in runs if run.experiment in {*published, *short}]
    section.panels += [error_curves("runs", shown)] if shown else []
    return section


def errors_of(
    name: str, published: PublishedNumber | None, runs: Sequence[TrainingRun], duration: str = "unknown duration"
) -> list[Comparison]:
    """Return the error of an experiment: of runs that reconstruct and, if there are any, of runs that store.

    Where the published number is an accuracy ("top-1" in its quantity), it is the accuracy.
    """
    comparisons = []
    for is_stored in (False, True):
        runs_of_kind = [run for run in runs if run.experiment == name and run.is_stored == is_stored]
        if runs_of_kind or not is_stored:
            comparisons.append(_score(name + ", stored" * is_stored, name, published, runs_of_kind, duration))
    return comparisons


def _score(
    what: str, name: str, published: PublishedNumber | None, runs: Sequence[TrainingRun], duration: str
) -> Comparison:
    finished = [run for run in runs if run.is_finished]
    if not finished:
        started = max((len(run.epochs) for run in runs), default=0)
        reason = f"`{command_of(name)}`, {duration}"
        reason += f"; a run has {started} of {runs[0].num_epochs} epochs" if started else ""
        return not_measured(what, published, "%", Verdict("needs training", reason))
    top1 = mean(run.top1[-1] for run in finished)
    measured = top1 if published is not None and "top-1" in published.quantity else 100 - top1
    verdict = Verdict("nothing published") if published is None else _judge(name, measured - published.number, finished)
    return Comparison(
        f"{what} (n = {len(finished)}{_image_counts(finished)})",
        published,
        measured,
        "%",
        verdict._replace(reason="; ".join(filter(None, (verdict.reason, f"standard error {standard_error(finished)}")))),
        n=len(finished),
        spread=_between_runs(finished) or _by_images(finished),
        environment=finished[0].environment,
    )


def _judge(name: str, difference: float, runs: Sequence[TrainingRun]) -> Verdict:
    """Return the verdict on a difference in points between the runs' mean and the published number."""
    text = f"off by {difference:+.2f} points"
    parts = [part for run in runs if (part := _part_of_whole(name, run))]
    if parts:
        return Verdict("underpowered", f"{parts[0]}; {text}")
    if abs(difference) <= CLOSE:
        return Verdict("reproduced", f"within {CLOSE} points")
    error = _between_runs(runs)
    if error is None:
        return Verdict("underpowered", f"{text}, of one run")
    return Verdict("underpowered" if abs(difference) < 2 * error else "off", text)


def _part_of_whole(name: str, run: TrainingRun) -> str:
    """Return which part of the data set's images the run had; empty where it had all, or nothing is known."""
    whole = WHOLE_CIFAR if "cifar" in name else WHOLE_IMAGENET
    counts = (run.num_training_images, run.num_validation_images)
    incomplete = run.config.optimizer.batch_size  # the last batch of an epoch may be left out
    for what, count, all_of_them in zip(("training", "validation"), counts, whole, strict=True):
        if count is not None and count <= all_of_them - incomplete:
            return f"{count:,} of {all_of_them:,} {what} images"
    return ""


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
