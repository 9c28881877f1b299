"""Figures 10 and 11 of Hascoet et al. 2023: how exactly untrained networks find their activations again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zoo.report.reversible.networks import build
from zoo.report.reversible.schema import Figure, Line, Panel, Section, finite_line

BATCH, SIZE = 16, 32
FLAT, HYBRID = "revnext_flat", "revnext"
SLOPE = 0.2  # of Figure 10
SLOPES = (0.4, 0.2, 0.1, 0.05)
FLAT_DEPTHS: Mapping[int, dict[str, Any]] = {3 * n: {"layers": (n, n, n)} for n in (1, 2, 3, 4)}
HYBRID_DEPTHS: Mapping[int, dict[str, Any]] = {1 + 2 * n: {"blocks": (n, n)} for n in (1, 2, 4)}
ALL_SLOPES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.75)
# Smallest ratios, first and last of the axis, read off the authors' archived pictures; batch 256.
FLAT_BY_DEPTH = {0.4: (7e8, 1e2), 0.2: (2e7, 6e-2), 0.1: (2e5, 1.5e-2), 0.05: (4e3, 3e-3)}
HYBRID_BY_DEPTH = {0.4: (1.3e9, 1.3e9), 0.2: (1.3e9, 1.3e9), 0.1: (1.3e9, 1.3e9), 0.05: (1.3e9, 2e8)}
FLAT_BY_SLOPE, HYBRID_BY_SLOPE = (0.3, 1e9), (1.2e4, 1e9)
NOTES = [
    "the authors' inverse of a batch norm divides by the unbiased deviation where the forward divided by the biased "
    "one, which alone caps their ratios at 1e9 to 3e11; here both use the same statistics, so that higher is expected",
    "their inverse also takes new statistics of the map that it inverts, which keeps the ratio from falling much "
    "below 1e-2; here nothing does",
    "the input of a hybrid's branch is found again from the branch's output, layer by layer, as the paper's 352 bytes "
    "per pixel ask for, so that the slope matters to hybrids too",
]

Ratios = list[float]  # of the input of each layer, from the stem's norm on; infinite where nothing is lost


def signal_to_noise(name: str, slope: float, batch: int = BATCH, **options: Any) -> Ratios:
    """Return the ratio of each layer's input in an untrained network: sum of squares over that of the error.

    A reversible block counts as one layer.
    """
    torch.manual_seed(0)
    model: Any = build(name, activation="leaky_relu", slope=slope, weight_init="torch", eps_i=0.0, **options)
    errors: dict[int, float] = {}
    model.meter = errors.__setitem__
    model(torch.randn(batch, 3, SIZE, SIZE)).sum().backward()  # the loss of the authors' study
    kept = [errors[index] for index in sorted(errors)][1:-1]  # the pictures and the last map are kept
    return [error**-2 if error else float("inf") for error in kept]


def measure_layers(batch: int = BATCH) -> Section:
    """Return Figure 10: the ratios over the layers of one flat and one hybrid network."""
    section = Section(
        "figure10", "Figure 10: signal-to-noise ratio over the layers",
        f"Untrained, slope {SLOPE}, random pictures, batch {batch} in place of 256, loss the sum of the logits. Ratio "
        "of the input of each layer found again; a reversible block is one layer here, while the authors show the "
        "layers inside too.", notes=NOTES,
    )  # fmt: skip
    flat = signal_to_noise(FLAT, SLOPE, batch, layers=(2, 3, 3))
    hybrid = signal_to_noise(HYBRID, SLOPE, batch, blocks=(2, 3))
    section.figures += [
        _higher("flat 2-3-3: first layer", 1e2, flat[0]),
        _higher("flat 2-3-3: last layer with a loss", 1e9, [ratio for ratio in flat if ratio < float("inf")][-1]),
        _higher("hybrid 2-3: smallest", 1e9, min(hybrid)),
    ]
    lines = [finite_line(label, list(range(1, len(found) + 1)), found)
             for label, found in (("flat 2-3-3", flat), ("hybrid 2-3", hybrid))]  # fmt: skip
    section.panels.append(Panel(f"slope {SLOPE}", "layer, input to output", "signal / noise", lines, y_log=True))
    return section


def measure_depths(
    flat: Mapping[int, dict[str, Any]] = FLAT_DEPTHS,
    hybrid: Mapping[int, dict[str, Any]] = HYBRID_DEPTHS,
    slopes: Sequence[float] = SLOPES,
    all_slopes: Sequence[float] = ALL_SLOPES,
    batch: int = BATCH,
) -> Section:
    """Return Figure 11: the smallest ratio over depth and over slope."""
    section = Section(
        "figure11", "Figure 11: smallest signal-to-noise ratio over depth and slope",
        f"As Figure 10, batch {batch}. Flat networks of {min(flat)} to {max(flat)} layers (the authors' axis goes from "
        f"3 to 12), hybrid ones of {min(hybrid)} to {max(hybrid)} blocks; over slopes, flat 1-1-1 and hybrid 1-1. Of "
        "hybrids the smallest over the inputs of blocks and pools: the stem's norm is undone like a flat layer.",
        notes=NOTES,
    )  # fmt: skip
    by_depth = {
        FLAT: ("flat", "layers", flat, FLAT_BY_DEPTH),
        HYBRID: ("hybrid", "blocks", hybrid, HYBRID_BY_DEPTH),
    }
    for name, (label, unit, depths, published) in by_depth.items():
        lines = []
        for slope in slopes:
            found = [_smallest(name, slope, batch, options) for options in depths.values()]
            section.figures.append(_range(f"{label}, slope {slope}, by {unit}", published[slope], found))
            lines.append(Line(f"slope {slope}", list(depths), found))
        section.panels.append(Panel(label, unit, "smallest signal / noise", lines, y_log=True))
    lines = []
    for name, label, published_ends in ((FLAT, "flat", FLAT_BY_SLOPE), (HYBRID, "hybrid", HYBRID_BY_SLOPE)):
        shallow = next(iter(by_depth[name][2].values()))
        found = [_smallest(name, slope, batch, shallow) for slope in all_slopes]
        what = f"{label}, shallowest, by slope from {all_slopes[0]} to {all_slopes[-1]}"
        section.figures.append(_range(what, published_ends, found))
        lines.append(Line(label, all_slopes, found))
    section.panels.append(Panel("over slopes", "slope", "smallest signal / noise", lines, True, True))
    return section


def _smallest(name: str, slope: float, batch: int, options: dict[str, Any]) -> float:
    ratios = signal_to_noise(name, slope, batch, **options)
    return min(ratios[2:] if name == HYBRID else ratios)  # without the stem's norm and activation


def _higher(what: str, published: float, measured: float) -> Figure:
    return Figure(what, f"{published:.2g}", f"{measured:.2g}", "", "not lower" if measured >= published else "lower")


def _range(what: str, published: tuple[float, float], measured: Sequence[float]) -> Figure:
    """Return the ratios at both ends of an axis; the verdict is on both."""
    ends = {"first": (published[0], measured[0]), "last": (published[1], measured[-1])}
    lower = [end for end, (theirs, ours) in ends.items() if ours < theirs]
    verdict = f"lower at the {' and '.join(lower)}" if lower else "not lower"
    theirs, ours = (" to ".join(f"{value:.2g}" for value in values) for values in zip(*ends.values(), strict=True))
    return Figure(what, theirs, ours, "", verdict)
