"""Figure 12 of Hascoet et al. 2023: accuracy of networks that reconstruct beside the same networks that store."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from zoo.report.reversible.accuracy import curves, errors_of
from zoo.report.reversible.runs import Run
from zoo.report.reversible.schema import Figure, Section

# Top-1 in percent, stored and reconstructed, from the logs in the authors' archived notebooks. Flat networks of 3 to 12
# layers, slope 0.2, 40 epochs; the reconstructing ones are half as wide again. Hybrids of rising depth, 52 to 82.
FLAT = {
    3: (87.1, 88.6), 4: (90.0, 91.1), 5: (92.0, 92.7), 6: (92.5, 93.0), 7: (93.0, 92.6), 8: (93.4, 62.3),
    9: (93.3, 63.9), 10: (93.6, 36.4), 11: (94.1, 49.5), 12: (93.8, 34.4),
}  # fmt: skip
HYBRID = [
    (92.2, 92.2),
    (92.7, 92.2),
    (92.6, 92.0),
    (92.5, 92.4),
    (92.7, 92.4),
    (92.5, 92.3),
    (92.9, 92.2),
    (92.5, 91.7),
]
# Flat networks of 5 layers, read off the same logs: slope -> about what they reach.
BY_SLOPE = {0.001: (92.5, 70), 0.05: (92.5, 57), 0.1: (92, 92), 0.5: (88.5, 88.5), 0.75: (84.5, 84.5)}
SHORT = ("revnext_cifar10_short", *(f"revnext_flat{layers}_cifar10_short" for layers in (3, 9, 12)))


def report_reconstruction(runs: Sequence[Run]) -> Section:
    """Return the published accuracies, and the errors of runs of the short experiments with both kinds of memory."""
    section = Section(
        "figure12", "Figure 12: accuracy with and without reconstruction",
        'CIFAR-10. Published: top-1 in percent, "stored to reconstructed", of 40 epochs and more. Short experiments '
        'are trained with network.memory "auto", which reconstructs, and "plain", which stores: test error in percent.',
    )  # fmt: skip
    for depth, published in FLAT.items():
        layers = [depth // 3 + (level >= 3 - depth % 3) for level in range(3)]
        accuracies = "{} to {}".format(*published)
        section.figures.append(
            _not_run(
                f"flat, {depth} layers", accuracies, "revnext_flat_cifar10", f'network.options {{"layers": {layers}}}'
            )
        )
    slopes = ", ".join("slope {}: {} to {}".format(slope, *published) for slope, published in BY_SLOPE.items())
    settings = 'network.options {"layers": [1, 2, 2]} and the slope as network.activation_param'
    section.figures.append(_not_run("flat, 5 layers, other slopes, about", slopes, "revnext_flat_cifar10", settings))
    hybrids = ", ".join("{} to {}".format(*published) for published in HYBRID)
    section.figures.append(
        _not_run("hybrid, eight rising depths", hybrids, "revnext_cifar10", 'network.options {"blocks": ...}')
    )
    for name in SHORT:
        section.figures += errors_of(name, None, runs)
        section.figures += _difference(name, [run for run in runs if run.experiment == name and run.is_finished])
    shown = [run for run in runs if run.experiment in SHORT]
    section.panels += [curves(name, own) for name in SHORT if (own := [r for r in shown if r.experiment == name])]
    section.notes.append(
        "published flat networks collapse from 8 layers on when they reconstruct, although those were built with 48 "
        "channels in place of 32 (network.options.channels); hybrids lose 0.0 to 0.8 points"
    )
    return section


def _not_run(what: str, published: str, experiment: str, settings: str) -> Figure:
    command = f"`zoo train FILE DATA`, FILE: experiments/{experiment}.json with {settings}, memory auto and plain"
    return Figure(what, published, None, "%", f"not run: {command}")


def _difference(name: str, runs: Sequence[Run]) -> list[Figure]:
    """Return what reconstruction costs, in points of the mean error; nothing without runs of both kinds."""
    stored, reconstructed = ([run.top1[-1] for run in runs if run.is_stored == flag] for flag in (True, False))
    if not stored or not reconstructed:
        return []
    lost = mean(stored) - mean(reconstructed)
    return [Figure(f"{name}: lost by reconstruction", None, lost, "points", "nothing published for a short training")]
