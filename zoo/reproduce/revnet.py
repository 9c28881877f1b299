"""The sections of `zoo reproduce revnet`: Gomez et al., The Reversible Residual Network, 2017."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from zoo.reproduce.accuracy import CIFAR, IMAGENET, report_errors
from zoo.reproduce.angles import measure_angles, open_images
from zoo.reproduce.depth import measure_depth
from zoo.reproduce.memory import measure_imagenet
from zoo.reproduce.parameters import measure_parameters
from zoo.reproduce.runs import Run
from zoo.reproduce.schema import Section

SHORT = ("resnet32_cifar10_short", "revnet38_cifar10_short")
EXPERIMENTS = (*CIFAR, *IMAGENET, *SHORT)


def revnet_sections(runs: Sequence[Run], data: Path | None) -> list[Callable[[], Section]]:
    """Return the functions that measure the sections, in the paper's order; DataError for unusable ``data``."""
    images = None if data is None else open_images(data)
    return [
        measure_depth,
        measure_parameters,
        partial(report_errors, "table3", "Table 3: test error on CIFAR", CIFAR, runs, SHORT),
        partial(report_errors, "table4", "Table 4: test error on ImageNet", IMAGENET, runs),
        measure_imagenet,
        partial(measure_angles, images),
    ]
