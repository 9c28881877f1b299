"""Figure 4 of Gomez et al. 2017: angles between gradients, and training curves.

They are read from training runs that logged angles (training.gradient_angle_meter).

Tested by tests/reproduce/test_revnet.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from zoo.config import load_experiment
from zoo.reproduce.comparison import RULES, Comparison, Section, compare
from zoo.reproduce.error_rates import error_curves, facts_of, needs_training
from zoo.reproduce.published_numbers import published
from zoo.reproduce.training_runs import TrainingRun, data_of, environment_of
from zoo.run.plot_style import Line, Panel

CIFAR_EXPERIMENT = "revnet164_cifar10"
LONG_CIFAR_EXPERIMENT = "revnet164_cifar10_longer"  # longer by the published number of epochs, with the angle meter


def report_reconstruction(runs: Sequence[TrainingRun]) -> Section:
    """Return Figure 4: the angles, and the curves of runs that reconstruct activations and of runs that store them."""
    section = Section(
        "figure4", "Figure 4: reconstructed and stored activations",
        "Angle between the gradients of a batch from stored and from reconstructed activations, with the same weights: "
        "2 arcsin(|u - v| / 2) of the unit vectors.",
    )  # fmt: skip
    metered = _by_experiment([run for run in runs if run.angles and not run.is_stored])
    for name, group in metered.items():
        section.add(
            f"{name}: largest angle",
            max(map(_largest_angle, group)),
            unit="degrees",
            n=len(group),
            environment=environment_of(group),
            data=data_of(group),
        )
    if metered:
        lines = [_angle_line(run) for group in metered.values() for run in group]
        section.panels.append(Panel("gradients", "training step", "angle, degrees", lines, y_log=True))
    section.comparisons.append(_compare_length([run for run in runs if run.experiment == LONG_CIFAR_EXPERIMENT]))
    for name, group in _by_experiment(runs).items():
        if {run.is_stored for run in group} == {True, False}:
            section.panels += [*loss_curves(name, group), error_curves(name, group)]
    return section


def _by_experiment(runs: Sequence[TrainingRun]) -> dict[str, list[TrainingRun]]:
    """Return the runs of RevNets by experiment, starting with the runs of the paper's figure."""
    groups: dict[str, list[TrainingRun]] = {CIFAR_EXPERIMENT: [], LONG_CIFAR_EXPERIMENT: []}
    for run in runs:
        groups.setdefault(run.experiment, []).append(run)
    return {name: group for name, group in groups.items() if group}


def loss_curves(title: str, runs: Sequence[TrainingRun]) -> list[Panel]:
    """Return the panel of the runs' training losses over their epochs; none if they were not recorded."""
    lines = [run.line([*losses], [*losses.values()]) for run in runs if (losses := _losses(run))]
    return [Panel(title, "epoch", "training loss, mean of the epoch", lines, y_log=True)] if lines else []


def _losses(run: TrainingRun) -> dict[float, float]:
    """Return the training loss of each epoch with a positive loss, whose logarithm is plotted."""
    return {e["epoch"]: float(e["train_loss"]) for e in run.epochs if e.get("train_loss")}


def _angle_line(run: TrainingRun) -> Line:
    known = [angle for angle in run.angles if angle["degrees"] is not None]
    return run.line([angle["step"] for angle in known], [float(angle["degrees"]) for angle in known])


def _largest_angle(run: TrainingRun) -> float:
    return max(math.inf if angle["degrees"] is None else float(angle["degrees"]) for angle in run.angles)


def _compare_length(runs: Sequence[TrainingRun]) -> Comparison:
    """Return the number of epochs after the regular training during which the error is stable."""
    number = published("revnet", "figure4/more_epochs")
    finished = [run for run in runs if run.is_finished]
    if not finished:
        return needs_training(number.quantity, number, LONG_CIFAR_EXPERIMENT, runs, unit="epochs")
    regular = load_experiment(CIFAR_EXPERIMENT).optimizer.schedule.epochs
    change = max(run.top1[regular - 1] - run.top1[-1] for run in finished)
    stable = finished[0].num_epochs - regular if change <= RULES["accuracy trained"].tolerance else 0
    facts = facts_of(finished) | {"spread": 0.0}
    return compare(number.quantity, stable, number, note=f"the error changes by {change:+.2f} points", **facts)
