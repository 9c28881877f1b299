"""The papers whose tables and figures are measured, and the order of these in their reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from zoo.reproduce import inplace_abn_scores, revnet_tables2to5, revnext_figure12, revnext_tables1and2
from zoo.reproduce.comparison import Section
from zoo.reproduce.inplace_abn_table2 import measure_memory_gains
from zoo.reproduce.revnet_figure4 import measure_angles, open_images
from zoo.reproduce.revnet_table1 import measure_depth
from zoo.reproduce.revnext_costs import measure_passes, measure_widths
from zoo.reproduce.revnext_figures5and6 import measure_norm_law, measure_slope_law
from zoo.reproduce.revnext_figures10and11 import measure_depths, measure_layers
from zoo.reproduce.training_runs import TrainingRun

ImageSet = Literal["ImageNet", "CIFAR-10"]


@dataclass(frozen=True)
class Paper:
    """A paper, as `zoo reproduce` knows it.

    Args:
    - `title`: the heading of its report.
    - `experiments`: stems of the experiment files whose training runs belong to its tables.
    - `images`: the data set that --data gives its measurements; None if none of them needs images.
    - `measurements`: returns what measures its tables and figures, in the paper's order; DataError for unusable images.
    """

    title: str
    experiments: Sequence[str]
    images: ImageSet | None
    measurements: Callable[[Inputs], list[Measurement]]


class Inputs(NamedTuple):
    """What the measurements of a paper are given besides the package.

    Args:
    - `runs`: the training runs (--runs) of the paper's experiments.
    - `data`: the folder of CIFAR-10 (--data); None without one.
    - `scores`: the rows of the report of `zoo reproduce imagenet` in the folder of the reports, as its JSON file has
      them; none without such a report.
    """

    runs: Sequence[TrainingRun] = ()
    data: Path | None = None
    scores: Sequence[Mapping[str, Any]] = ()


class Measurement(NamedTuple):
    """What measures a table or figure, or a part of it.

    Args:
    - `item`: the word and the number in the paper, such as "Table 1".
    - `measure`: returns the section of the report.
    """

    item: str
    measure: Callable[[], Section]


PAPERS = {
    "inplace_abn": Paper(
        "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs (Rota Bulo et al. 2018), measured again",
        (),
        "ImageNet",
        lambda _: [Measurement("Table 2", measure_memory_gains)],
        None,
        lambda inputs: [
            Measurement("Section 1", revnext_tables1and2.count_whole_data_sets),
            Measurement("Table 1", revnext_tables1and2.measure_pixels),
            Measurement("Section 3.5", measure_widths),
            Measurement("Section 4.4", measure_passes),
            Measurement("Figure 5", measure_norm_law),
            Measurement("Figure 6", measure_slope_law),
            Measurement("Figure 10", measure_layers),
            Measurement("Figure 11", measure_depths),
            Measurement("Figure 12", partial(revnext_figure12.report_reconstruction, inputs.runs)),
            Measurement("Table 1", partial(revnext_tables1and2.report_cifar10_errors, inputs.runs)),
            Measurement("Table 2", revnext_tables1and2.report_gpu),
        ],
    ),
}
