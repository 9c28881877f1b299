"""Figures 5 and 6 of Hascoet et al. 2023: how much of the signal-to-noise ratio one inverted layer leaves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from zoo.layers import InPlaceABN
from zoo.layers.invertible import Invertible, InvertibleLeakyReLU, InvertibleNorm
from zoo.reproduce.schema import Figure, Line, Panel, Published, Section

IMAGES, SIDE = 16, 64  # of the maps that are inverted, standard normal and in float64
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
NORM_END = Published("about 6e-4", "read off a figure", "authors' notebook 3.a, cell 12")
SLOPE_END = Published(4e-6, "read off a figure", "authors' notebook 3.a, cell 7")
BELOW_LAW = Published("below 1", "read off a figure", "authors' notebook 3.a, cell 7")
LEAST_GAIN_EFFECT = Published("rises", "derived", "section 4.2.1: eps_i stabilizes the numerical errors")


def norm_law(gains: Tensor) -> float:
    """Return alpha of a batch norm with these gains: 1 / (mean of g^2 times mean of 1 / g^2)."""
    return 1 / float((gains**2).mean() * (gains**-2).mean())


def slope_law(slope: float) -> float:
    """Return alpha of a leaky ReLU: (2 n / (1 + n^2))^2."""
    return (2 * slope / (1 + slope**2)) ** 2


def measure_alpha(layer: Invertible, channels: int, noise: float) -> float:
    """Return the ratio of the signal-to-noise ratios of input and output, of an output with white noise added."""
    x = torch.randn(IMAGES, channels, SIDE, SIDE, dtype=torch.float64)
    y, kept = layer.record(x)
    noisy = y + noise * torch.randn_like(y)
    before = signal_to_noise(y, noisy)
    found, _, _ = layer.undo_(noisy, torch.zeros_like(noisy), kept)
    return signal_to_noise(x, found) / before


def signal_to_noise(signal: Tensor, found: Tensor) -> float:
    """Return the sum of squares of the signal over that of the error."""
    return float(signal.square().sum() / (found - signal).square().sum())


def measure_norm(gains: Sequence[float], noise: float, eps_i: float = 0.0) -> float:
    """Return alpha of an invertible norm with these weights."""
    layer = InvertibleNorm(InPlaceABN(len(gains)).double(), eps_i)
    with torch.no_grad():
        layer.norm.weight.copy_(torch.tensor(gains))
        return measure_alpha(layer, len(gains), noise)


@torch.no_grad()
def measure_slope(slope: float, noise: float) -> float:
    """Return alpha of an invertible leaky ReLU."""
    return measure_alpha(InvertibleLeakyReLU(slope), 4, noise)


def measure_norm_law() -> Section:
    """Return Figure 5: the ratio of batch norms whose channels have different gains, against the law."""
    torch.manual_seed(0)
    section = Section(
        "figure5", "Figure 5: signal-to-noise ratio through an inverted batch norm",
        f"alpha, what one inverse leaves of the ratio, float64, {IMAGES} normal maps of {SIDE} pixels, "
        "white noise on the output. The law is derived from the layer, as the paper's formula is in no text that we "
        "have; the authors' archived plot goes from 1 down to 6e-4.",
    )  # fmt: skip
    toy = [measure_norm([1, ratio], 1e-4) for ratio in RATIOS]
    section.figures += _deviations("gains 1 and rho", "rho", RATIOS, toy, [_law([1, ratio]) for ratio in RATIOS])
    section.panels.append(
        Panel("two channels, gains 1 and rho", "rho", "alpha", _lines(RATIOS, {"1e-4": toy},
              [_law([1, ratio]) for ratio in RATIOS]), True, True)
    )  # fmt: skip
    groups = [[1.0] * (CHANNELS - WEAK) + [1 / divisor] * WEAK for divisor in DIVISORS]
    measured = {f"{noise:g}": [measure_norm(gains, noise) for gains in groups] for noise in NORM_NOISES}
    law = [_law(gains) for gains in groups]
    section.figures += _deviations(f"{CHANNELS} channels, {WEAK} with gain 1/f", "f", DIVISORS, measured["0.001"], law)
    section.panels.append(
        Panel(f"{CHANNELS} channels, {WEAK} with gain 1/f", "f", "alpha", _lines(DIVISORS, measured, law), True, True)
    )
    section.figures.append(
        Figure(f"{CHANNELS} channels, {WEAK} with gain 1/100: alpha", NORM_END, measured["0.001"][-1], "",
               "equal as read" if round(measured["0.001"][-1], 4) == 6e-4 else "off")
    )  # fmt: skip
    bounded = [measure_norm([1, WEAK_GAIN], 1e-4, eps_i) for eps_i in LEAST_GAINS]
    text = " / ".join(f"{alpha:.3g}" for alpha in bounded)
    label = f"gains 1 and {WEAK_GAIN}, eps_i {' / '.join(f'{eps_i:g}' for eps_i in LEAST_GAINS)}: alpha"
    section.figures.append(
        Figure(label, LEAST_GAIN_EFFECT, text, "", "rises" if all(a < b for a, b in pairwise(bounded)) else "off")
    )
    return section


def measure_slope_law() -> Section:
    """Return Figure 6: the ratio of leaky ReLUs of different slopes, against the law."""
    torch.manual_seed(0)
    section = Section(
        "figure6", "Figure 6: signal-to-noise ratio through an inverted leaky ReLU",
        f"alpha as in Figure 5, noise {NOISE:g}; the authors' plot has slopes from 1e-3 to 1e3 and alpha from 4e-6 "
        "to 1, and falls below the law past a slope of 500.",
    )  # fmt: skip
    law = [slope_law(slope) for slope in SLOPES]
    fixed = [measure_slope(slope, NOISE) for slope in SLOPES]
    small = [measure_slope(slope, 1e-4 * min(1.0, slope)) for slope in SLOPES]
    section.figures += _deviations("noise 1e-4 min(1, n)", "slope", SLOPES, small, law)
    section.figures.append(Figure("smallest alpha, slope 1e-3", SLOPE_END, small[0], "", _within(small[0] / 4e-6 - 1)))
    over_law = fixed[-1] / law[-1]
    seen = "below" if over_law < 1 - TOLERANCE else f"not below: {_within(over_law - 1)}"
    section.figures.append(Figure(f"noise {NOISE:g}, slope 1e3: alpha over the law", BELOW_LAW, over_law, "", seen))
    lines = _lines(SLOPES, {f"{NOISE:g}": fixed, "1e-4 min(1, n)": small}, law)
    section.panels.append(Panel("one leaky ReLU", "slope n", "alpha", lines, True, True))
    return section


def _law(gains: Sequence[float]) -> float:
    return norm_law(torch.tensor(gains, dtype=torch.float64))


def _deviations(
    what: str, name: str, points: Sequence[float], measured: Sequence[float], law: Sequence[float]
) -> list[Figure]:
    """Return the point that is furthest from the law."""
    differences = [a / b - 1 for a, b in zip(measured, law, strict=True)]
    worst = max(range(len(points)), key=lambda index: abs(differences[index]))
    label = f"{what}: alpha where it is furthest from the law, {name} = {points[worst]:g}"
    theory = Published(f"law: {law[worst]:.4g}", "derived", "the layer's formula, section 4.2")
    return [Figure(label, theory, measured[worst], "", _within(differences[worst]))]


def _within(difference: float) -> str:
    return f"within {100 * TOLERANCE:g} %" if abs(difference) <= TOLERANCE else f"off by {100 * difference:+.1f} %"


def _lines(points: Sequence[float], measured: dict[str, list[float]], law: Sequence[float]) -> list[Line]:
    lines = [Line(f"measured, noise {noise}", points, found) for noise, found in measured.items()]
    return [*lines, Line("law", points, law, is_theory=True)]
