"""Figures 5 and 6 of Hascoet et al. 2023: the signal-to-noise ratio after inverting a layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zoo.benchmark.plot_style import Line, Panel
from zoo.layers import InPlaceABN
from zoo.layers.invertible import Invertible, InvertibleLeakyReLU, InvertibleNorm
from zoo.reproduce.comparison import Comparison, ReportSection
from zoo.reproduce.measurements import measures
from zoo.reproduce.published_numbers import PublishedNumber, published_number

SIDE = 64  # side in pixels of the inverted feature maps, which are standard normal
CHANNELS_OF_ALL = 32  # minimum number of channels of all feature maps together
RATIOS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
DIVISORS = (1, 2, 5, 10, 20, 50, 100)  # the values of f in the plot of the authors' archive
CHANNELS, WEAK = 100, 20  # channels in the plot; WEAK of them have the gain 1 / f
NORM_NOISES = (1e-1, 1e-2, 1e-3)
SLOPES = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1e3)
NOISE = 1e-5  # noise in Figure 6
ALPHA = "alpha = SNR in / SNR out"


def norm_law(gains: Sequence[float]) -> float:
    """Return alpha of a batch norm with these gains: 1 / (mean of g^2 times mean of 1 / g^2)."""
    g = torch.tensor(gains, dtype=torch.float64)
    return 1 / float((g**2).mean() * (g**-2).mean())


def slope_law(slope: float) -> float:
    """Return alpha of a leaky ReLU: (2 n / (1 + n^2))^2."""
    return (2 * slope / (1 + slope**2)) ** 2


@measures("revnext", "Figure 5")
def measure_norm_law() -> ReportSection:
    """Return Figure 5: alpha of batch norms whose channels have different gains, against the law.

    The law is derived from the layer, because no text available to us shows the paper's formula.
    """
    torch.manual_seed(0)
    section = ReportSection("figure5", "Figure 5: signal-to-noise ratio through an inverted batch norm")
    law_number = published_number("revnext", "section4.2.1/law")
    two_channels = "gains 1 and rho"
    toy = [measure_norm([1, ratio], 1e-4) for ratio in RATIOS]
    toy_law = [norm_law([1, ratio]) for ratio in RATIOS]
    section.comparisons.append(_compare_with_law(two_channels, law_number, "rho", RATIOS, toy, toy_law))
    section.panels.append(_panel(f"two channels, {two_channels}", "gain rho", RATIOS, {"1e-4": toy}, toy_law))
    many_channels = f"{CHANNELS} channels, {WEAK} with gain 1/f"
    gains = [[1.0] * (CHANNELS - WEAK) + [1 / divisor] * WEAK for divisor in DIVISORS]
    measured = {f"{noise:g}": [measure_norm(group, noise) for group in gains] for noise in NORM_NOISES}
    law = [norm_law(group) for group in gains]
    section.comparisons.append(_compare_with_law(many_channels, law_number, "f", DIVISORS, measured["0.001"], law))
    section.panels.append(_panel(many_channels, "divisor f of the gains", DIVISORS, measured, law))
    what = f"{CHANNELS} channels, {WEAK} with gain 1/100: alpha"
    section.add(what, measured["0.001"][-1], published_number("revnext", "figure5/end"))
    return section


@measures("revnext", "Figure 6")
def measure_slope_law() -> ReportSection:
    """Return Figure 6: alpha of leaky ReLUs of different slopes, against the law.

    The largest slope is also measured in float32, like the authors' code. It rounds an output by more than the noise.
    """
    torch.manual_seed(0)
    section = ReportSection("figure6", "Figure 6: signal-to-noise ratio through an inverted leaky ReLU")
    law = [slope_law(slope) for slope in SLOPES]
    fixed = [measure_slope(slope, NOISE) for slope in SLOPES]
    small = [measure_slope(slope, 1e-4 * min(1.0, slope)) for slope in SLOPES]
    rounded = measure_slope(SLOPES[-1], NOISE, torch.float32) / law[-1]
    law_number, smallest, past_500 = (
        published_number("revnext", key) for key in ("section4.2.2/law", "figure6/smallest", "figure6/past_500")
    )
    section.comparisons.append(_compare_with_law("noise 1e-4 min(1, n)", law_number, "slope", SLOPES, small, law))
    section.add("slope 1e-3: alpha", small[0], smallest)
    section.add(f"noise {NOISE:g}, slope 1e3, float32: alpha over the law", rounded, past_500)
    measured = {f"{NOISE:g}": fixed, "1e-4 min(1, n)": small}
    section.panels.append(_panel("leaky ReLU with slope n for negative values", "slope n", SLOPES, measured, law))
    return section


@torch.no_grad()
def measure_norm(gains: Sequence[float], noise: float) -> float:
    """Return alpha of an invertible norm with these weights."""
    layer = InvertibleNorm(InPlaceABN(len(gains)).double(), eps_i=0.0)
    layer.norm.weight.copy_(torch.tensor(gains))
    return _measure_alpha(layer, len(gains), noise)


@torch.no_grad()
def measure_slope(slope: float, noise: float, dtype: torch.dtype = torch.float64) -> float:
    """Return alpha of an invertible leaky ReLU."""
    return _measure_alpha(InvertibleLeakyReLU(slope), 4, noise, dtype)


def _measure_alpha(layer: Invertible, channels: int, noise: float, dtype: torch.dtype = torch.float64) -> float:
    """Add white noise to the output; return the signal-to-noise ratio of the input over that of the output."""
    x = torch.randn(max(1, CHANNELS_OF_ALL // channels), channels, SIDE, SIDE, dtype=dtype)
    y, saved = layer.record(x)
    noisy = y + noise * torch.randn_like(y)
    ratio_of_output = signal_to_noise(y.double(), noisy.double())
    reconstructed, _, _ = layer.undo_(noisy, torch.zeros_like(noisy), saved)
    return signal_to_noise(x.double(), reconstructed.double()) / ratio_of_output


def signal_to_noise(signal: Tensor, estimate: Tensor) -> float:
    """Return the sum of squares of the signal over the sum of squares of the error."""
    return float(signal.square().sum() / (estimate - signal).square().sum())


def _compare_with_law(
    what: str,
    number: PublishedNumber,
    name: str,
    points: Sequence[float],
    measured: Sequence[float],
    law: Sequence[float],
) -> Comparison:
    """Return the largest deviation from the law; ``name`` is the quantity on the x axis."""
    differences = [a / b - 1 for a, b in zip(measured, law, strict=True)]
    worst = max(range(len(points)), key=lambda index: abs(differences[index]))
    note = f"at {name} = {points[worst]:g}, closer elsewhere"
    what = f"{what}: largest deviation of alpha from the law"
    return Comparison(what, 100 * differences[worst], number, note=note)


def _panel(
    title: str, x_label: str, points: Sequence[float], measured: dict[str, list[float]], law: Sequence[float]
) -> Panel:
    """Return the panel of alpha over the points: measured values by noise, and the law."""
    lines = [Line(f"measured, noise {noise}", points, alphas) for noise, alphas in measured.items()]
    return Panel(title, x_label, ALPHA, [*lines, Line("law", points, law, is_theory=True)], x_log=True, y_log=True)
