"""Memory per input pixel of the architectures of Hascoet et al. 2023, and the totals of their Table 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from torch import nn

from zoo.report.measure import measure_memory
from zoo.report.reversible.networks import build, count_parameters, forward_of
from zoo.report.reversible.schema import Figure, Line, Panel, Section, compare, unpublished

SIZES = (144, 192, 240)  # of the pictures, in pixels; in smaller batches the peak is elsewhere in a step
BATCH = 8
PAPER_PIXELS = 32 * 240 * 240  # of the batch that the paper's totals are for
TOLERANCE = 0.1
STRAIGHT = 0.01  # largest relative difference between the slopes of a line


class Published(NamedTuple):
    """Bytes per pixel (section 5.2 prints 352; the others follow from the totals), and the total in bytes."""

    per_pixel: int
    total: float
    with_weights: bool


PUBLISHED = {
    "revnext_resnet18": Published(2060, 3.81e9, True),
    "revnext_revnet": Published(640, 1.19e9, True),
    "irevnet_revnext": Published(640, 1.35e9, True),
    "revnext_flat": Published(320, 590e6, False),
    "revnext": Published(352, 648e6, False),
}
NOTES = [
    "of the bytes per pixel the text that we have prints 352 only; the others follow from its totals",
    "the paper counts the inputs of convolutions and norms and one gradient; measured is all that the allocator gave "
    "out, the outputs of stem and levels, the gradients inside a branch and scratch memory among it",
    "RevNet and i-RevNet: the paper counts the two branches of a block, 128 values per pixel, and a gradient of 32; "
    "here one branch is run at a time, 64, and a gradient inside it, 16, but the output of a chain, 32, and its "
    "gradient, 32, stay the caller's, so that what is found again, 32, and its gradient, 32, are new tensors beside "
    "them, and the stem's 64 and the other levels' outputs are held: about 300 values of 4 bytes",
    "revnext: by the paper's count 352 holds only if a branch's input is not kept while the branch is undone, and is "
    "416 if it is; here it is not",
    "the slope depends on the batch too: the scratch memory of convolutions is not in proportion to it",
]


def measure_pixels(
    names: Sequence[str] = tuple(PUBLISHED), sizes: Sequence[int] = SIZES, batch: int = BATCH
) -> Section:
    """Return bytes per pixel as a slope over sizes, and the totals of the paper's batch that follow."""
    section = Section(
        "pixels", "Bytes per input pixel, and Table 1: memory",
        f"float32, batches of {batch} pictures of {', '.join(map(str, sizes))} pixels; peak of a training step, of the "
        "allocator and without the parameters' gradients. The slope between the two largest sizes has no constants; "
        "the total is the slope times the paper's 32 pictures of 240 pixels, plus the weights where the paper adds "
        "them.", notes=list(NOTES),
    )  # fmt: skip
    lines = []
    for name in names:
        model = build_for_memory(name)
        measured = [measure_memory(forward_of(model, batch, size), model.parameters(), warmup=0) for size in sizes]
        peaks, held = [memory.peak_without_gradients for memory in measured], [memory.held for memory in measured]
        pixels = [batch * size**2 for size in sizes]
        slopes, held_slope = _slopes(pixels, peaks), _slopes(pixels, held)[-1]
        slope = slopes[-1]
        section.figures += _figures(name, slope, 4 * count_parameters(model))
        section.figures.append(unpublished(f"{name}: held after forward, bytes per pixel", held_slope, "B"))
        if max(slopes) > (1 + STRAIGHT) * min(slopes):
            found = ", ".join(f"{value:.0f}" for value in slopes)
            section.notes.append(f"{name}: no line between these sizes, bytes per pixel from one to the next: {found}")
        lines.append(Line(f"{name}: {slope:.0f} B/px", [count / 1e3 for count in pixels], [p / 1e6 for p in peaks]))
    section.panels.append(Panel("peak of a step", "thousand pixels of a batch", "MB", lines))
    return section


def _slopes(x: Sequence[int], y: Sequence[int]) -> list[float]:
    return [(d - c) / (b - a) for (a, b), (c, d) in zip(pairwise(x), pairwise(y), strict=True)]


def build_for_memory(name: str) -> nn.Module:
    """Return the architecture with 10 classes."""
    return build(name, activation="leaky_relu", slope=0.2, weight_init="torch")


def _figures(name: str, slope: float, weights: int) -> list[Figure]:
    published = PUBLISHED[name]
    total = slope * PAPER_PIXELS + (weights if published.with_weights else 0)
    return [
        _no_more(f"{name}: bytes per pixel", published.per_pixel, slope, "B"),
        _no_more(f"{name}: total for 32 pictures of 240 pixels", published.total / 1e6, total / 1e6, "MB"),
        Figure(f"{name}: weights", _weights(name), weights / 1e6, "MB", "see the total"),
    ]


def _weights(name: str) -> float | None:
    return 12.5 if name == "revnext_resnet18" else None


def _no_more(what: str, published: float, measured: float, unit: str) -> Figure:
    difference = measured / published - 1
    figure = compare(what, published, measured, unit, TOLERANCE)
    return replace(figure, verdict=f"less by {-100 * difference:.1f} %") if difference < -TOLERANCE else figure
