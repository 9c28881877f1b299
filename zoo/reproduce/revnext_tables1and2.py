"""Tables 1 and 2 of Hascoet et al. 2023: memory per input pixel, test errors and training time of their networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from zoo.benchmark.memory_use import Memory, measure_memory
from zoo.ops.abn.backend import forced, kernels_for
from zoo.reproduce.comparison import Comparison, Line, Panel, PublishedValue, Section, compare, not_run, unpublished
from zoo.reproduce.error_rates import command_of, report_errors
from zoo.reproduce.paper_networks import build_revnext, count_parameters, forward_of
from zoo.reproduce.training_runs import TrainingRun

SIZES = (144, 192, 240)  # of the images, in pixels; in smaller batches another moment of the step has the peak
BATCH = 8
PAPER_PIXELS = 32 * 240 * 240  # of the batch that the paper's totals are for
TOLERANCE = 0.1
STRAIGHT = 0.01  # largest relative difference between slopes that counts as a straight line
UNITS = {"GB": 1e9, "MB": 1e6}


class PublishedMemory(NamedTuple):
    """A row of Table 1: bytes per pixel, and the total in ``unit``, with or without the weights."""

    per_pixel: PublishedValue
    total: PublishedValue
    unit: str
    with_weights: bool


def _published(per_pixel: int, total: float, unit: str, section: str, with_weights: bool) -> PublishedMemory:
    """Return the row of a total that is printed for 32 images of 240 pixels, which are 1,843,200 pixels.

    The bytes per pixel are derived from it, without the weights.
    """
    derived = PublishedValue(per_pixel, "derived", f"total of {section}")
    return PublishedMemory(derived, PublishedValue(total, "printed", section), unit, with_weights)


MEMORY = {
    "revnext_resnet18": _published(2060, 3.81, "GB", "section 3.3", with_weights=True),
    "revnext_revnet": _published(640, 1.19, "GB", "section 3.4", with_weights=True),
    "irevnet_revnext": _published(640, 1.35, "GB", "section 3.5", with_weights=True),
    "revnext_flat": _published(320, 590, "MB", "section 4.3", with_weights=False),
    "revnext": PublishedMemory(
        PublishedValue(352, "printed", "abstract"), PublishedValue(648, "printed", "section 4.4"), "MB", False
    ),
}
WEIGHTS_MB = {"revnext_resnet18": PublishedValue(12.5, "printed", "section 3.3")}
ANY_DEPTH = PublishedValue("any depth", "printed", "abstract")
DEEPER: Mapping[str, dict[str, Any]] = {"revnext_flat": {"layers": (3, 3, 3)}, "revnext": {"blocks": (3, 3)}}
# Test errors in percent on CIFAR-10; None: no text that we have shows that part of the table. The abstract prints
# 93.3 % for a network whose depths and pools it does not state; we assume that it is this one.
ERRORS = {
    "revnext_resnet18_cifar10": None, "revnext_revnet_cifar10": None, "irevnet_revnext_cifar10": None,
    "revnext_flat_cifar10": None, "revnext_cifar10": PublishedValue(6.7, "derived", "abstract: 93.3 %"),
}  # fmt: skip
GTX750_MINUTES = PublishedValue(67, "printed", "abstract")
NOTES = [
    "the paper counts the inputs of convolutions and norms and one gradient. What is measured is everything that the "
    "allocator handed out, which includes the outputs of stem and levels, the gradients inside a branch and scratch "
    "memory",
    "RevNet and i-RevNet: the paper counts the two branches of a block, 128 values per pixel, and a gradient of 32. "
    "Here one branch is run at a time, which takes 64 values, and a gradient inside it, 16. But the output of a chain, "
    "32, and its gradient, 32, belong to the caller, so that the reconstructed activations, 32, and their gradient, "
    "32, are new tensors beside them, and the stem's 64 and the outputs of the other levels are held too: about 300 "
    "values of 4 bytes",
    "revnext, in values of 4 bytes: the feature map 32, its gradient 32, the map inside a branch 16, the gradient "
    "there 16 and scratch memory 4 are 100. The paper's 88 has no gradient inside the branch, and 8 for the "
    "convolution there in place of the scratch memory. Where the inputs of branches are reconstructed, the map inside "
    "a branch takes no memory of its own",
    "the slope depends on the sizes and the batch too, as the scratch memory of convolutions is not in proportion to "
    "them",
]


def measure_pixels(names: Sequence[str] = tuple(MEMORY), sizes: Sequence[int] = SIZES, batch: int = BATCH) -> Section:
    """Return bytes per pixel as the slope over image sizes, and the totals of the paper's batch that follow."""
    kernels = kernels_in_use()
    section = Section(
        "pixels", "Bytes per input pixel, and Table 1: memory",
        f"float32, batches of {batch} images of {', '.join(map(str, sizes))} pixels, norms by the {kernels} kernels. "
        "Measured is the peak of a training step, as the allocator reports it, without the parameters' gradients. The "
        "slope between the two largest sizes leaves out what does not grow with the images; the total is the slope "
        "times the paper's 32 images of 240 pixels, plus the weights where the paper adds them.", notes=list(NOTES),
    )  # fmt: skip
    pixels = [batch * size**2 for size in sizes]
    lines = []
    for name in names:
        model = build_revnext(name)
        memories = _measure(model, sizes, batch)
        peaks = [memory.peak_without_gradients for memory in memories]
        slopes, held_slope = _slopes(pixels, peaks), _slopes(pixels, [memory.held for memory in memories])[-1]
        slope = slopes[-1]
        section.comparisons += _compare_with_paper(name, slope, 4 * count_parameters(model))
        section.comparisons.append(unpublished(f"{name}: held after forward, bytes per pixel", held_slope, "B"))
        if max(slopes) > (1 + STRAIGHT) * min(slopes):
            text = ", ".join(f"{value:.0f}" for value in slopes)
            section.notes.append(
                f"{name}: the peaks are not on a straight line; bytes per pixel from one size to the next: {text}"
            )
        lines.append(Line(f"{name}: {slope:.0f} B/px", [count / 1e3 for count in pixels], [p / 1e6 for p in peaks]))
        if name in DEEPER:
            section.comparisons += _compare_variants(name, sizes[:2], batch, slopes[0], kernels)
    section.panels.append(Panel("peak of a step", "thousand pixels of a batch", "MB", lines))
    return section


def kernels_in_use() -> str:
    """Return the name of the kernels that compute norms on the CPU."""
    return kernels_for(torch.empty(0)).__name__.rpartition(".")[2]


def _measure(model: nn.Module, sizes: Sequence[int], batch: int) -> list[Memory]:
    return [measure_memory(forward_of(model, batch, size), model.parameters(), warmup=0) for size in sizes]


def _slopes(x: Sequence[int], y: Sequence[int]) -> list[float]:
    return [(d - c) / (b - a) for (a, b), (c, d) in zip(pairwise(x), pairwise(y), strict=True)]


def _compare_with_paper(name: str, slope: float, weights: int) -> list[Comparison]:
    """Return the bytes per pixel, the total and the weights; ``weights`` are bytes."""
    published = MEMORY[name]
    total = (slope * PAPER_PIXELS + (weights if published.with_weights else 0)) / UNITS[published.unit]
    return [
        compare_maximum(f"{name}: bytes per pixel", published.per_pixel, slope, "B"),
        compare_maximum(f"{name}: total for 32 images of 240 pixels", published.total, total, published.unit),
        Comparison(f"{name}: weights", WEIGHTS_MB.get(name), weights / 1e6, "MB", "see the total"),
    ]


def compare_maximum(what: str, published: PublishedValue, measured: float, unit: str) -> Comparison:
    """Return the comparison of bytes that should be at most those published; fewer bytes are not off."""
    difference = measured / float(published.value) - 1
    comparison = compare(what, published, measured, unit, TOLERANCE)
    return replace(comparison, verdict=f"less by {-100 * difference:.1f} %") if difference < -TOLERANCE else comparison


def _compare_variants(name: str, sizes: Sequence[int], batch: int, slope: float, kernels: str) -> list[Comparison]:
    """Return the bytes per pixel of a deeper network, of plain kernels, and of hybrids that keep no branch input.

    They are measured between the two smallest sizes, between which the network itself has the ``slope``.
    """
    pixels = [batch * size**2 for size in sizes]

    def slope_of(**options: Any) -> float:
        memories = _measure(build_revnext(name, **options), sizes, batch)
        return _slopes(pixels, [memory.peak_without_gradients for memory in memories])[0]

    (option, depth), *_ = DEEPER[name].items()
    deep = slope_of(**DEEPER[name])
    unit = f"bytes per pixel, {sizes[0]} to {sizes[1]} pixels"
    what = f"{name}, {option} {'-'.join(map(str, depth))}: {unit}"
    verdict = "the same" if abs(deep / slope - 1) < STRAIGHT else f"off: {slope:.4g} for the default"
    comparisons = [Comparison(what, ANY_DEPTH, deep, "B", verdict)]
    variants: dict[str, dict[str, Any]] = {name: {}}
    if name == "revnext":
        variants[f"{name}, branch inputs found again"] = {"keep_branch_input": False}
    for used in dict.fromkeys((kernels, "reference")):
        with forced(used):
            for label, options in variants.items():
                if (used, options) != (kernels, {}):  # measured already
                    label += ", plain torch kernels" if used != kernels else ""
                    measured = slope_of(**options)
                    comparisons.append(compare_maximum(f"{label}: {unit}", MEMORY[name].per_pixel, measured, "B"))
    return comparisons


def report_cifar10_errors(runs: Sequence[TrainingRun]) -> Section:
    """Return the test errors of Table 1."""
    return report_errors("table1", "Table 1: test error on CIFAR-10", ERRORS, runs)


def report_time() -> Section:
    """Return Table 2, which needs the paper's GPU."""
    section = Section("table2", "Table 2: time to 93.3 %", "Training time to that accuracy on CIFAR-10.")
    command = command_of("revnext_cifar10")
    section.comparisons = [
        not_run("GTX 750 with 1 GB", GTX750_MINUTES, "minutes", command),
        not_run("GTX 1080Ti, of which no text that we have tells the time", None, "minutes", command),
    ]
    return section
