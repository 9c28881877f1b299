"""Figure 12 of Hascoet et al. 2023: accuracy with reconstructed and with stored activations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from zoo.benchmark.plot_style import Line, Panel
from zoo.models.revnext import RevNeXtOptions
from zoo.reproduce.comparison import Comparison, ReportSection
from zoo.reproduce.error_rates import compare_runs
from zoo.reproduce.measurements import measures
from zoo.reproduce.published_numbers import published_number, published_numbers
from zoo.reproduce.training_runs import TrainingRun

FLAT, HYBRID = "revnext_flat_cifar10", "revnext_cifar10"
FLAT_EPOCHS = 40  # hybrids are trained without the epochs past 50, whose learning rate is 0
DEFAULT_SLOPE = "0.2"  # slope in the experiments
RECONSTRUCTED_CHANNELS = 48  # channels of the reconstructing flat networks of the depth study, instead of 32
# Prefix of the keys of a curve's points, in the figure or the authors' log -> title and x axis.
CURVES = {
    "figure12/flat": ("flat networks", "layers"),
    "figure12/flat_slope": ("flat networks 1-2-2", "slope of the leaky ReLU"),
    "figure12/hybrid_run": ("hybrid networks, the authors' log", "blocks after the first"),
    "figure12/hybrid_drawn_run": ("hybrid networks, the authors' plot", "blocks after the first"),
}
# Experiments with a short schedule. Their runs are drawn.
SHORT_EXPERIMENTS = (
    "revnext_flat3_cifar10_short", "revnext_flat9_cifar10_short", "revnext_flat12_cifar10_short",
    "revnext_cifar10_short",
)  # fmt: skip


def experiment_of(key: str) -> str:
    """Return the name of the experiment of a published number, see `load_changed`. Equal experiments share one."""
    _, network, kind = key.split("/")
    *_, depths_or_slope = network.split("_")
    if network.startswith("hybrid"):
        blocks = _numbers(depths_or_slope)
        is_default = blocks == RevNeXtOptions().blocks
        return HYBRID if is_default else f"{HYBRID} {json.dumps({'network.options': {'blocks': blocks}})}"
    changes: dict[str, Any] = {"optimizer.schedule.epochs": FLAT_EPOCHS}
    if "_slope_" in network:
        slope = {} if depths_or_slope == DEFAULT_SLOPE else {"network.activation_param": float(depths_or_slope)}
        changes |= {"network.options": {"layers": [1, 2, 2]}, **slope}
    else:
        wider = {"channels": RECONSTRUCTED_CHANNELS} if kind == "reconstructed" else {}
        changes |= {"network.options": {"layers": _numbers(depths_or_slope), **wider}}
    return f"{FLAT} {json.dumps(changes)}"


def _numbers(depths: str) -> list[int]:
    return [int(depth) for depth in depths.split("-")]


EXPERIMENTS = {key: experiment_of(key) for key in published_numbers("revnext") if key.startswith("figure12/")}


@measures("revnext", "Figure 12", given="runs")
def report_accuracies(runs: Sequence[TrainingRun]) -> ReportSection:
    """Return the accuracies of the figure."""
    section = ReportSection("figure12", "Figure 12: accuracy with and without reconstruction")
    found = {}
    for key, name in EXPERIMENTS.items():
        number = published_number("revnext", key)
        is_stored = key.endswith("/stored")
        found[key] = compare_runs(name, number, runs, is_stored=is_stored, what=number.quantity)
    section.comparisons += found.values()
    section.panels += [_beside_authors(prefix, *labels, found) for prefix, labels in CURVES.items()]
    return section


def _beside_authors(prefix: str, title: str, x_label: str, found: Mapping[str, Comparison]) -> Panel:
    """Return the panel of the curves with this prefix: the authors' accuracies and the measured accuracies."""
    lines = []
    for kind in ("stored", "reconstructed"):
        authors, here = {}, {}
        for key, comparison in found.items():
            stem, _, place = key.removesuffix(f"/{kind}").rpartition("_")
            if key.endswith(f"/{kind}") and stem.rstrip("12345678") == prefix:
                x = float(place) if prefix.endswith("slope") else float(sum(_numbers(place)))
                authors[x] = comparison.published.number
                if isinstance(comparison.measured, float):
                    here[x] = comparison.measured
        lines += [Line(f"{whose}, {kind}", sorted(points), [points[x] for x in sorted(points)])
                  for whose, points in (("authors", authors), ("here", here)) if points]  # fmt: skip
    values = [y for line in lines for y in line.y]
    y_label = f"top-1, % (a range of {max(values) - min(values):.1f})"  # the axes of the panels differ
    return Panel(title, x_label, y_label, lines, prefix.endswith("slope"))
