"""The papers whose tables and figures are measured, and the order of these in their reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from zoo.reproduce import revnet_tables2to5, revnext_figure12, revnext_tables1and2
from zoo.reproduce.comparison import Section
from zoo.reproduce.revnet_figure4 import measure_angles, open_images
from zoo.reproduce.revnet_table1 import measure_depth
from zoo.reproduce.revnext_figures5and6 import measure_norm_law, measure_slope_law
from zoo.reproduce.revnext_figures10and11 import measure_depths, measure_layers
from zoo.reproduce.training_runs import TrainingRun


@dataclass(frozen=True)
class Paper:
    """A paper, as `zoo reproduce` knows it.

    Args:
    - `title`: the heading of its report.
    - `experiments`: stems of the experiment files whose training runs belong to its tables.
    - `measurements`: returns the functions that measure its tables and figures, in the paper's order. It is given the
      training runs and the folder of images (--data), or None without one; DataError for unusable images.
    """

    title: str
    experiments: Sequence[str]
    measurements: Callable[[Sequence[TrainingRun], Path | None], list[Callable[[], Section]]]


PAPERS = {
    "revnet": Paper(
        "The Reversible Residual Network (Gomez et al. 2017), measured again",
        (*revnet_tables2to5.CIFAR_ERRORS, *revnet_tables2to5.IMAGENET_ERRORS, *revnet_tables2to5.SHORT),
        lambda runs, data: [
            measure_depth,
            revnet_tables2to5.measure_parameters,
            partial(revnet_tables2to5.report_cifar_errors, runs),
            partial(revnet_tables2to5.report_imagenet_errors, runs),
            revnet_tables2to5.measure_imagenet_memory,
            partial(measure_angles, None if data is None else open_images(data)),
        ],
    ),
    # EURASIP Journal on Image and Video Processing 2023:1
    "revnext": Paper(
        "Reversible designs for extreme memory cost reduction of CNN training (Hascoet et al. 2023), measured again",
        (*revnext_tables1and2.ERRORS, *revnext_figure12.SHORT),
        lambda runs, _: [
            revnext_tables1and2.measure_pixels,
            measure_norm_law,
            measure_slope_law,
            measure_layers,
            measure_depths,
            partial(revnext_figure12.report_reconstruction, runs),
            partial(revnext_tables1and2.report_cifar10_errors, runs),
            revnext_tables1and2.report_time,
        ],
    ),
}
