"""Memory per input pixel of the architectures of Hascoet et al. 2023, and the totals of their Table 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from zoo.benchmark.memory_use import Memory, measure_memory
from zoo.ops.abn.backend import forced, kernels_for
from zoo.reproduce.chains import FOUND_AGAIN
from zoo.reproduce.networks import build, count_parameters, forward_of
from zoo.reproduce.schema import Figure, Line, Panel, Published, Section, compare, unpublished

SIZES = (144, 192, 240)  # of the images, in pixels; in smaller batches the peak is elsewhere in a step
BATCH = 8
PAPER_PIXELS = 32 * 240 * 240  # of the batch that the paper's totals are for
TOLERANCE = 0.1
STRAIGHT = 0.01  # largest relative difference between the slopes of a line
UNITS = {"GB": 1e9, "MB": 1e6}


class Row(NamedTuple):
    """A row of Table 1: bytes per pixel and the total, in ``unit``, which has the weights in it or not."""

    per_pixel: Published
    total: Published
    unit: str
    with_weights: bool


def _row(per_pixel: int, kind: Any, why: str, total: float, unit: str, section: str, with_weights: bool) -> Row:
    return Row(Published(per_pixel, kind, why), Published(total, "printed", section), unit, with_weights)


# The total for 32 images of 240 pixels is printed; less the weights, it is the bytes of 1,843,200 pixels.
PUBLISHED = {
    "revnext_resnet18": _row(2060, "derived", "total of section 3.3", 3.81, "GB", "section 3.3", True),
    "revnext_revnet": _row(640, "derived", "total of section 3.4", 1.19, "GB", "section 3.4", True),
    "irevnet_revnext": _row(640, "derived", "total of section 3.5", 1.35, "GB", "section 3.5", True),
    "revnext_flat": _row(320, "derived", "total of section 4.3", 590, "MB", "section 4.3", False),
    "revnext": _row(352, "printed", "abstract", 648, "MB", "section 4.4", False),
}
WEIGHTS = {"revnext_resnet18": Published(12.5, "printed", "section 3.3")}  # in MB
ANY_DEPTH = Published("any depth", "printed", "abstract")
DEEPER: Mapping[str, dict[str, Any]] = {"revnext_flat": {"layers": (3, 3, 3)}, "revnext": {"blocks": (3, 3)}}
NOTES = [
    "the paper counts the inputs of convolutions and norms and one gradient; measured is all that the allocator gave "
    "out, the outputs of stem and levels, the gradients inside a branch and scratch memory among it",
    "RevNet and i-RevNet: the paper counts the two branches of a block, 128 values per pixel, and a gradient of 32; "
    "here one branch is run at a time, 64, and a gradient inside it, 16, but the output of a chain, 32, and its "
    "gradient, 32, stay the caller's, so that what is found again, 32, and its gradient, 32, are new tensors beside "
    "them, and the stem's 64 and the other levels' outputs are held: about 300 values of 4 bytes",
    "revnext, in values of 4 bytes: the map 32, its gradient 32, the map inside a branch 16, the gradient there 16 and "
    "scratch memory 4 are 100; the paper's 88 has no gradient inside the branch, and 8 for the convolution there in "
    "place of the scratch memory; with branch inputs found again the map inside a branch takes no memory of its own",
    "the slope depends on the sizes and the batch too: the scratch memory of convolutions is not in proportion to them",
]


def measure_pixels(
    names: Sequence[str] = tuple(PUBLISHED), sizes: Sequence[int] = SIZES, batch: int = BATCH
) -> Section:
    """Return bytes per pixel as a slope over sizes, and the totals of the paper's batch that follow."""
    kernels = _kernels()
    section = Section(
        "pixels", "Bytes per input pixel, and Table 1: memory",
        f"float32, batches of {batch} images of {', '.join(map(str, sizes))} pixels, norms by the {kernels} kernels; "
        "peak of a training step, of the allocator and without the parameters' gradients. The slope between the two "
        "largest sizes has no constants; the total is the slope times the paper's 32 images of 240 pixels, plus the "
        "weights where the paper adds them.", notes=list(NOTES),
    )  # fmt: skip
    lines = []
    for name in names:
        model = build_for_memory(name)
        measured = _measure(model, sizes, batch)
        peaks = [memory.peak_without_gradients for memory in measured]
        pixels = [batch * size**2 for size in sizes]
        slopes, held_slope = _slopes(pixels, peaks), _slopes(pixels, [memory.held for memory in measured])[-1]
        slope = slopes[-1]
        section.figures += _figures(name, slope, 4 * count_parameters(model))
        section.figures.append(unpublished(f"{name}: held after forward, bytes per pixel", held_slope, "B"))
        if max(slopes) > (1 + STRAIGHT) * min(slopes):
            found = ", ".join(f"{value:.0f}" for value in slopes)
            section.notes.append(f"{name}: no line between these sizes, bytes per pixel from one to the next: {found}")
        lines.append(Line(f"{name}: {slope:.0f} B/px", [count / 1e3 for count in pixels], [p / 1e6 for p in peaks]))
        if name in DEEPER:
            section.figures += _variants(name, sizes[:2], batch, slopes[0], kernels)
    section.panels.append(Panel("peak of a step", "thousand pixels of a batch", "MB", lines))
    return section


def build_for_memory(name: str, **options: Any) -> nn.Module:
    """Return the architecture with 10 classes."""
    return build(name, activation="leaky_relu", slope=0.2, weight_init="torch", **options)


def _kernels() -> str:
    return kernels_for(torch.empty(0)).__name__.rpartition(".")[2]


def _measure(model: nn.Module, sizes: Sequence[int], batch: int) -> list[Memory]:
    return [measure_memory(forward_of(model, batch, size), model.parameters(), warmup=0) for size in sizes]


def _slopes(x: Sequence[int], y: Sequence[int]) -> list[float]:
    return [(d - c) / (b - a) for (a, b), (c, d) in zip(pairwise(x), pairwise(y), strict=True)]


def _slope(name: str, sizes: Sequence[int], batch: int, **options: Any) -> float:
    """Return the bytes per pixel between two sizes."""
    peaks = [m.peak_without_gradients for m in _measure(build_for_memory(name, **options), sizes, batch)]
    return _slopes([batch * size**2 for size in sizes], peaks)[0]


def _variants(name: str, sizes: Sequence[int], batch: int, slope: float, kernels: str) -> list[Figure]:
    """Return the bytes per pixel of a deeper network, of plain kernels, and of hybrids that keep no branch input.

    They belong to the two smallest sizes, between which the network itself has the ``slope``.
    """
    (option, depth), *_ = DEEPER[name].items()
    deep = _slope(name, sizes, batch, **DEEPER[name])
    unit = f"bytes per pixel, {sizes[0]} to {sizes[1]} pixels"
    what = f"{name}, {option} {'-'.join(map(str, depth))}: {unit}"
    is_equal = abs(deep / slope - 1) < STRAIGHT
    figures = [Figure(what, ANY_DEPTH, deep, "B", "the same" if is_equal else f"off: {slope:.4g} for the default")]
    others = {name: {}, f"{name}, branch inputs found again": FOUND_AGAIN} if name == "revnext" else {name: {}}
    for used in dict.fromkeys((kernels, "reference")):
        with forced(used):
            for label, options in others.items():
                if (used, options) != (kernels, {}):  # measured already
                    label += ", plain torch kernels" if used != kernels else ""
                    measured = _slope(name, sizes, batch, **options)
                    figures.append(_no_more(f"{label}: {unit}", PUBLISHED[name].per_pixel, measured, "B"))
    return figures


def _figures(name: str, slope: float, weights: int) -> list[Figure]:
    row = PUBLISHED[name]
    total = (slope * PAPER_PIXELS + (weights if row.with_weights else 0)) / UNITS[row.unit]
    return [
        _no_more(f"{name}: bytes per pixel", row.per_pixel, slope, "B"),
        _no_more(f"{name}: total for 32 images of 240 pixels", row.total, total, row.unit),
        Figure(f"{name}: weights", WEIGHTS.get(name), weights / 1e6, "MB", "see the total"),
    ]


def _no_more(what: str, published: Published, measured: float, unit: str) -> Figure:
    difference = measured / float(published.value) - 1
    figure = compare(what, published, measured, unit, TOLERANCE)
    return replace(figure, verdict=f"less by {-100 * difference:.1f} %") if difference < -TOLERANCE else figure
