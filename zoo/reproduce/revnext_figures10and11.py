"""Figures 10 and 11 of Hascoet et al. 2023: how exactly untrained networks reconstruct their activations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zoo.layers.invertible import LayerwiseBlock
from zoo.reproduce.comparison import Line, Panel, PublishedValue, Section, compare_decades, unpublished
from zoo.reproduce.paper_networks import build_revnext
from zoo.reproduce.revnext_figures5and6 import signal_to_noise

BATCH, SIZE = 16, 32
FLAT, HYBRID = "revnext_flat", "revnext"
HYBRIDS: Mapping[str, dict[str, Any]] = {
    "hybrid": {},
    "hybrid, branch inputs found again": {"keep_branch_input": False},
}
SLOPE = 0.2  # of Figure 10
SLOPES = (0.4, 0.2, 0.1, 0.05)
ALL_SLOPES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.75)
# Notebook 1.b of the authors' public code adds a layer to each level in turn: flat networks from 2-1-1 to 5-4-4 (cell
# 5), hybrids with one unit per branch from 1-1 to 4-4 blocks (cell 9; with two pools there is no use for the third
# number there). Its plot draws both at 3 to 12.
FLAT_DEPTHS: Mapping[int, dict[str, Any]] = {
    4 + n: {"layers": [2 + n // 3, 1 + (n + 2) // 3, 1 + (n + 1) // 3]} for n in range(10)
}
HYBRID_DEPTHS: Mapping[int, dict[str, Any]] = {1 + 2 * n: {"blocks": [n, n]} for n in (1, 2, 3, 4)}

Ends = tuple[PublishedValue, PublishedValue]


def _ends(place: str, first: float, last: float) -> Ends:
    return PublishedValue(first, "read off a figure", place), PublishedValue(last, "read off a figure", place)


# Smallest ratios over the layers at the first and last point of a curve, batch 256.
DEPTH_PLOT, FLAT_PLOT, HYBRID_PLOT = (
    f"authors' notebook {cell}" for cell in ("1.b, cell 10", "1, cell 8", "1, cell 9")
)
FLAT_BY_DEPTH = {
    0.4: _ends(DEPTH_PLOT, 7e8, 1e2), 0.2: _ends(DEPTH_PLOT, 2e7, 6e-2),
    0.1: _ends(DEPTH_PLOT, 2e5, 1.5e-2), 0.05: _ends(DEPTH_PLOT, 4e3, 3e-3),
}  # fmt: skip
HYBRID_BY_DEPTH = {
    0.4: _ends(DEPTH_PLOT, 1.3e9, 1.3e9), 0.2: _ends(DEPTH_PLOT, 1.3e9, 1.3e9),
    0.1: _ends(DEPTH_PLOT, 1.3e9, 1.3e9), 0.05: _ends(DEPTH_PLOT, 1.3e9, 3e8),
}  # fmt: skip
FLAT_BY_SLOPE, HYBRID_BY_SLOPE = _ends(FLAT_PLOT, 0.3, 1e9), _ends(HYBRID_PLOT, 1.2e4, 1e9)
FLAT_FIRST = PublishedValue(1.3e2, "read off a figure", "authors' notebook 2, cell 6")
FLAT_LAST = PublishedValue(3.5e15, "read off a figure", "authors' notebook 2, cell 6")
HYBRID_SMALLEST = PublishedValue(346250528, "authors' log", "notebook 2, cell 7")  # of the ten layers that it prints
NOTES = [
    "the authors' inverse of a batch norm divides by the unbiased deviation where the forward divided by the biased "
    "one, which alone caps their ratios at values from 1e9 to 3e11; here both use the same statistics, so that higher "
    "ratios are expected",
    "their inverse also computes new statistics of the feature map that it inverts, which keeps the ratio from falling "
    "much below 1e-2; here nothing keeps it from falling",
    "hybrid: the exact input of a branch is kept, as in the paper's section 4.4 and the authors' code. Branch inputs "
    "found again: they are reconstructed (network.options keep_branch_input false), for 64 bytes per pixel less",
]

Ratios = list[float]  # infinite where nothing is lost


class LayerRatios(NamedTuple):
    """The signal-to-noise ratios of the inputs of all layers but the stem's convolution.

    Args:
    - `layers`: ratios of the network's own layers and blocks, beginning with the stem's norm.
    - `inside`: for each of ``layers``, the ratios inside it; empty for all but reversible blocks.
    """

    layers: Ratios
    inside: list[Ratios]

    def in_order(self) -> Ratios:
        """Return all ratios, a block's own input before those of the layers in its branches."""
        return [ratio for of_layer, inner in zip(self.layers, self.inside, strict=True) for ratio in (of_layer, *inner)]

    def smallest_of_blocks(self) -> float:
        """Return the smallest at the inputs of blocks and pools: without the stem's norm and activation."""
        return min(self.layers[2:])


def measure_ratios(name: str, slope: float, batch: int = BATCH, **options: Any) -> LayerRatios:
    """Return the ratios of an untrained network: sum of squares of a layer's input over that of its error."""
    torch.manual_seed(0)
    model: Any = build_revnext(name, slope, eps_i=0.0, **options)
    errors: dict[int, float] = {}
    model.meter = errors.__setitem__
    inside = [_watch(layer) for layer in model.layers()]
    model(torch.randn(batch, 3, SIZE, SIZE)).sum().backward()  # the loss of the authors' study
    reconstructed = range(1, len(inside))  # the images and the last map are kept
    return LayerRatios([errors[i] ** -2 if errors[i] else math.inf for i in reconstructed], inside[1:])


def _watch(layer: nn.Module) -> Ratios:
    """Return a list that the next forward and backward pass fill with the ratios inside a block, f's before g's."""
    layers: list[Any] = [*layer.f, *layer.g] if isinstance(layer, LayerwiseBlock) else []
    ratios = [math.nan] * len(layers)
    for index, inner in enumerate(layers):
        _watch_layer(inner, index, ratios)
    return ratios


def _watch_layer(layer: Any, index: int, ratios: Ratios) -> None:
    inputs: list[Tensor] = []  # that of the forward pass, and after it that of the recomputation
    record, undo = layer.record_, layer.undo_

    def record_(x: Tensor) -> Any:
        inputs.append(x.clone())
        return record(x)

    def undo_(y: Tensor, dy: Tensor, saved: Any) -> Any:
        x, dx, gradients = undo(y, dy, saved)
        ratios[index] = signal_to_noise(inputs[0].double(), x.double())
        return x, dx, gradients

    layer.record_, layer.undo_ = record_, undo_


def measure_layers(batch: int = BATCH) -> Section:
    """Return Figure 10: the ratios over the layers of one flat and one hybrid network."""
    section = Section(
        "figure10", "Figure 10: signal-to-noise ratio over the layers",
        f"Untrained networks, slope {SLOPE}, random images, batch {batch} in place of 256; the loss is the sum of the "
        "logits. Shown is the ratio of each layer's reconstructed input, also inside the branches of reversible "
        "blocks.", notes=list(NOTES),
    )  # fmt: skip
    flat = measure_ratios(FLAT, SLOPE, batch, layers=(2, 3, 3)).in_order()
    hybrids = {label: measure_ratios(HYBRID, SLOPE, batch, blocks=(2, 3), **options).in_order()
               for label, options in HYBRIDS.items()}  # fmt: skip
    with_loss = [ratio for ratio in flat if math.isfinite(ratio)]
    section.comparisons += [
        compare_decades("flat 2-3-3: first layer", [FLAT_FIRST], flat[:1]),
        compare_decades("flat 2-3-3: last layer with a loss", [FLAT_LAST], with_loss[-1:]),
        *(compare_decades(f"{label}, 2-3: smallest", [HYBRID_SMALLEST], [min(ratios)])
          for label, ratios in hybrids.items()),
    ]  # fmt: skip
    lines = [finite_line(label, ratios) for label, ratios in {"flat 2-3-3": flat, **hybrids}.items()]
    section.panels.append(Panel(f"slope {SLOPE}", "layer, input to output", "signal / noise", lines, y_log=True))
    return section


def finite_line(label: str, ratios: Ratios) -> Line:
    """Return the finite ratios over the layers, counted from 1; a logarithmic axis and JSON have no infinite ones."""
    points = {layer: ratio for layer, ratio in enumerate(ratios, start=1) if math.isfinite(ratio)}
    return Line(label, list(points), list(points.values()))


def measure_depths(
    flat: Mapping[int, dict[str, Any]] = FLAT_DEPTHS,
    hybrid: Mapping[int, dict[str, Any]] = HYBRID_DEPTHS,
    slopes: Sequence[float] = SLOPES,
    all_slopes: Sequence[float] = ALL_SLOPES,
    batch: int = BATCH,
) -> Section:
    """Return Figure 11: the smallest ratio over depth and over slope.

    ``flat`` and ``hybrid`` are the options of networks by their depth, built with each of ``slopes``; networks of one
    depth are built with ``all_slopes``.
    """
    section = Section(
        "figure11", "Figure 11: smallest signal-to-noise ratio over depth and slope",
        f"As Figure 10, batch {batch}: the smallest ratio over all layers. By depth, there are flat networks of "
        f"{min(flat)} to {max(flat)} layers and hybrids of {min(hybrid)} to {max(hybrid)} blocks with one unit per "
        "branch: those of the authors, who draw both at 3 to 12. Over slopes, the networks are flat 1-1-1 and hybrid "
        "1-1 with two units per branch.", notes=list(NOTES),
    )  # fmt: skip
    section.notes.append("their hybrid of slope 0.05 is lowest before its last point: about 2e8, drawn at 10")
    by_depth = {
        "flat": (FLAT, "layers", {}, flat, FLAT_BY_DEPTH),
        **{label: (HYBRID, "blocks", {**options, "units": 1}, hybrid, HYBRID_BY_DEPTH)
           for label, options in HYBRIDS.items()},
    }  # fmt: skip
    deepest: dict[str, list[LayerRatios]] = {}
    for label, (name, unit, options, depths, published) in by_depth.items():
        lines = []
        for slope in slopes:
            ratios = [measure_ratios(name, slope, batch, **depth, **options) for depth in depths.values()]
            smallest = [min(of_depth.in_order()) for of_depth in ratios]
            what = f"{label}, slope {slope}, from {min(depths)} to {max(depths)} {unit}"
            section.comparisons.append(compare_decades(what, published[slope], (smallest[0], smallest[-1])))
            lines.append(Line(f"slope {slope}", list(depths), smallest))
            deepest.setdefault(label, []).append(ratios[-1])
        section.panels.append(Panel(label, unit, "smallest signal / noise", lines, y_log=True))
    for label in HYBRIDS:
        text = " / ".join(f"{ratios.smallest_of_blocks():.2g}" for ratios in deepest[label])
        what = f"{label}, {max(hybrid)} blocks, slopes {' / '.join(map(str, slopes))}: inputs of blocks and pools"
        section.comparisons.append(unpublished(what, text))
    section.panels.append(_over_slopes(section, all_slopes, batch))
    return section


def _over_slopes(section: Section, slopes: Sequence[float], batch: int) -> Panel:
    """Return the panel of the smallest ratios over the slopes, and add its comparisons to the section.

    Both networks have the levels 1-1-1, and the hybrid has two units per branch (notebook 1, cells 8 and 9).
    """
    lines = []
    for label, name, options, published in (
        ("flat 1-1-1", FLAT, {"layers": [1, 1, 1]}, FLAT_BY_SLOPE),
        *((label.replace("hybrid", "hybrid 1-1"), HYBRID, {"blocks": [1, 1], "units": 2, **added}, HYBRID_BY_SLOPE)
          for label, added in HYBRIDS.items()),
    ):  # fmt: skip
        smallest = [min(measure_ratios(name, slope, batch, **options).in_order()) for slope in slopes]
        what = f"{label}, from slope {slopes[0]} to {slopes[-1]}"
        section.comparisons.append(compare_decades(what, published, (smallest[0], smallest[-1])))
        lines.append(Line(label, slopes, smallest))
    return Panel("over slopes", "slope", "smallest signal / noise", lines, True, True)
