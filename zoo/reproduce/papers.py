"""The papers and their measured tables and figures, in the order of the reports.

Tested by tests/cli/test_reproduce_papers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from zoo.reproduce import (
    inplace_abn_figures1and2,
    inplace_abn_scores,
    revnet_figure4,
    revnet_table1,
    revnet_tables2to5,
    revnext_figure12,
    revnext_tables1and2,
)
from zoo.reproduce.comparison import Section
from zoo.reproduce.inplace_abn_table2 import measure_memory_gains
from zoo.reproduce.inplace_abn_timing import measure_overheads
from zoo.reproduce.revnext_figures5and6 import measure_norm_law, measure_slope_law
from zoo.reproduce.revnext_figures10and11 import measure_depths, measure_layers


@dataclass(frozen=True)
class Paper:
    """A paper that `zoo reproduce` measures.

    Args:
    - `title`: the heading of its report.
    - `url`: the address of the paper.
    - `minutes`: duration of all its measurements on one core of the machine of docs/results.
    - `experiments`: names of the experiments whose training runs belong to its tables, see `load_changed`.
    - `measurements`: returns the measurements of its tables and figures, in the paper's order, given the training runs
      of its experiments (--runs), and the rows of imagenet.json in the folder of the reports.
    """

    title: str
    url: str
    minutes: int
    experiments: Sequence[str]
    measurements: Callable[..., list[Measurement]]


class Measurement(NamedTuple):
    """The measurement of a table or figure, or of a part of it.

    Args:
    - `item`: its name in the paper, such as "Table 1".
    - `measure`: returns the section of the report.
    """

    item: str
    measure: Callable[[], Section]


PAPERS = {
    "inplace_abn": Paper(
        "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs (Rota Bulo et al. 2018)",
        "https://arxiv.org/abs/1712.02616",
        8,
        (),
        lambda runs=(), scores=(): [
            Measurement("Abstract", inplace_abn_figures1and2.count_network_memory),
            Measurement("Figure 1", inplace_abn_figures1and2.count_block_buffers),
            Measurement("Figure 2", inplace_abn_figures1and2.count_stored_tensors),
            Measurement("Section 4.1", inplace_abn_figures1and2.measure_batches),
            Measurement("Table 1", partial(inplace_abn_scores.report_imagenet_scores, scores)),
            Measurement("Section 4.3", measure_overheads),
            Measurement("Table 2", inplace_abn_scores.report_segmentation_scores),
            Measurement("Table 2", measure_memory_gains),
            Measurement("README", partial(inplace_abn_scores.report_readme_scores, scores)),
        ],
    ),
    "revnet": Paper(
        "The Reversible Residual Network (Gomez et al. 2017)",
        "https://arxiv.org/abs/1707.04585",
        2,
        (
            *revnet_tables2to5.CIFAR_ERRORS,
            *revnet_tables2to5.IMAGENET_ERRORS,
            *revnet_tables2to5.SHORT_EXPERIMENTS,
            revnet_figure4.LONG_CIFAR_EXPERIMENT,
        ),
        lambda runs=(), scores=(): [
            Measurement("Section 3.2", revnet_table1.measure_operations),
            Measurement("Table 1", revnet_table1.measure_complexity),
            Measurement("Section 4", revnet_table1.measure_layer_costs),
            Measurement("Section 5.1", revnet_table1.measure_passes),
            Measurement("Table 2", revnet_tables2to5.measure_parameters),
            Measurement("Table 3", partial(revnet_tables2to5.report_cifar_errors, runs)),
            Measurement("Table 4", partial(revnet_tables2to5.report_imagenet_errors, runs)),
            Measurement("Section 5.2", partial(revnet_tables2to5.report_differences, runs)),
            Measurement("Section 5.2", revnet_table1.measure_update_cost),
            Measurement("Table 5", revnet_tables2to5.measure_imagenet_memory),
            Measurement("Figure 4", partial(revnet_figure4.report_reconstruction, runs)),
            Measurement("Section 7.2", revnet_tables2to5.measure_fits),
        ],
    ),
    # EURASIP Journal on Image and Video Processing 2023:1
    "revnext": Paper(
        "Reversible designs for extreme memory cost reduction of CNN training (Hascoet et al. 2023)",
        "https://doi.org/10.1186/s13640-022-00601-w",
        41,
        (
            revnext_tables1and2.EXPERIMENT,
            *revnext_tables1and2.OTHER_EXPERIMENTS,
            *revnext_figure12.SHORT_EXPERIMENTS,
            *revnext_figure12.EXPERIMENTS.values(),
        ),
        lambda runs=(), scores=(): [
            Measurement("Section 1", revnext_tables1and2.count_whole_data_sets),
            Measurement("Table 1", revnext_tables1and2.measure_pixels),
            Measurement("Figure 5", measure_norm_law),
            Measurement("Figure 6", measure_slope_law),
            Measurement("Figure 10", measure_layers),
            Measurement("Figure 11", measure_depths),
            Measurement("Figure 12", partial(revnext_figure12.report_reconstruction, runs)),
            Measurement("Table 1", partial(revnext_tables1and2.report_cifar10_errors, runs)),
            Measurement("Table 2", revnext_tables1and2.report_gpu),
        ],
    ),
}
