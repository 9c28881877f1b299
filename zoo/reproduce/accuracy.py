"""Test errors of trained networks beside the published ones; what was not trained has the command that would do it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev

from zoo.reproduce.runs import Run, command_of
from zoo.reproduce.schema import Figure, Panel, Published, Section, not_run

CLOSE = 0.5  # points, by which single runs of the same settings differ (two implementations in the README of memcnn)
ERRORS = (
    "Test error in percent after the last epoch, mean of n finished runs. Its standard error is given twice: between "
    "the runs (from n = 2 on), and as the chance of the images that were scored."
)
SETTING = f"{ERRORS} Close means within {CLOSE} points. Short experiments have no published counterpart."

# All are printed in Gomez et al. 2017: the CIFARs in Table 3, ImageNet with a single crop in Table 4.
_CIFAR = {
    "resnet32_cifar10": 7.14, "revnet38_cifar10": 7.24, "resnet110_cifar10": 5.74, "revnet110_cifar10": 5.76,
    "resnet164_cifar10": 5.24, "revnet164_cifar10": 5.17, "resnet32_cifar100": 29.95, "revnet38_cifar100": 28.96,
    "resnet110_cifar100": 26.44, "revnet110_cifar100": 25.40, "resnet164_cifar100": 23.37, "revnet164_cifar100": 23.69,
}  # fmt: skip
CIFAR = {name: Published(error, "printed", "Table 3") for name, error in _CIFAR.items()}
IMAGENET = {
    "resnet101_preact": Published(23.01, "printed", "Table 4"),
    "revnet104": Published(23.10, "printed", "Table 4"),
}


def report_errors(
    key: str, title: str, published: Mapping[str, Published | None], runs: Sequence[Run], short: Sequence[str] = ()
) -> Section:
    """Return the test errors of the experiments in ``published`` and of runs of the ``short`` ones."""
    section = Section(key, title, SETTING)
    for name, error in published.items():
        section.figures += errors_of(name, error, runs)
    for name in short:
        section.figures += errors_of(name, None, runs) if any(run.experiment == name for run in runs) else []
    shown = [run for run in runs if run.experiment in {*published, *short}]
    section.panels += [curves("runs", shown)] if shown else []
    return section


def errors_of(name: str, published: Published | None, runs: Sequence[Run]) -> list[Figure]:
    """Return the error of an experiment, of runs that reconstruct and of runs that store if there are any."""
    figures = []
    for is_stored in (False, True):
        found = [run for run in runs if run.experiment == name and run.is_stored == is_stored]
        if found or not is_stored:
            figures.append(_error(name + ", stored" * is_stored, name, published, found))
    return figures


def curves(title: str, runs: Sequence[Run]) -> Panel:
    """Return the panel of the runs' test errors over their epochs."""
    lines = [
        run.line([*range(1, len(run.top1) + 1)], [100 - top1 for top1 in run.top1], run.stop_reason) for run in runs
    ]
    return Panel(title, "epoch", "test error, %", lines)


def _error(what: str, name: str, published: Published | None, runs: Sequence[Run]) -> Figure:
    finished = [run for run in runs if run.is_finished]
    if not finished:
        started = max((len(run.top1) for run in runs), default=0)
        if not started:
            return not_run(what, published, "%", command_of(name))
        return Figure(what, published, None, "%", f"not finished: {started} of {runs[0].num_epochs} epochs")
    measured = 100 - mean(run.top1[-1] for run in finished)
    what = f"{what} (n = {len(finished)}{_images(finished)})"
    if published is None:
        return Figure(what, None, measured, "%", f"nothing published; standard error {_standard_error(finished)}")
    difference = measured - float(published.value)
    verdict = f"within {CLOSE} points" if abs(difference) <= CLOSE else f"off by {difference:+.2f} points"
    return Figure(what, published, measured, "%", f"{verdict}; standard error {_standard_error(finished)}")


def error_of_difference(first: Sequence[Run], second: Sequence[Run]) -> str:
    """Return the standard error of the difference of two means, as `_standard_error` has it for one."""
    between = _between(first), _between(second)
    by_images = _by_images(first), _by_images(second)
    return _both(
        None if None in between else math.hypot(*(error for error in between if error is not None)),
        None if None in by_images else math.hypot(*(error for error in by_images if error is not None)),
    )


def _standard_error(runs: Sequence[Run]) -> str:
    return _both(_between(runs), _by_images(runs))


def _both(between: float | None, by_images: float | None) -> str:
    texts = [f"{between:.2f} between runs"] if between is not None else ["unknown between runs"]
    texts += [f"{by_images:.2f} by the images"] if by_images is not None else []
    return ", ".join(texts)


def _between(runs: Sequence[Run]) -> float | None:
    """Return the standard error of the mean over runs, in points; None for one run."""
    return stdev(run.top1[-1] for run in runs) / math.sqrt(len(runs)) if len(runs) > 1 else None


def _by_images(runs: Sequence[Run]) -> float | None:
    """Return the binomial standard error of a score, in points; None if not all runs scored the same number."""
    counts = {run.num_validation_images for run in runs}
    count = counts.pop()
    share = mean(run.top1[-1] for run in runs) / 100
    return 100 * math.sqrt(share * (1 - share) / count) if count and not counts else None


def _images(runs: Sequence[Run]) -> str:
    """Return the numbers of images that the runs were trained on and scored on, as far as they are known."""
    texts = []
    for what, counts in (
        ("training", {run.num_training_images for run in runs}),
        ("validation", {run.num_validation_images for run in runs}),
    ):
        known = sorted(count for count in counts if count)
        texts += [f"{' or '.join(f'{count:,}' for count in known)} {what} images"] if known else []
    return "".join(f", {text}" for text in texts)
