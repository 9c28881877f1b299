"""The sections of `zoo reproduce revnext`: Hascoet et al., EURASIP Journal on Image and Video Processing 2023:1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from zoo.reproduce.accuracy import report_errors
from zoo.reproduce.chains import measure_depths, measure_layers
from zoo.reproduce.laws import measure_norm_law, measure_slope_law
from zoo.reproduce.pixel import measure_pixels
from zoo.reproduce.reconstruction import SHORT, report_reconstruction
from zoo.reproduce.runs import Run, command_of
from zoo.reproduce.schema import Published, Section, not_run

# Test error in percent on CIFAR-10; None: that part of the table is in no text that we have.  The network that the
# printed 93.3 % belongs to has depths and pools that the paper does not print: that it is ours is a guess.
TABLE1 = {
    "revnext_resnet18_cifar10": None, "revnext_revnet_cifar10": None, "irevnet_revnext_cifar10": None,
    "revnext_flat_cifar10": None, "revnext_cifar10": Published(6.7, "derived", "abstract: 93.3 %"),
}  # fmt: skip
EXPERIMENTS = (*TABLE1, *SHORT)
GTX750 = Published(67, "printed", "abstract")


def revnext_sections(runs: Sequence[Run]) -> list[Callable[[], Section]]:
    """Return the functions that measure the sections, in the paper's order."""
    return [
        measure_pixels,
        measure_norm_law,
        measure_slope_law,
        measure_layers,
        measure_depths,
        partial(report_reconstruction, runs),
        partial(report_errors, "table1", "Table 1: test error on CIFAR-10", TABLE1, runs),
        report_time,
    ]


def report_time() -> Section:
    """Return Table 2, which needs the paper's GPU."""
    section = Section("table2", "Table 2: time to 93.3 %", "Training time to that accuracy on CIFAR-10.")
    section.figures = [
        not_run("GTX 750 with 1 GB", GTX750, "minutes", command_of("revnext_cifar10")),
        not_run(
            "GTX 1080Ti, of which no text that we have tells the time", None, "minutes", command_of("revnext_cifar10")
        ),
    ]
    return section
