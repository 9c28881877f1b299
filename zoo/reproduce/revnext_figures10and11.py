"""Figures 10 and 11 of Hascoet et al. 2023: accuracy of reconstructed activations in untrained networks."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from zoo.benchmark.plot_style import Line, Panel
from zoo.layers.invertible import Invertible, InvertibleNorm, LayerwiseBlock
from zoo.reproduce.comparison import ReportSection
from zoo.reproduce.measurements import measures
from zoo.reproduce.paper_networks import build_revnext
from zoo.reproduce.published_numbers import published_number
from zoo.reproduce.revnext_figures5and6 import signal_to_noise

logger = logging.getLogger(__name__)

SIZE = 32
SEEDS = range(10)  # seeds of the random networks and images
FLAT, HYBRID = "revnext_flat", "revnext"
ARCH_OF_FAMILY = {"flat": FLAT, "hybrid": HYBRID}
# Norms are inverted as in the authors' code, with the authors' batch (it limits the ratios), or as in this package.
BATCHES = {True: 256, False: 8}
AUTHORS_INVERSE = "norms inverted as in the authors' code"
SLOPE = 0.2  # slope in Figure 10
SLOPES = (0.4, 0.2, 0.1, 0.05)
ALL_SLOPES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.75)
# Notebook 1.b of the authors' public code adds a layer to each level in turn: flat networks from 2-1-1 to 5-4-4 (cell
# 5), hybrids with one unit per branch from 1-1 to 4-4 blocks (cell 9; hybrids have two pools and ignore the third
# number, so three of the ten networks are built twice). Its plot draws both at 3 to 12.
LEVELS_OVER_DEPTHS: Mapping[str, Mapping[int, dict[str, Any]]] = {
    "flat": {4 + n: {"layers": [2 + n // 3, 1 + (n + 2) // 3, 1 + (n + 1) // 3]} for n in range(10)},
    "hybrid": {
        1 + first + second: {"blocks": [first, second], "units": 1}
        for first, second in ((1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (3, 4), (4, 4))
    },
}
DEPTH_UNITS = {"flat": "layers", "hybrid": "blocks"}
# The networks over the slopes have the levels 1-1-1, the hybrid with two units per branch (notebook 1, cells 8 and 9).
LEVELS_OVER_SLOPES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "flat": ("flat 1-1-1", {"layers": [1, 1, 1]}),
    "hybrid": ("hybrid 1-1", {"blocks": [1, 1], "units": 2}),
}
LOWEST_SLOPE, LOWEST_DEPTH = 0.05, 8  # minimum of a published curve; all others end at their minimum

RATIO, SMALLEST_RATIO = "signal / noise, inputs of layers", "smallest signal / noise"

Ratios = list[float]  # infinite for exact reconstructions


def measure_ratios(
    name: str,
    slope: float,
    batch: int,
    as_authors: bool = False,
    seed: int = 0,
    **options: Any,
) -> Ratios:
    """Return the ratios of the inputs of all layers of an untrained network except the stem's convolution.

    A ratio is the sum of squares of a layer's input over the sum of squares of its error. The input of a block precedes
    the inputs of the layers in its branches. With ``as_authors``, norms are inverted as in the authors' code.
    """
    torch.manual_seed(seed)
    model: Any = build_revnext(name, slope, eps_i=0.0, **options)
    for parameter in list(model.parameters())[1:]:
        parameter.requires_grad_(False)  # only the reconstruction is measured; the stem's gradient needs all of it
    if as_authors:
        for path, layer in list(model.named_modules()):
            if isinstance(layer, InvertibleNorm):
                model.set_submodule(path, AuthorsNorm(layer.norm, layer.eps_i))
    errors: dict[int, float] = {}
    model.meter = errors.__setitem__
    inside = [_watch(layer) for layer in model.layers()]
    model(torch.randn(batch, 3, SIZE, SIZE)).sum().backward()  # the loss of the authors' study
    ratios: Ratios = []
    for index in range(1, len(inside)):  # the images and the last map are saved
        ratios += [errors[index] ** -2 if errors[index] else math.inf, *(each.ratio for each in inside[index])]
    return ratios


class AuthorsNorm(InvertibleNorm):
    """A norm that reconstructs its input like ``IBatchNorm3d`` in layers.py of the authors' code."""

    def record_(self, x: Tensor) -> Any:
        """Return y in the memory of x, and the statistics, with the unbiased deviation."""
        var, mean = torch.var_mean(x, (0, 2, 3), correction=1, keepdim=True)
        y, saved = super().record_(x)
        return y, (saved, mean, var.sqrt())

    def undo_(self, y: Tensor, dy: Tensor, saved: Any) -> Any:
        """Return x and dx in the memory of y and dy, and the gradients of weight and bias."""
        saved, mean, deviation = saved
        own_var, own_mean = torch.var_mean(y, (0, 2, 3), correction=0, keepdim=True)
        reconstructed = (y - own_mean) * (deviation / own_var.sqrt()) + mean
        x, dx, gradients = super().undo_(y, dy, saved)
        return x.copy_(reconstructed), dx, gradients


class Watched(Invertible):
    """A layer of a branch that compares its reconstructed input with the input of the forward pass."""

    def __init__(self, layer: Invertible) -> None:
        super().__init__()
        self.layer = layer
        self.ratio = math.nan
        self._input: Tensor | None = None

    def record_(self, x: Tensor) -> Any:
        """Return y in the memory of x, and the state of the layer."""
        if self._input is None:  # otherwise this is a recomputation
            self._input = x.clone()
        return self.layer.record_(x)

    def undo_(self, y: Tensor, dy: Tensor, saved: Any) -> Any:
        """Return x and dx in the memory of y and dy, and the gradients of the parameters."""
        assert self._input is not None
        x, dx, gradients = self.layer.undo_(y, dy, saved)
        self.ratio = signal_to_noise(self._input, x)
        return x, dx, gradients


def _watch(layer: nn.Module) -> list[Watched]:
    """Watch the layers inside a block, f before g. Returns an empty list for a layer that is not a block."""
    watched = []
    if isinstance(layer, LayerwiseBlock):
        for branch in (layer.f, layer.g):
            for index, inner in enumerate(branch):
                branch[index] = Watched(inner)
            watched += list(branch)
    return watched


@measures("revnext", "Figure 10")
def measure_ratios_over_layers() -> ReportSection:
    """Return Figure 10: the ratios over the layers of one flat and one hybrid network, medians over the `SEEDS`."""
    section = ReportSection("figure10", "Figure 10: signal-to-noise ratio over the layers")
    lines = []
    for family, label, levels in (
        ("flat", "flat 2-3-3", {"layers": (2, 3, 3)}),
        ("hybrid", "hybrid 2-3", {"blocks": (2, 3)}),
    ):
        for as_authors in BATCHES:
            networks = _measure_networks(family, SLOPE, levels, as_authors)
            finite = [[ratio for ratio in network if math.isfinite(ratio)] for network in networks]
            ends = {"first": [each[0] for each in finite], "last": [each[-1] for each in finite]}
            if family == "hybrid":
                ends["smallest"] = [min(each) for each in finite]
            for end, values in ends.items():
                _add(section, f"{_label(label, as_authors)}: {end}", f"figure10/{family}_{end}", values)
            medians = [median(values) for values in zip(*networks, strict=True)]
            lines.append(finite_line(_label(label, as_authors), medians))
    section.panels.append(
        Panel(f"untrained networks, slope {SLOPE}", "layer, from input to output", RATIO, lines, y_log=True)
    )
    return section


def _measure_networks(family: str, slope: float, options: Mapping[str, Any], as_authors: bool) -> list[Ratios]:
    """Return the ratios of the network with each of the `SEEDS`."""
    logger.info("%s %s, slope %g, batches of %d", family, dict(options), slope, BATCHES[as_authors])
    name, batch = ARCH_OF_FAMILY[family], BATCHES[as_authors]
    return [measure_ratios(name, slope, batch, as_authors, seed=seed, **options) for seed in SEEDS]


def _label(what: str, as_authors: bool) -> str:
    return f"{what}, {AUTHORS_INVERSE}" if as_authors else what


def _add(section: ReportSection, what: str, key: str, values: Iterable[float]) -> None:
    """Add a comparison of the median over random networks, with the range of the values."""
    values = sorted(values)
    section.add(
        what, median(values), published_number("revnext", key), n=len(values),
        spread=values[-1] - values[0], note=f"{values[0]:.2g} to {values[-1]:.2g}",
    )  # fmt: skip


def finite_line(label: str, ratios: Ratios) -> Line:
    """Return the finite ratios over the layers, counted from 1; JSON and logarithmic axes have no infinity."""
    points = {layer: ratio for layer, ratio in enumerate(ratios, start=1) if math.isfinite(ratio)}
    return Line(label, list(points), list(points.values()))


@measures("revnext", "Figure 11")
def measure_depths() -> ReportSection:
    """Return Figure 11: the smallest ratio over depth and over slope.

    Norms are inverted as in the authors' code for published points only.
    """
    section = ReportSection("figure11", "Figure 11: smallest signal-to-noise ratio over depth and slope")
    for family, unit in DEPTH_UNITS.items():
        lines = []
        for slope in SLOPES:
            networks: dict[float, tuple[float, dict[str, Any]]]
            networks = {depth: (slope, options) for depth, options in LEVELS_OVER_DEPTHS[family].items()}
            ends: dict[str, float] = {"first": min(networks), "last": max(networks)}
            if (family, slope) == ("hybrid", LOWEST_SLOPE):
                ends["lowest"] = LOWEST_DEPTH
            what, key = f"{family}, slope {slope}, {{}} {unit}", f"figure11/{family}_slope_{slope}"
            lines.append(_measure_curve(section, f"slope {slope}", family, networks, ends, what, key))
        section.panels.append(Panel(f"{family} networks", unit, SMALLEST_RATIO, lines, y_log=True))
    lines = []
    for family, (label, options) in LEVELS_OVER_SLOPES.items():
        networks = {slope: (slope, options) for slope in ALL_SLOPES}
        ends = {str(slope): slope for slope in (ALL_SLOPES[0], ALL_SLOPES[-1])}
        what, key = f"{label}, slope {{}}", f"figure11/{family}_over_slopes"
        lines.append(_measure_curve(section, label, family, networks, ends, what, key))
    section.panels.append(
        Panel("flat 1-1-1 and hybrid 1-1 networks", "slope of the leaky ReLU", SMALLEST_RATIO, lines, True, True)
    )
    return section


def _measure_curve(
    section: ReportSection,
    label: str,
    family: str,
    networks: Mapping[Any, tuple[float, Mapping[str, Any]]],
    ends: Mapping[str, Any],
    what: str,
    key: str,
) -> Line:
    """Measure the curve of the smallest ratio; add the comparisons of its published points to the section.

    Args:
    - `networks`: x -> slope and options of the network.
    - `ends`: end of the key of a published point -> x.
    - `what`, `key`: name of a point, with braces for x, and prefix of the keys.
    """
    smallest: dict[Any, list[float]] = {}
    for as_authors in BATCHES:
        for place in dict.fromkeys(ends.values()) if as_authors else networks:
            smallest[place] = [min(ratios) for ratios in _measure_networks(family, *networks[place], as_authors)]
        for end, place in ends.items():
            _add(section, _label(what.format(place), as_authors), f"{key}/{end}", smallest[place])
    return Line(label, list(networks), [median(smallest[place]) for place in networks])
