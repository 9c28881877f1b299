"""Figure 4 of Gomez et al. 2017: angles between gradients, and the length of stable training.

Both come from training runs that logged angles (training.gradient_angle_meter).
"""

from __future__ import annotations

from collections.abc import Sequence

from zoo.benchmark.plot_style import Line, Panel
from zoo.config.parse import load_experiment
from zoo.reproduce.comparison import CRITERIA, Comparison, ReportSection
from zoo.reproduce.error_rates import facts_of, needs_training
from zoo.reproduce.measurements import measures
from zoo.reproduce.published_numbers import published_number
from zoo.reproduce.training_runs import TrainingRun

CIFAR_EXPERIMENT = "revnet164_cifar10"
ANGLES = "angle between the gradients from stored and from reconstructed activations"
LONG_CIFAR_EXPERIMENT = "revnet164_cifar10_longer"  # longer by the published number of epochs, with the angle meter


@measures("revnet", "Figure 4", given="runs")
def report_reconstruction(runs: Sequence[TrainingRun]) -> ReportSection:
    """Return Figure 4: the angles of runs that reconstruct activations, and the length of a stable training."""
    section = ReportSection("figure4", "Figure 4: reconstructed and stored activations")
    metered = [run for run in runs if run.angles and not run.is_stored]
    if metered:
        lines = [_angle_line(run) for run in metered]
        section.panels.append(Panel(ANGLES, "training step", "angle, degrees", lines, y_log=True))
    section.comparisons.append(_compare_length([run for run in runs if run.experiment == LONG_CIFAR_EXPERIMENT]))
    return section


def _angle_line(run: TrainingRun) -> Line:
    known = [angle for angle in run.angles if angle["degrees"] is not None]
    return run.line([angle["step"] for angle in known], [float(angle["degrees"]) for angle in known])


def _compare_length(runs: Sequence[TrainingRun]) -> Comparison:
    """Return the number of epochs after the regular training during which the error is stable."""
    number = published_number("revnet", "figure4/more_epochs")
    finished = [run for run in runs if run.is_finished]
    if not finished:
        return needs_training(number.quantity, number, LONG_CIFAR_EXPERIMENT, runs)
    regular = load_experiment(CIFAR_EXPERIMENT).optimizer.schedule.epochs
    change = max(run.top1[regular - 1] - run.top1[-1] for run in finished)
    stable = finished[0].num_epochs - regular if change <= CRITERIA["accuracy trained"].tolerance else 0
    facts = facts_of(finished) | {"spread": 0.0}
    return Comparison(number.quantity, stable, number, note=f"the error changes by {change:+.2f} points", **facts)
