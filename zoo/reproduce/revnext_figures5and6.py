"""Figures 5 and 6 of Hascoet et al. 2023: the signal-to-noise ratio that is left after inverting a layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from zoo.layers import InPlaceABN
from zoo.layers.invertible import Invertible, InvertibleLeakyReLU, InvertibleNorm
from zoo.reproduce.comparison import Comparison, Line, Panel, PublishedValue, Section, within

MAPS, SIDE = 16, 64  # number and pixels of a side of the inverted feature maps: standard normal, in float64
TOLERANCE = 0.02
RATIOS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
DIVISORS = (1, 2, 5, 10, 20, 50, 100)  # f of the plot in the authors' archive
CHANNELS, WEAK = 100, 20  # channels there, of which WEAK have the gain 1 / f
NORM_NOISES = (1e-1, 1e-2, 1e-3)
SLOPES = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1e3)
NOISE = 1e-5  # of Figure 6
LEAST_GAINS = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 1.0)
WEAK_GAIN = 0.01
# Plots in the notebooks of the authors' public code, whose cells are counted from 0.
NORM_END = PublishedValue("about 6e-4", "read off a figure", "authors' notebook 3.a, cell 12")
SLOPE_END = PublishedValue(4e-6, "read off a figure", "authors' notebook 3.a, cell 7")
BELOW_LAW = PublishedValue("below 1", "read off a figure", "authors' notebook 3.a, cell 7")
LEAST_GAIN_EFFECT = PublishedValue("rises", "derived", "section 4.2.1: eps_i stabilizes the numerical errors")


def norm_law(gains: Sequence[float]) -> float:
    """Return alpha of a batch norm with these gains: 1 / (mean of g^2 times mean of 1 / g^2)."""
    g = torch.tensor(gains, dtype=torch.float64)
    return 1 / float((g**2).mean() * (g**-2).mean())


def slope_law(slope: float) -> float:
    """Return alpha of a leaky ReLU: (2 n / (1 + n^2))^2."""
    return (2 * slope / (1 + slope**2)) ** 2


def measure_norm_law() -> Section:
    """Return Figure 5: alpha of batch norms whose channels have different gains, against the law."""
    torch.manual_seed(0)
    section = Section(
        "figure5", "Figure 5: signal-to-noise ratio through an inverted batch norm",
        f"alpha, the share of the ratio that is left after one inverse; float64, {MAPS} normal maps of {SIDE} pixels, "
        "white noise on the output. The law is derived from the layer, as no text that we have shows the paper's "
        "formula; the authors' archived plot goes from 1 down to 6e-4.",
    )  # fmt: skip
    two_channels = "gains 1 and rho"
    toy = [measure_norm([1, ratio], 1e-4) for ratio in RATIOS]
    toy_law = [norm_law([1, ratio]) for ratio in RATIOS]
    section.comparisons.append(_compare_with_law(two_channels, "rho", RATIOS, toy, toy_law))
    section.panels.append(_panel(f"two channels, {two_channels}", "rho", RATIOS, {"1e-4": toy}, toy_law))
    many_channels = f"{CHANNELS} channels, {WEAK} with gain 1/f"
    gains = [[1.0] * (CHANNELS - WEAK) + [1 / divisor] * WEAK for divisor in DIVISORS]
    measured = {f"{noise:g}": [measure_norm(group, noise) for group in gains] for noise in NORM_NOISES}
    law = [norm_law(group) for group in gains]
    section.comparisons.append(_compare_with_law(many_channels, "f", DIVISORS, measured["0.001"], law))
    section.panels.append(_panel(many_channels, "f", DIVISORS, measured, law))
    end = measured["0.001"][-1]
    what = f"{CHANNELS} channels, {WEAK} with gain 1/100: alpha"
    section.comparisons.append(Comparison(what, NORM_END, end, "", "equal as read" if round(end, 4) == 6e-4 else "off"))
    bounded = [measure_norm([1, WEAK_GAIN], 1e-4, eps_i) for eps_i in LEAST_GAINS]
    text = " / ".join(f"{alpha:.3g}" for alpha in bounded)
    what = f"gains 1 and {WEAK_GAIN}, eps_i {' / '.join(f'{eps_i:g}' for eps_i in LEAST_GAINS)}: alpha"
    verdict = "rises" if all(a < b for a, b in pairwise(bounded)) else "off"
    section.comparisons.append(Comparison(what, LEAST_GAIN_EFFECT, text, "", verdict))
    return section


def measure_slope_law() -> Section:
    """Return Figure 6: alpha of leaky ReLUs of different slopes, against the law."""
    torch.manual_seed(0)
    section = Section(
        "figure6", "Figure 6: signal-to-noise ratio through an inverted leaky ReLU",
        f"alpha as in Figure 5, noise {NOISE:g}; the authors' plot has slopes from 1e-3 to 1e3 and alpha from 4e-6 "
        "to 1, and falls below the law past a slope of 500.",
    )  # fmt: skip
    law = [slope_law(slope) for slope in SLOPES]
    fixed = [measure_slope(slope, NOISE) for slope in SLOPES]
    small = [measure_slope(slope, 1e-4 * min(1.0, slope)) for slope in SLOPES]
    over_law = fixed[-1] / law[-1]
    below = "below" if over_law < 1 - TOLERANCE else f"not below: {within(over_law - 1, TOLERANCE)}"
    section.comparisons += [
        _compare_with_law("noise 1e-4 min(1, n)", "slope", SLOPES, small, law),
        Comparison("smallest alpha, slope 1e-3", SLOPE_END, small[0], "", within(small[0] / 4e-6 - 1, TOLERANCE)),
        Comparison(f"noise {NOISE:g}, slope 1e3: alpha over the law", BELOW_LAW, over_law, "", below),
    ]
    measured = {f"{NOISE:g}": fixed, "1e-4 min(1, n)": small}
    section.panels.append(_panel("one leaky ReLU", "slope n", SLOPES, measured, law))
    return section


@torch.no_grad()
def measure_norm(gains: Sequence[float], noise: float, eps_i: float = 0.0) -> float:
    """Return alpha of an invertible norm with these weights."""
    layer = InvertibleNorm(InPlaceABN(len(gains)).double(), eps_i)
    layer.norm.weight.copy_(torch.tensor(gains))
    return _measure_alpha(layer, len(gains), noise)


@torch.no_grad()
def measure_slope(slope: float, noise: float) -> float:
    """Return alpha of an invertible leaky ReLU."""
    return _measure_alpha(InvertibleLeakyReLU(slope), 4, noise)


def _measure_alpha(layer: Invertible, channels: int, noise: float) -> float:
    """Return the signal-to-noise ratio of the input over that of the output, to which white noise is added."""
    x = torch.randn(MAPS, channels, SIDE, SIDE, dtype=torch.float64)
    y, saved = layer.record(x)
    noisy = y + noise * torch.randn_like(y)
    ratio_of_output = signal_to_noise(y, noisy)
    reconstructed, _, _ = layer.undo_(noisy, torch.zeros_like(noisy), saved)
    return signal_to_noise(x, reconstructed) / ratio_of_output


def signal_to_noise(signal: Tensor, estimate: Tensor) -> float:
    """Return the sum of squares of the signal over that of the error."""
    return float(signal.square().sum() / (estimate - signal).square().sum())


def _compare_with_law(
    what: str, name: str, points: Sequence[float], measured: Sequence[float], law: Sequence[float]
) -> Comparison:
    """Return the point that is furthest from the law; ``name`` is that of the quantity whose values the points are."""
    differences = [a / b - 1 for a, b in zip(measured, law, strict=True)]
    worst = max(range(len(points)), key=lambda index: abs(differences[index]))
    what = f"{what}: alpha where it is furthest from the law, {name} = {points[worst]:g}"
    theory = PublishedValue(f"law: {law[worst]:.4g}", "derived", "the layer's formula, section 4.2")
    return Comparison(what, theory, measured[worst], "", within(differences[worst], TOLERANCE))


def _panel(
    title: str, x_label: str, points: Sequence[float], measured: dict[str, list[float]], law: Sequence[float]
) -> Panel:
    """Return the panel of alpha over the points: the measured values by their noise, and the law."""
    lines = [Line(f"measured, noise {noise}", points, alphas) for noise, alphas in measured.items()]
    return Panel(title, x_label, "alpha", [*lines, Line("law", points, law, is_theory=True)], x_log=True, y_log=True)
