"""Compares test errors of trained networks with the papers; gives the training command of untrained networks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from zoo.reproduce.comparison import Comparison, ReportSection
from zoo.reproduce.published_numbers import PublishedNumber
from zoo.reproduce.training_runs import TrainingRun, environment_of
from zoo.tasks import classification

BETWEEN_RUNS = 0.5  # points: difference between single runs with the same settings (README of memcnn)
# Number of classes -> numbers of images in the whole data set: CIFAR-10, CIFAR-100, ImageNet.
TRAINING_IMAGES = {10: 50_000, 100: 50_000, 1000: 1_281_167}
VALIDATION_IMAGES = {10: 10_000, 100: 10_000, 1000: 50_000}


def report_errors(
    key: str, title: str, published: Mapping[str, PublishedNumber], runs: Sequence[TrainingRun]
) -> ReportSection:
    """Return the test errors of the experiments in ``published``."""
    section = ReportSection(key, title)
    for name, number in published.items():
        section.comparisons += errors_of(name, number, runs)
    return section


def errors_of(name: str, published: PublishedNumber, runs: Sequence[TrainingRun]) -> list[Comparison]:
    """Return the errors of the runs that reconstruct activations and, if there are any, of those that store them."""
    has_stored = any(run.experiment == name and run.is_stored for run in runs)
    return [compare_runs(name, published, runs, is_stored=is_stored) for is_stored in (False, True)[: 1 + has_stored]]


def compare_runs(
    name: str, published: PublishedNumber, runs: Sequence[TrainingRun], *, is_stored: bool = False, what: str = ""
) -> Comparison:
    """Compare the mean of an experiment's finished runs with the paper. Without runs, name the training command.

    The mean is an accuracy if the published number is one ("top-1" in its quantity), otherwise an error. ``is_stored``
    selects the runs that store activations. ``what`` is the name of the number, by default the name of the runs.
    """
    of_kind = [run for run in runs if run.experiment == name and run.is_stored == is_stored]
    finished = [run for run in of_kind if run.is_finished]
    what = what or (of_kind[0].group if of_kind else name)
    if not finished:
        return needs_training(what, published, name, of_kind, is_stored=is_stored)
    top1 = mean(run.top1[-1] for run in finished)
    measured = top1 if "top-1" in published.quantity else 100 - top1
    return Comparison(what, measured, published, **facts_of(finished))


def compare_errors(
    what: str, number: PublishedNumber, first: Sequence[TrainingRun], second: Sequence[TrainingRun]
) -> Comparison:
    """Compare the mean error of finished runs minus the mean of a ``second`` group, in points."""
    difference = mean(run.top1[-1] for run in second) - mean(run.top1[-1] for run in first)
    return Comparison(what, difference, number, **facts_of(first, second))


def facts_of(*groups: Sequence[TrainingRun]) -> dict[str, Any]:
    """Return the fields of a comparison that describe its runs: one group (mean) or two groups (difference)."""
    runs = [run for group in groups for run in group]
    return {
        "n": min(map(len, groups)),
        "spread": standard_error_of_means(*groups),
        "weakness": missing_images(runs),
        "environment": environment_of(runs),
    }


def missing_images(runs: Sequence[TrainingRun]) -> str:
    """Return a remark on runs that were trained or scored on part of the data set; "" if there are none."""
    for run in runs:
        counts = (run.num_training_images, run.num_validation_images)
        num_classes = run.config.network.num_classes
        whole = (TRAINING_IMAGES[num_classes], VALIDATION_IMAGES[num_classes])
        for done, count, whole_count in zip(("trained", "scored"), counts, whole, strict=True):
            if count is None:
                return f"the number of images {done} on is not recorded"
            if count != whole_count:
                return f"{done} on {count:,} of {whole_count:,} images"
    return ""


def needs_training(
    what: str,
    published: PublishedNumber,
    experiment: str,
    runs: Sequence[TrainingRun] = (),
    *,
    is_stored: bool = False,
) -> Comparison:
    """Return the comparison of a number whose experiment was not trained yet, with the training command.

    ``runs`` are its unfinished runs. For an experiment with changed settings, or with stored activations, the command
    names a FILE to write.
    """
    is_changed = " " in experiment or is_stored
    file = f'; FILE: {experiment}, network.memory "{"plain" if is_stored else "auto"}"' if is_changed else ""
    started = max(runs, key=lambda run: len(run.epochs), default=None)
    done = "" if started is None else f"; a run has {len(started.epochs)} of {started.num_epochs} epochs"
    command = f"`{command_of('FILE' if is_changed else experiment)}`{file}{done}"
    return Comparison(what, None, published, pending=command)


def command_of(experiment: str) -> str:
    """Return the command that trains an experiment; DATA is a folder with train/ and val/."""
    return f"zoo train {experiment} DATA"


def standard_error_of_means(*groups: Sequence[TrainingRun]) -> float | None:
    """Return the standard error, in points, of the mean accuracy of a group, or of the difference between two groups.

    Returns None if the number of scored images of a single run is unknown, or if its accuracy is 0 or 100 %.
    """
    errors = [_standard_error(runs) for runs in groups]
    return None if None in errors else math.hypot(*(error for error in errors if error is not None))


def _standard_error(runs: Sequence[TrainingRun]) -> float | None:
    """Return the standard error of the mean over runs, in points.

    For a single run, combines the sampling error of the scored images with `BETWEEN_RUNS`.
    """
    if len(runs) > 1:
        return stdev(run.top1[-1] for run in runs) / math.sqrt(len(runs))
    count = runs[0].num_validation_images
    sampling = classification.standard_error(runs[0].top1[-1], count) if count else None
    return None if sampling is None else math.hypot(sampling, BETWEEN_RUNS)
