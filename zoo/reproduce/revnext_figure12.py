"""Figure 12 of Hascoet et al. 2023: accuracy of networks that reconstruct beside the same networks that store."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from zoo.reproduce.comparison import Comparison, PublishedValue, Section
from zoo.reproduce.error_rates import ERRORS, error_curves, errors_of, standard_error
from zoo.reproduce.training_runs import TrainingRun

# Top-1 in percent after the last epoch, stored and reconstructed, from outputs in the notebooks of the authors' public
# code. Flat networks: layers of each level, slope 0.2, 40 epochs; the reconstructing ones are half as wide again, with
# 48 channels. Hybrids: blocks after each pool, 52 to 66 epochs stored and 68 to 82 reconstructed.
FLAT_LOG, HYBRID_LOG = "notebook 4, cell 6", "notebook 5, cell 6"
FLAT = {
    (1, 1, 1): (87.08, 88.60), (1, 2, 1): (89.97, 91.05), (1, 2, 2): (91.96, 92.65), (2, 2, 2): (92.54, 93.02),
    (2, 3, 2): (93.03, 92.59), (2, 3, 3): (93.39, 62.29), (3, 3, 3): (93.34, 63.89), (3, 4, 3): (93.63, 36.36),
    (3, 4, 4): (94.06, 49.50), (4, 4, 4): (93.79, 34.36),
}  # fmt: skip
HYBRID = [
    ((1, 1), (92.19, 92.17)), ((1, 2), (92.70, 92.19)), ((1, 2), (92.55, 92.01)), ((2, 2), (92.66, 92.41)),
    ((2, 3), (92.50, 92.36)), ((2, 3), (92.65, 92.34)), ((3, 3), (92.89, 92.19)), ((3, 4), (92.46, 91.68)),
]  # fmt: skip
# The slope of flat networks 1-2-2, and the top-1 that they reach approximately. The log of these runs, cell 10, ends in
# the seventh of the twenty.
SLOPES_PLOT = "authors' notebook 4, cell 11"
BY_SLOPE = {0.001: (92.5, 70), 0.05: (92.5, 57), 0.1: (92, 92), 0.5: (88.5, 89), 0.75: (84.5, 85)}
SHORT = ("revnext_cifar10_short", *(f"revnext_flat{layers}_cifar10_short" for layers in (3, 9, 12)))


def report_reconstruction(runs: Sequence[TrainingRun]) -> Section:
    """Return the published accuracies, and the errors of runs of the short experiments with both kinds of memory."""
    section = Section(
        "figure12", "Figure 12: accuracy with and without reconstruction",
        'CIFAR-10. Published: top-1 in percent, "stored to reconstructed", of 40 epochs and more. Short experiments '
        f'are trained with network.memory "auto", which reconstructs, and "plain", which stores. {ERRORS}',
    )  # fmt: skip
    for layers, accuracies in FLAT.items():
        log = PublishedValue("{:.2f} to {:.2f}".format(*accuracies), "authors' log", FLAT_LOG)
        options = f'{{"layers": {list(layers)}}}'
        section.comparisons.append(_not_run(f"flat, {_levels(layers)}", log, "revnext_flat_cifar10", options))
    for slope, approximate in BY_SLOPE.items():
        plot = PublishedValue("about {} to {}".format(*approximate), "read off a figure", SLOPES_PLOT)
        options = f'{{"layers": [1, 2, 2]}} and network.activation_param {slope}'
        section.comparisons.append(_not_run(f"flat, 1-2-2, slope {slope}", plot, "revnext_flat_cifar10", options))
    for number, (blocks, accuracies) in enumerate(HYBRID, start=1):
        log = PublishedValue("{:.2f} to {:.2f}".format(*accuracies), "authors' log", HYBRID_LOG)
        options = f'{{"blocks": {list(blocks)}}}'
        what = f"hybrid, run {number}: {_levels(blocks)}"
        section.comparisons.append(_not_run(what, log, "revnext_cifar10", options))
    for name in SHORT:
        runs_of_name = [run for run in runs if run.experiment == name]
        section.comparisons += [*errors_of(name, None, runs_of_name), *_difference(name, runs_of_name)]
        section.panels += [error_curves(name, runs_of_name)] if runs_of_name else []
    section.notes.append(
        "the authors' flat networks train with 7 layers and collapse from 8 on when they reconstruct, although those "
        "were built with 48 channels in place of 32 (network.options.channels); hybrids lose 0.0 to 0.8 points"
    )
    return section


def _levels(depths: Sequence[int]) -> str:
    return "-".join(map(str, depths))


def _not_run(what: str, published: PublishedValue, experiment: str, options: str) -> Comparison:
    """Return the comparison of a published pair of accuracies with nothing; two trainings would be needed."""
    command = f"zoo train FILE DATA`, FILE: experiments/{experiment}.json with network.options {options}"
    return Comparison(what, published, None, "%", f"not run: `{command}, memory auto and plain")


def _difference(name: str, runs: Sequence[TrainingRun]) -> list[Comparison]:
    """Return what reconstruction costs, in points of the mean error; nothing without finished runs of both kinds."""
    stored, reconstructed = (
        [run for run in runs if run.is_finished and run.is_stored == is_stored] for is_stored in (True, False)
    )
    if not stored or not reconstructed:
        return []
    lost = mean(run.top1[-1] for run in stored) - mean(run.top1[-1] for run in reconstructed)
    what = f"{name}: lost by reconstruction (n = {len(reconstructed)} against {len(stored)})"
    verdict = f"nothing published for a short training; standard error {standard_error(stored, reconstructed)}"
    return [Comparison(what, None, lost, "points", verdict)]
