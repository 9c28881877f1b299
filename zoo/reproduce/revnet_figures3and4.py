"""Figures 3 and 4 of Gomez et al. 2017: training curves, and angles between gradients.

Curves and angles are read from training runs that logged angles (training.gradient_angle_meter).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, stdev

from zoo.config import load_experiment
from zoo.reproduce.comparison import RULES, Comparison, Section, Verdict, compare, not_measured
from zoo.reproduce.error_rates import command_of, compare_errors, error_curves, facts_of, missing_images, needs_training
from zoo.reproduce.operations import operations_of
from zoo.reproduce.published_numbers import PublishedNumber, published
from zoo.reproduce.training_runs import TrainingRun
from zoo.run.plot_style import Line, Panel

IMAGENET_EXPERIMENTS = ("revnet104", "resnet101_preact")
CIFAR_EXPERIMENT = "revnet164_cifar10"
LONG_CIFAR_EXPERIMENT = "revnet164_cifar10_longer"  # longer by the published number of epochs, with the angle meter
TREND_PARTS = 5  # a trend compares the first fifth of the angles with the last


def report_imagenet_curves(runs: Sequence[TrainingRun]) -> Section:
    """Return Figure 3: the training curves of RevNet-104 and ResNet-101."""
    section = Section(
        "figure3", "Figure 3: training on ImageNet",
        "Ratio of the training losses of RevNet-104 and ResNet-101, geometric mean over the epochs.",
    )  # fmt: skip
    epochs, slowdown = (published("revnet", f"figure3/{key}") for key in ("epochs", "slowdown"))
    for name in IMAGENET_EXPERIMENTS:
        ours = load_experiment(name).optimizer.schedule.epochs
        section.add(f"{name}: epochs of the experiment", ours, epochs)
    revnet, resnet = (
        [run for run in runs if run.experiment == name and not run.is_stored] for name in IMAGENET_EXPERIMENTS
    )
    compared = _compare_loss("training loss, RevNet-104 over ResNet-101", slowdown, revnet, resnet)
    commands = " and ".join(f"`{command_of(name)}`" for name in IMAGENET_EXPERIMENTS)
    operations = sum(map(operations_of, IMAGENET_EXPERIMENTS))
    missing = not_measured(slowdown.quantity, slowdown, "%", Verdict("needs training", commands), operations=operations)
    section.comparisons.append(compared or missing)
    shown = [*revnet, *resnet]
    section.panels += [*loss_curves("ImageNet", shown), error_curves("ImageNet", shown)] if shown else []
    return section


def report_reconstruction(runs: Sequence[TrainingRun]) -> Section:
    """Return Figure 4: the angles, and the curves of runs that reconstruct activations and of runs that store them."""
    section = Section(
        "figure4", "Figure 4: reconstructed and stored activations",
        "Angle between the gradients of a batch from stored and from reconstructed activations, with the same weights: "
        "2 arcsin(|u - v| / 2) of the unit vectors. Trend: mean of the last fifth of a run's angles over that of the "
        "first fifth. Training losses are compared by the geometric mean of their ratio over the epochs, errors after "
        "the last epoch.",
    )  # fmt: skip
    metered = _by_experiment([run for run in runs if run.angles and not run.is_stored])
    for name, group in metered.items():
        section.comparisons += _compare_angles(name, group)
    if metered:
        lines = [_angle_line(run) for group in metered.values() for run in group]
        section.panels.append(Panel("gradients", "training step", "angle, degrees", lines, y_log=True))
    else:
        trend = published("revnet", "figure4/trend")
        section.comparisons.append(needs_training(trend.quantity, trend, LONG_CIFAR_EXPERIMENT, unit=""))
    section.comparisons.append(_compare_length([run for run in runs if run.experiment == LONG_CIFAR_EXPERIMENT]))
    section.comparisons += _compare_kinds(runs)
    for name, group in _by_experiment(runs).items():
        if {run.is_stored for run in group} == {True, False}:
            section.panels += [*loss_curves(name, group), error_curves(name, group)]
    return section


def _by_experiment(runs: Sequence[TrainingRun]) -> dict[str, list[TrainingRun]]:
    """Return the runs of RevNets by experiment, starting with those of the paper's figure."""
    groups: dict[str, list[TrainingRun]] = {CIFAR_EXPERIMENT: [], LONG_CIFAR_EXPERIMENT: []}
    for run in runs:
        groups.setdefault(run.experiment, []).append(run)
    return {name: group for name, group in groups.items() if group}


def loss_curves(title: str, runs: Sequence[TrainingRun]) -> list[Panel]:
    """Return the panel of the runs' training losses over their epochs; none if they were not recorded."""
    lines = [run.line([*losses], [*losses.values()]) for run in runs if (losses := _losses(run))]
    return [Panel(title, "epoch", "training loss, mean of the epoch", lines, y_log=True)] if lines else []


def _losses(run: TrainingRun) -> dict[float, float]:
    """Return the training loss of each epoch with a positive loss, whose logarithm is plotted and compared."""
    return {e["epoch"]: float(e["train_loss"]) for e in run.epochs if e.get("train_loss")}


def _angle_line(run: TrainingRun) -> Line:
    known = [angle for angle in run.angles if angle["degrees"] is not None]
    return run.line([angle["step"] for angle in known], [float(angle["degrees"]) for angle in known])


def _compare_angles(name: str, runs: Sequence[TrainingRun]) -> list[Comparison]:
    """Return the trend and the maximum of the angles of an experiment's runs."""
    angles = [[math.inf if a["degrees"] is None else float(a["degrees"]) for a in run.angles] for run in runs]
    ends = [-(-len(each) // TREND_PARTS) for each in angles]
    first = mean(mean(each[:end]) for each, end in zip(angles, ends, strict=True))
    last = mean(mean(each[-end:]) for each, end in zip(angles, ends, strict=True))
    facts = facts_of(runs) | {"weakness": _weakness(name, runs), "spread": None}
    return [
        compare(f"{name}: trend of the angle", last / first, published("revnet", "figure4/trend"),
                note=f"{first:.2g} to {last:.2g} degrees", **facts),
        compare(f"{name}: largest angle", max(map(max, angles)), unit="degrees", **facts),
    ]  # fmt: skip


def _weakness(name: str, runs: Sequence[TrainingRun]) -> str:
    """Return the reason why the runs are not comparable with the paper's training, or ""."""
    if name not in (CIFAR_EXPERIMENT, LONG_CIFAR_EXPERIMENT):
        return f"not the paper's training, which `zoo train {LONG_CIFAR_EXPERIMENT} DATA` repeats"
    unfinished = [run for run in runs if not run.is_finished]
    if unfinished:
        return f"a run has {len(unfinished[0].epochs)} of {unfinished[0].num_epochs} epochs"
    return missing_images(runs)


def _compare_length(runs: Sequence[TrainingRun]) -> Comparison:
    """Return the number of epochs after the regular training during which the error is stable."""
    number = published("revnet", "figure4/more_epochs")
    finished = [run for run in runs if run.is_finished]
    if not finished:
        return needs_training(number.quantity, number, LONG_CIFAR_EXPERIMENT, runs, unit="epochs")
    regular = load_experiment(CIFAR_EXPERIMENT).optimizer.schedule.epochs
    change = max(run.top1[regular - 1] - run.top1[-1] for run in finished)
    stable = finished[0].num_epochs - regular if change <= RULES["accuracy trained"].tolerance else 0
    facts = facts_of(finished) | {"weakness": _weakness(LONG_CIFAR_EXPERIMENT, finished), "spread": 0.0}
    return compare(number.quantity, stable, number, note=f"the error changes by {change:+.2f} points", **facts)


def _compare_kinds(runs: Sequence[TrainingRun]) -> list[Comparison]:
    """Return the training loss and the error of runs that reconstruct, compared with runs that store."""
    numbers = [published("revnet", f"figure4/{key}") for key in ("training_loss", "error")]
    comparisons = []
    for name, group in _by_experiment([run for run in runs if run.is_finished]).items():
        reconstructed, stored = ([run for run in group if run.is_stored == kind] for kind in (False, True))
        if reconstructed and stored:
            weakness, (loss, error) = _weakness(name, group), numbers
            of_loss = _compare_loss(f"{name}: {loss.quantity}", loss, reconstructed, stored)
            of_error = compare_errors(f"{name}: {error.quantity}", error, reconstructed, stored)
            comparisons += [
                replace(found, weakness=weakness or found.weakness)
                for found in (of_loss, of_error)
                if found is not None
            ]
    if not comparisons:
        comparisons = [
            needs_training(number.quantity, number, CIFAR_EXPERIMENT, unit=number.unit, memory="plain")
            for number in numbers
        ]
    return comparisons


def _compare_loss(
    what: str, number: PublishedNumber, first: Sequence[TrainingRun], second: Sequence[TrainingRun]
) -> Comparison | None:
    """Return the ratio of the training losses of two groups; None unless both have finished runs with losses."""
    groups = [[run for run in runs if run.is_finished and _losses(run)] for runs in (first, second)]
    if not all(groups):
        return None
    logs = [[mean(map(math.log, _losses(run).values())) for run in runs] for runs in groups]
    difference = 100 * (math.exp(mean(logs[0]) - mean(logs[1])) - 1)
    is_known = min(map(len, groups)) > 1
    spread = 100 * math.hypot(*(stdev(each) / math.sqrt(len(each)) for each in logs)) if is_known else None
    return compare(what, difference, number, "%", **(facts_of(*groups) | {"spread": spread}))
