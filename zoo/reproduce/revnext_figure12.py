"""Figure 12 of Hascoet et al. 2023: accuracy of networks that reconstruct beside the same networks that store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import mean

from zoo.reproduce.comparison import Comparison, Section, Verdict, not_measured
from zoo.reproduce.error_rates import ERRORS, error_curves, errors_of, standard_error
from zoo.reproduce.published_numbers import PublishedNumber, published_numbers
from zoo.reproduce.training_runs import TrainingRun

SHORT = ("revnext_cifar10_short", *(f"revnext_flat{layers}_cifar10_short" for layers in (3, 9, 12)))
WIDER = 48  # channels of the flat networks of the depth study that reconstruct, in place of 32
DURATION = "0.2 to 1.6 hours in the logs of the authors, whose GPU they do not name"


def report_reconstruction(runs: Sequence[TrainingRun]) -> Section:
    """Return the published accuracies, and the errors of runs of the short experiments with both kinds of memory."""
    section = Section(
        "figure12", "Figure 12: accuracy with and without reconstruction",
        "CIFAR-10. Published: top-1 in percent after 40 epochs and more. Short experiments are trained with "
        f'network.memory "auto", which reconstructs, and "plain", which stores. {ERRORS}',
    )  # fmt: skip
    section.comparisons += [
        _not_trained(key, number) for key, number in published_numbers("revnext").items() if key.startswith("figure12/")
    ]
    for name in SHORT:
        runs_of_name = [run for run in runs if run.experiment == name]
        section.comparisons += [*errors_of(name, None, runs_of_name), *_difference(name, runs_of_name)]
        section.panels += [error_curves(name, runs_of_name)] if runs_of_name else []
    section.notes += [
        "a training is `zoo train FILE DATA`, where FILE is experiments/revnext_flat_cifar10.json or "
        "revnext_cifar10.json with the options and the memory that the row names",
        "the authors' flat networks train with 7 layers and collapse from 8 on when they reconstruct, although those "
        f"were built with {WIDER} channels in place of 32 (network.options.channels); hybrids lose 0.0 to 0.8 points",
    ]
    return section


def _not_trained(key: str, number: PublishedNumber) -> Comparison:
    """Return the comparison of a published accuracy with nothing, and the settings of the training that it needs."""
    _, network, kind = key.split("/")
    family, *_, depths_or_slope = network.split("_")
    settings = [f'network.memory "{"plain" if kind == "stored" else "auto"}"']
    options: dict[str, object]
    if "_slope_" in network:
        options = {"layers": [1, 2, 2]}
        settings.append(f"network.activation_param {depths_or_slope}")
    else:
        options = {"layers" if family == "flat" else "blocks": [int(depth) for depth in depths_or_slope.split("-")]}
        options |= {"channels": WIDER} if family == "flat" and kind == "reconstructed" else {}
    settings.insert(0, f"network.options {json.dumps(options)}")
    reason = f"`zoo train FILE DATA`, FILE: {number.network} with {', '.join(settings)}; {DURATION}"
    return not_measured(number.quantity, number, "%", Verdict("needs training", reason))


def _difference(name: str, runs: Sequence[TrainingRun]) -> list[Comparison]:
    """Return what reconstruction costs, in points of the mean error; nothing without finished runs of both kinds."""
    stored, reconstructed = (
        [run for run in runs if run.is_finished and run.is_stored == is_stored] for is_stored in (True, False)
    )
    if not stored or not reconstructed:
        return []
    lost = mean(run.top1[-1] for run in stored) - mean(run.top1[-1] for run in reconstructed)
    what = f"{name}: lost by reconstruction (n = {len(reconstructed)} against {len(stored)})"
    verdict = Verdict("nothing published", f"standard error {standard_error(stored, reconstructed)}")
    return [Comparison(what, None, lost, "points", verdict, n=min(len(stored), len(reconstructed)))]
