"""Test errors of trained networks, compared with the published ones; untrained networks get the training command."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

from zoo.reproduce.comparison import Comparison, Section, Verdict, not_measured
from zoo.reproduce.published_numbers import PublishedNumber
from zoo.reproduce.training_runs import TrainingRun, data_of, environment_of
from zoo.run.plot_style import Panel
from zoo.run.seeds import spread_of
from zoo.tasks import significance

ERROR_TOLERANCE = 0.5  # points: difference between single runs with the same settings (README of memcnn)
# Training and validation images of the whole data sets by number of classes: CIFAR-10, CIFAR-100, ImageNet.
WHOLE_SETS = {10: (50_000, 10_000), 100: (50_000, 10_000), 1000: (1_281_167, 50_000)}
UNKNOWN_DURATION = "unknown duration"
ERROR_DESCRIPTION = (
    "Test error in percent after the last epoch, mean of n finished runs. Its standard error is estimated from the "
    "differences between the runs; for a single run it is the sampling error for the number of scored images."
)
SETTING = (
    f"{ERROR_DESCRIPTION} Reproduced: the difference and twice the standard error are at most {ERROR_TOLERANCE} "
    "points. Off: the difference exceeds both. Underpowered: neither, or not all images of the data set were used. The "
    f"standard error of a single run includes {ERROR_TOLERANCE} points, by which runs with the same settings are known "
    "to differ. Short experiments have no published counterpart."
)


class StandardError(NamedTuple):
    """Two estimates of the standard error of a mean accuracy, or of a difference between two, in points.

    Args:
    - `between`: estimate from the differences between runs; None for a single run.
    - `by_images`: sampling error for the number of scored images; None if that is unknown.
    """

    between: float | None
    by_images: float | None

    @property
    def best(self) -> float | None:
        """The estimate from the runs, which have the published network's images; without it, the sampling error."""
        return self.by_images if self.between is None else self.between

    def __str__(self) -> str:
        """Return both estimates as text."""
        text = "unknown between runs" if self.between is None else f"{self.between:.2f} between runs"
        return text if self.by_images is None else f"{text}, {self.by_images:.2f} from sampling"


def report_errors(
    key: str,
    title: str,
    published: Mapping[str, PublishedNumber | None],
    runs: Sequence[TrainingRun],
    short: Sequence[str] = (),
    duration: str = UNKNOWN_DURATION,
) -> Section:
    """Return the test errors of the experiments in ``published``, and of the ``short`` ones that have runs.

    ``duration`` is the known duration of a training, for experiments without runs.
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
    name: str, published: PublishedNumber | None, runs: Sequence[TrainingRun], duration: str = UNKNOWN_DURATION
) -> list[Comparison]:
    """Return the errors of an experiment's runs: those that reconstruct activations and, if any, those that store them.

    If the published number is an accuracy ("top-1" in its quantity), returns accuracies.
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
        return not_measured(what, published, "%", needs_training(name, runs, duration))
    top1, error = mean(run.top1[-1] for run in finished), standard_error(finished)
    measured = top1 if published is not None and "top-1" in published.quantity else 100 - top1
    if published is None:
        verdict = Verdict("nothing published", f"standard error {error}")
    else:
        verdict = judge(measured - published.number, finished)
    what, facts = what + image_counts(finished), facts_of(finished)
    return Comparison(what, published, measured, "%", verdict, len(finished), error.best, **facts)


def facts_of(runs: Sequence[TrainingRun]) -> dict[str, Any]:
    """Return the provenance of a comparison's runs: environment and images."""
    return {"environment": environment_of(runs), "data": data_of(runs)}


def judge(difference: float, *groups: Sequence[TrainingRun], at_most: bool = False) -> Verdict:
    """Return the verdict on a ``difference`` in points that should be zero, or with ``at_most`` not positive.

    It is the difference between the mean of a group of finished runs and a published number, or between two groups.
    """
    error, num_single = standard_error(*groups), sum(len(runs) == 1 for runs in groups)
    text = f"{difference:+.2f} points, standard error {error}"
    missing = missing_images([run for runs in groups for run in runs])
    if missing or error.best is None:
        return Verdict("underpowered", f"{missing}; {text}" if missing else text)
    doubled = 2 * math.hypot(error.best, ERROR_TOLERANCE * math.sqrt(num_single))
    return decide(difference if at_most else abs(difference), doubled, ERROR_TOLERANCE, text)


def decide(distance: float, doubled_error: float, tolerance: float, text: str) -> Verdict:
    """Return the verdict on a ``distance`` with twice its standard error; ``text`` is the reason."""
    if distance > max(tolerance, doubled_error):
        return Verdict("off", f"off by {text}")
    if distance <= tolerance and doubled_error <= tolerance:
        return Verdict("reproduced", f"within {tolerance:g}: {text}")
    return Verdict("underpowered", text)


def missing_images(runs: Sequence[TrainingRun]) -> str:
    """Return a remark on runs that were trained or scored on a part of the data set; "" if there are none."""
    for run in runs:
        counts = (run.num_training_images, run.num_validation_images)
        whole = WHOLE_SETS[run.config.network.num_classes]
        for done, count, whole_count in zip(("trained", "scored"), counts, whole, strict=True):
            if count is None:
                return f"the number of images {done} on is not recorded"
            if count != whole_count:
                return f"{done} on {count:,} of {whole_count:,} images"
    return ""


def needs_training(experiment: str, runs: Sequence[TrainingRun] = (), duration: str = UNKNOWN_DURATION) -> Verdict:
    """Return the verdict "needs training" with the command that trains the experiment.

    ``runs`` are its unfinished runs; ``duration`` is the known duration of the training.
    """
    started = max(runs, key=lambda run: len(run.epochs), default=None)
    done = "" if started is None else f"; a run has {len(started.epochs)} of {started.num_epochs} epochs"
    return Verdict("needs training", f"`{command_of(experiment)}`, {duration}{done}")


def command_of(experiment: str) -> str:
    """Return the command that trains an experiment; DATA is a folder with train/ and val/."""
    return f"zoo train {experiment} DATA"


def error_curves(title: str, runs: Sequence[TrainingRun]) -> Panel:
    """Return the panel of the runs' test errors over their epochs."""
    lines = [
        run.line([*range(1, len(run.top1) + 1)], [100 - top1 for top1 in run.top1], run.stop_reason) for run in runs
    ]
    return Panel(title, "epoch", "test error, %", lines)


def standard_error(*groups: Sequence[TrainingRun]) -> StandardError:
    """Return the standard error of a group's mean, or of the difference between the means of two, in points."""
    return StandardError(_combined(map(_between_runs, groups)), _combined(map(_by_images, groups)))


def _combined(errors: Iterable[float | None]) -> float | None:
    """Return the standard error of the sum or difference of independent values; None if one is unknown."""
    known = list(errors)
    return None if None in known else math.hypot(*(error for error in known if error is not None))


def _between_runs(runs: Sequence[TrainingRun]) -> float | None:
    """Return the standard error of the mean over runs, in points; None for one run."""
    return spread_of([run.top1[-1] for run in runs]).standard_error


def _by_images(runs: Sequence[TrainingRun]) -> float | None:
    """Return the binomial standard error of a score, in points; None if not all runs scored the same number."""
    counts = {run.num_validation_images for run in runs}
    count = counts.pop()
    return significance.standard_error(mean(run.top1[-1] for run in runs), count) if count and not counts else None


def image_counts(runs: Sequence[TrainingRun]) -> str:
    """Return the numbers of images that the runs were trained on and scored on in brackets, as far as known."""
    texts = []
    for what, counts in (
        ("training", {run.num_training_images for run in runs}),
        ("validation", {run.num_validation_images for run in runs}),
    ):
        known = sorted(count for count in counts if count)
        texts += [f"{' or '.join(f'{count:,}' for count in known)} {what} images"] if known else []
    return f" ({', '.join(texts)})" if texts else ""
