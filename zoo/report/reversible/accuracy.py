"""Test errors of trained networks beside the published ones; what was not trained has the command that would do it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from zoo.report.reversible.runs import Run, command_of
from zoo.report.reversible.schema import Figure, Line, Panel, Section, not_run, unpublished

POINTS = 0.5  # by which single runs of the same settings differ (two implementations in the README of memcnn)
SETTING = (
    f"Test error in percent after the last epoch, mean of all finished runs; close means within {POINTS} points. "
    "Short experiments have no published counterpart."
)

# Table 3 of Gomez et al. 2017 has the CIFARs, Table 4 ImageNet with a single crop.
CIFAR = {
    "resnet32_cifar10": 7.14, "revnet38_cifar10": 7.24, "resnet110_cifar10": 5.74, "revnet110_cifar10": 5.76,
    "resnet164_cifar10": 5.24, "revnet164_cifar10": 5.17, "resnet32_cifar100": 29.95, "revnet38_cifar100": 28.96,
    "resnet110_cifar100": 26.44, "revnet110_cifar100": 25.40, "resnet164_cifar100": 23.37, "revnet164_cifar100": 23.69,
}  # fmt: skip
IMAGENET = {"resnet101_preact": 23.01, "revnet104": 23.10}


def report_errors(
    key: str, title: str, published: Mapping[str, float | None], runs: Sequence[Run], short: Sequence[str] = ()
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


def errors_of(name: str, published: float | None, runs: Sequence[Run]) -> list[Figure]:
    """Return the error of an experiment, of runs that reconstruct and of runs that store if there are any."""
    figures = []
    for is_stored in (False, True):
        found = [run for run in runs if run.experiment == name and run.is_stored == is_stored]
        if found or not is_stored:
            figures.append(_error(name + ", stored" * is_stored, name, published, found))
    return figures


def curves(title: str, runs: Sequence[Run]) -> Panel:
    """Return the panel of the runs' test errors over their epochs."""
    lines = [Line(run.label, [*range(1, len(run.top1) + 1)], [100 - top1 for top1 in run.top1]) for run in runs]
    return Panel(title, "epoch", "test error, %", lines)


def _error(what: str, name: str, published: float | None, runs: Sequence[Run]) -> Figure:
    finished = [run for run in runs if run.is_finished]
    if not finished:
        started = max((len(run.top1) for run in runs), default=0)
        if not started:
            return not_run(what, published, "%", command_of(name))
        return Figure(what, published, None, "%", f"not finished: {started} of {runs[0].num_epochs} epochs")
    measured = 100 - mean(run.top1[-1] for run in finished)
    what = f"{what} ({len(finished)} run{'s' * (len(finished) > 1)})"
    if published is None:
        return unpublished(what, measured, "%")
    difference = measured - published
    verdict = f"within {POINTS} points" if abs(difference) <= POINTS else f"off by {difference:+.2f} points"
    return Figure(what, published, measured, "%", verdict)
