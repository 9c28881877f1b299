"""Figures 10 and 11 of Hascoet et al. 2023: accuracy of reconstructed activations in untrained networks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zoo.layers.invertible import InvertibleNorm, LayerwiseBlock
from zoo.reproduce.comparison import Basis, Comparison, Section, unpublished
from zoo.reproduce.paper_networks import build_revnext
from zoo.reproduce.published_numbers import published
from zoo.reproduce.revnext_figures5and6 import signal_to_noise
from zoo.run.plot_style import Line, Panel

BATCH, SIZE = 8, 32
AUTHORS_BATCH = 256
FLAT, HYBRID = "revnext_flat", "revnext"
AUTHORS_INVERSE = "norms inverted as in the authors' code"
HYBRIDS: Mapping[str, dict[str, Any]] = {
    "hybrid": {},
    "hybrid, branch inputs reconstructed": {"keep_branch_input": False},
}
SLOPE = 0.2  # of Figure 10
GAINS = (0.05, 1.5)  # range of the gains of norms, to test their law; those of an untrained norm are all 1
SLOPES = (0.4, 0.2, 0.1, 0.05)
ALL_SLOPES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.75)
# Notebook 1.b of the authors' public code adds a layer to each level in turn: flat networks from 2-1-1 to 5-4-4 (cell
# 5), hybrids with one unit per branch from 1-1 to 4-4 blocks (cell 9; hybrids have two pools and ignore the third
# number, so three of the ten networks are built twice). Its plot draws both at 3 to 12.
FLAT_DEPTHS: Mapping[int, dict[str, Any]] = {
    4 + n: {"layers": [2 + n // 3, 1 + (n + 2) // 3, 1 + (n + 1) // 3]} for n in range(10)
}
HYBRID_DEPTHS: Mapping[int, dict[str, Any]] = {
    1 + first + second: {"blocks": [first, second]}
    for first, second in ((1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (3, 4), (4, 4))
}
LOWEST_SLOPE, LOWEST_DEPTH = 0.05, 8  # minimum of the only published curve whose minimum is not its last point
NOTES = [
    f"{AUTHORS_INVERSE}: their inverse of a batch norm normalizes the output by its own statistics, and then "
    "multiplies by the unbiased deviation, although forward divided by the biased one. The second limits the ratios to "
    "(2 n)^2 for n values per channel, from 1e9 to 3e11 in these networks; the first keeps them from falling much "
    f"below 1e-2. These numbers are measured with batches of {AUTHORS_BATCH}, on which the limit depends",
    "all other numbers are those of this package, which inverts with the statistics of the forward pass: the ratios "
    "have neither an upper nor a lower limit",
    "hybrid: the exact input of a branch is saved, as in section 4.4 of the paper and the authors' code. Branch inputs "
    "reconstructed: network.options keep_branch_input false, which takes 64 bytes per pixel less",
]

Ratios = list[float]  # infinite if nothing is lost


class LayerRatios(NamedTuple):
    """The signal-to-noise ratios of the inputs of all layers except the stem's convolution.

    Args:
    - `layers`: ratios of the network's own layers and blocks, beginning with the stem's norm.
    - `inside`: for each of ``layers``, the ratios inside it; empty for all but reversible blocks.
    - `kinds`: for each of ``layers``, the name of its class.
    """

    layers: Ratios
    inside: list[Ratios]
    kinds: list[str]

    def in_order(self) -> Ratios:
        """Return all ratios; the input of a block precedes those of the layers in its branches."""
        return [ratio for of_layer, inner in zip(self.layers, self.inside, strict=True) for ratio in (of_layer, *inner)]

    def smallest_of_blocks(self) -> float:
        """Return the smallest ratio at the inputs of blocks and pools, without the norm and activation of the stem."""
        return min(self.layers[2:])


def measure_ratios(
    name: str,
    slope: float,
    batch: int = BATCH,
    as_authors: bool = False,
    gains: tuple[float, float] = (1.0, 1.0),
    **options: Any,
) -> LayerRatios:
    """Return the ratios of an untrained network: sum of squares of a layer's input over that of its error.

    With ``as_authors``, norms are inverted as in the authors' code. The ``gains`` of norms are uniform within a range.
    """
    torch.manual_seed(0)
    model: Any = build_revnext(name, slope, eps_i=0.0, **options)
    for layer in model.modules():
        if isinstance(layer, InvertibleNorm):
            if gains != (1.0, 1.0):
                nn.init.uniform_(layer.norm.weight, *gains)
            if as_authors:
                _invert_as_authors(layer)
    errors: dict[int, float] = {}
    model.meter = errors.__setitem__
    inside = [_watch(layer) for layer in model.layers()]
    model(torch.randn(batch, 3, SIZE, SIZE)).sum().backward()  # the loss of the authors' study
    reconstructed = range(1, len(inside))  # the images and the last map are saved
    kinds = [type(layer).__name__ for layer in model.layers()]
    return LayerRatios([errors[i] ** -2 if errors[i] else math.inf for i in reconstructed], inside[1:], kinds[1:])


def _invert_as_authors(layer: Any) -> None:
    """Make a norm reconstruct its input like ``IBatchNorm3d`` in layers.py of the authors' code."""
    record, undo = layer.record_, layer.undo_

    def record_(x: Tensor) -> Any:
        var, mean = torch.var_mean(x, (0, 2, 3), correction=1, keepdim=True)
        y, saved = record(x)
        return y, (saved, mean, var.sqrt())

    def undo_(y: Tensor, dy: Tensor, saved: Any) -> Any:
        saved, mean, deviation = saved
        own_var, own_mean = torch.var_mean(y, (0, 2, 3), correction=0, keepdim=True)
        reconstructed = (y - own_mean) * (deviation / own_var.sqrt()) + mean
        x, dx, gradients = undo(y, dy, saved)
        return x.copy_(reconstructed), dx, gradients

    layer.record_, layer.undo_ = record_, undo_


def _watch(layer: nn.Module) -> Ratios:
    """Return a list that the next forward and backward fill with the ratios inside a block, those of f before g."""
    layers: list[Any] = [*layer.f, *layer.g] if isinstance(layer, LayerwiseBlock) else []
    ratios = [math.nan] * len(layers)
    for index, inner in enumerate(layers):
        _watch_layer(inner, index, ratios)
    return ratios


def _watch_layer(layer: Any, index: int, ratios: Ratios) -> None:
    inputs: list[Tensor] = []  # the input of the forward pass
    record, undo = layer.record_, layer.undo_

    def record_(x: Tensor) -> Any:
        if not inputs:  # otherwise a recomputation
            inputs.append(x.clone())
        return record(x)

    def undo_(y: Tensor, dy: Tensor, saved: Any) -> Any:
        x, dx, gradients = undo(y, dy, saved)
        ratios[index] = signal_to_noise(inputs.pop().double(), x.double())
        return x, dx, gradients

    layer.record_, layer.undo_ = record_, undo_


def measure_layers(batch: int = BATCH, authors_batch: int = AUTHORS_BATCH) -> Section:
    """Return Figure 10: the ratios over the layers of one flat and one hybrid network, and the loss in each layer.

    ``authors_batch`` is the batch of networks whose norms are inverted as in the authors' code.
    """
    section = Section(
        "figure10", "Figure 10: signal-to-noise ratio over the layers",
        f"Untrained networks, slope {SLOPE}, random images, batch {batch}; the loss is the sum of the logits. The plot "
        "shows the ratio of each layer's reconstructed input, also inside the branches of reversible blocks. alpha: "
        "the ratio of a layer's input over that of its output, here the median over the layers of a kind in the flat "
        "network.", notes=list(NOTES),
    )  # fmt: skip
    theirs: dict[str, Any] = {"batch": authors_batch, "as_authors": True}
    flats = {
        f"flat 2-3-3, {AUTHORS_INVERSE}": measure_ratios(FLAT, SLOPE, layers=(2, 3, 3), **theirs),
        "flat 2-3-3": measure_ratios(FLAT, SLOPE, batch, layers=(2, 3, 3)),
    }
    hybrids = {
        f"hybrid 2-3, {AUTHORS_INVERSE}": measure_ratios(HYBRID, SLOPE, blocks=(2, 3), **theirs),
        **{label.replace("hybrid", "hybrid 2-3"): measure_ratios(HYBRID, SLOPE, batch, blocks=(2, 3), **options)
           for label, options in HYBRIDS.items()},
    }  # fmt: skip
    for family, networks in (("flat", flats), ("hybrid", hybrids)):
        for label, ratios in networks.items():
            in_order = _finite(ratios.in_order())
            values = {"first": in_order[0], "smallest": min(in_order), "last": in_order[-1]}
            section.comparisons += [
                _compare(f"{label}: {end}", f"figure10/{family}_{end}", values[end])
                for end in ("first", "last", *["smallest"] * (family == "hybrid"))
            ]
    section.comparisons += [_compare_accumulation(label, ratios) for label, ratios in flats.items()]
    section.comparisons += [_compare_stability(label, ratios) for label, ratios in hybrids.items()]
    with_gains = measure_ratios(FLAT, SLOPE, batch, layers=(1, 1, 1), gains=GAINS)
    section.comparisons += _compare_alphas(flats["flat 2-3-3"], with_gains)
    lines = [finite_line(label, ratios.in_order()) for label, ratios in {**flats, **hybrids}.items()]
    section.panels.append(Panel(f"slope {SLOPE}", "layer, input to output", "signal / noise", lines, y_log=True))
    return section


def _basis(label: str) -> Basis:
    """Return the basis of a network: inverted as in the authors' code, our default, or with another option of ours."""
    if AUTHORS_INVERSE in label:
        return "paper"
    return "variant" if "branch inputs reconstructed" in label else "shipped"


def _compare(what: str, key: str, measured: float) -> Comparison:
    return Comparison(what=what, published=published("revnext", key), measured=measured, basis=_basis(what))


def _finite(ratios: Ratios) -> Ratios:
    return [ratio for ratio in ratios if math.isfinite(ratio)]


def _compare_accumulation(label: str, ratios: LayerRatios) -> Comparison:
    """Return the ratios of the last and of the first layer with a loss."""
    finite = _finite(ratios.layers)
    first, last = finite[0], finite[-1]
    per_layer = (last / first) ** (1 / (len(finite) - 1))
    return Comparison(
        what=f"{label}: factor of the ratio per layer, from the first to the last",
        published=published("revnext", "section5.1/flat_trend"), measured=per_layer, basis=_basis(label),
        note=f"{last:.2g} at the last layer, {first:.2g} at the first",
    )  # fmt: skip


def _compare_stability(label: str, ratios: LayerRatios) -> Comparison:
    """Return the smallest ratio inside the last block over that inside the first."""
    smallest = [min(inner) for inner in ratios.inside if inner]
    first, last = smallest[0], smallest[-1]
    return Comparison(
        what=f"{label}: smallest ratio inside the last block over that inside the first",
        published=published("revnext", "section5.1/hybrid_trend"), measured=last / first, basis=_basis(label),
        note=f"{last:.2g} in the last block, {first:.2g} in the first",
    )  # fmt: skip


def _compare_alphas(flat: LayerRatios, with_gains: LayerRatios) -> list[Comparison]:
    """Return the loss in convolutions over that in norms and in leaky ReLUs, and alpha of pools.

    The norms are those of the network ``with_gains``, because a norm whose gains are equal loses nothing.
    """
    comparisons = []
    for ratios, kind, key, words in (
        (with_gains, "InvertibleNorm", "norm", f"batch norm with gains from {GAINS[0]} to {GAINS[1]}"),
        (flat, "InvertibleLeakyReLU", "leaky_relu", "leaky ReLU"),
    ):
        alphas = _alphas(ratios)
        conv, other = (1 / alphas[each] - 1 for each in ("InvertibleConv", kind))
        comparisons.append(
            Comparison(
                what=f"loss of the ratio in the inverse of a convolution, over that of a {words}",
                published=published("revnext", f"section4.2.3/{key}"), measured=conv / other,
                note=f"{conv + 1:.2g} times less, {other + 1:.2g} times less",
            )
        )  # fmt: skip
    number, alpha = published("revnext", "section4.2.4/alpha"), _alphas(flat)["ChannelPool"]
    return [*comparisons, Comparison(what="channel pools: alpha", published=number, measured=alpha)]


def _alphas(ratios: LayerRatios) -> dict[str, float]:
    """Return the median of alpha by the kind of layer."""
    by_kind: dict[str, list[float]] = {}
    for kind, own, behind in zip(ratios.kinds, ratios.layers, ratios.layers[1:], strict=False):
        if math.isfinite(behind):
            by_kind.setdefault(kind, []).append(own / behind)
    return {kind: median(values) for kind, values in by_kind.items()}


def finite_line(label: str, ratios: Ratios) -> Line:
    """Return the finite ratios over the layers, counted from 1; JSON and logarithmic axes have no infinity."""
    points = {layer: ratio for layer, ratio in enumerate(ratios, start=1) if math.isfinite(ratio)}
    return Line(label, list(points), list(points.values()))


def measure_depths(
    flat: Mapping[int, dict[str, Any]] = FLAT_DEPTHS,
    hybrid: Mapping[int, dict[str, Any]] = HYBRID_DEPTHS,
    slopes: Sequence[float] = SLOPES,
    all_slopes: Sequence[float] = ALL_SLOPES,
    batch: int = BATCH,
    authors_batch: int = AUTHORS_BATCH,
) -> Section:
    """Return Figure 11: the smallest ratio over depth and over slope.

    ``flat`` and ``hybrid`` are the options of networks by depth, which are built with each of ``slopes``; networks of
    one depth are built with ``all_slopes``. ``authors_batch`` is the batch of networks whose norms are inverted as in
    the authors' code; they are built if there is a published number.
    """
    section = Section(
        "figure11", "Figure 11: smallest signal-to-noise ratio over depth and slope",
        f"As in Figure 10, batch {batch}: the smallest ratio over all layers. Over depth: the authors' flat networks "
        f"of {min(flat)} to {max(flat)} layers and hybrids of {min(hybrid)} to {max(hybrid)} blocks with one unit per "
        "branch, which they draw at depths 3 to 12. Over slopes: flat 1-1-1, and hybrid 1-1 with two units per branch.",
        notes=list(NOTES),
    )  # fmt: skip
    theirs: dict[str, Any] = {"batch": authors_batch, "as_authors": True}
    curves: dict[str, tuple[str, str, dict[str, Any], Mapping[int, dict[str, Any]]]] = {
        f"flat, {AUTHORS_INVERSE}": (FLAT, "layers", theirs, flat),
        "flat": (FLAT, "layers", {"batch": batch}, flat),
        f"hybrid, {AUTHORS_INVERSE}": (HYBRID, "blocks", {**theirs, "units": 1}, hybrid),
        **{label: (HYBRID, "blocks", {"batch": batch, **options, "units": 1}, hybrid)
           for label, options in HYBRIDS.items()},
    }  # fmt: skip
    deepest: dict[str, list[LayerRatios]] = {}
    for label, (name, unit, options, depths) in curves.items():
        lines = []
        for slope in slopes:
            ends = _published_ends(label.partition(",")[0], slope, depths)
            measured = {
                depth: measure_ratios(name, slope, **options, **depth_options)
                for depth, depth_options in depths.items()
                if not options.get("as_authors") or depth in ends.values()
            }
            smallest = {depth: min(ratios.in_order()) for depth, ratios in measured.items()}
            section.comparisons += [
                _compare(f"{label}, slope {slope}, {depth} {unit}", key, smallest[depth]) for key, depth in ends.items()
            ]
            lines.append(Line(f"slope {slope}", list(smallest), list(smallest.values())))
            deepest.setdefault(label, []).append(measured[max(measured)])
        if not options.get("as_authors"):
            section.panels.append(Panel(label, unit, "smallest signal / noise", lines, y_log=True))
    for label in HYBRIDS:
        text = " / ".join(f"{ratios.smallest_of_blocks():.2g}" for ratios in deepest[label])
        what = f"{label}, {max(hybrid)} blocks, slopes {' / '.join(map(str, slopes))}: inputs of blocks and pools"
        section.comparisons.append(unpublished(what, text))
    kept, again = (min(ratios.smallest_of_blocks() for ratios in deepest[label]) for label in HYBRIDS)
    what = "branch inputs saved, not reconstructed: factor by which the smallest ratio at a block or pool is larger"
    section.comparisons.append(unpublished(what, kept / again))
    section.panels.append(_over_slopes(section, all_slopes, batch, authors_batch))
    return section


def _published_ends(family: str, slope: float, depths: Mapping[int, Any]) -> dict[str, int]:
    """Return the depths of the first and last point of a curve, and for one curve of its minimum, by their keys."""
    ends = {"first": min(depths), "last": max(depths)}
    if (family, slope) == ("hybrid", LOWEST_SLOPE) and LOWEST_DEPTH in depths:
        ends["lowest"] = LOWEST_DEPTH
    return {f"figure11/{family}_slope_{slope}/{end}": depth for end, depth in ends.items()}


def _over_slopes(section: Section, slopes: Sequence[float], batch: int, authors_batch: int) -> Panel:
    """Return the panel of the smallest ratios over the slopes, and add its comparisons to the section.

    Both networks have the levels 1-1-1, and the hybrid has two units per branch (notebook 1, cells 8 and 9).
    """
    ends = [slope for slope in slopes if slope in (ALL_SLOPES[0], ALL_SLOPES[-1])]
    theirs: dict[str, Any] = {"batch": authors_batch, "as_authors": True}
    of_hybrid = {"blocks": [1, 1], "units": 2}
    curves: dict[str, tuple[str, Sequence[float], dict[str, Any]]] = {
        f"flat 1-1-1, {AUTHORS_INVERSE}": (FLAT, ends, {"layers": [1, 1, 1], **theirs}),
        "flat 1-1-1": (FLAT, slopes, {"layers": [1, 1, 1], "batch": batch}),
        f"hybrid 1-1, {AUTHORS_INVERSE}": (HYBRID, ends, {**of_hybrid, **theirs}),
        **{label.replace("hybrid", "hybrid 1-1"): (HYBRID, slopes, {**of_hybrid, **added, "batch": batch})
           for label, added in HYBRIDS.items()},
    }  # fmt: skip
    lines = []
    for label, (name, points, options) in curves.items():
        smallest = {slope: min(measure_ratios(name, slope, **options).in_order()) for slope in points}
        family = label.partition(" ")[0]
        section.comparisons += [
            _compare(f"{label}, slope {slope}", f"figure11/{family}_over_slopes/{slope}", smallest[slope])
            for slope in ends
        ]
        if points is slopes:
            lines.append(Line(label, list(smallest), list(smallest.values())))
    return Panel("over slopes", "slope", "smallest signal / noise", lines, True, True)
