"""The papers, and the modules that measure their tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Modules with functions decorated with `measures`.
from zoo.reproduce import (
    inplace_abn_figures1and2,  # noqa: F401
    inplace_abn_scores,  # noqa: F401
    inplace_abn_table2,  # noqa: F401
    inplace_abn_timing,  # noqa: F401
    revnet_figure4,
    revnet_table1,  # noqa: F401
    revnet_tables2to5,
    revnext_figure12,
    revnext_figures5and6,  # noqa: F401
    revnext_figures10and11,  # noqa: F401
    revnext_sections3and4,  # noqa: F401
    revnext_tables1and2,
)


@dataclass(frozen=True)
class Paper:
    """A paper that `zoo reproduce` measures.

    Args:
    - `title`: the heading of its report.
    - `url`: the address of the paper.
    - `experiments`: names of the experiments whose training runs belong to its tables, see `load_changed`.
    """

    title: str
    url: str
    experiments: Sequence[str] = ()


PAPERS = {
    "inplace_abn": Paper(
        "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs (Rota Bulo et al. 2018)",
        "https://arxiv.org/abs/1712.02616",
    ),
    "revnet": Paper(
        "The Reversible Residual Network (Gomez et al. 2017)",
        "https://arxiv.org/abs/1707.04585",
        (
            *revnet_tables2to5.CIFAR_ERRORS,
            *revnet_tables2to5.IMAGENET_ERRORS,
            *revnet_tables2to5.SHORT_EXPERIMENTS,
            revnet_figure4.LONG_CIFAR_EXPERIMENT,
        ),
    ),
    # EURASIP Journal on Image and Video Processing 2023:1
    "revnext": Paper(
        "Reversible designs for extreme memory cost reduction of CNN training (Hascoet et al. 2023)",
        "https://doi.org/10.1186/s13640-022-00601-w",
        (
            revnext_tables1and2.EXPERIMENT,
            *revnext_tables1and2.OTHER_EXPERIMENTS,
            *revnext_figure12.SHORT_EXPERIMENTS,
            *revnext_figure12.EXPERIMENTS.values(),
        ),
    ),
}
