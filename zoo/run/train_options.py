"""Options of a training run, in addition to the settings of its experiment.

Tested by tests/cli/test_options.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainOptions:
    """Execution of a training run. The fields are options of ``zoo train`` and arguments of `zoo.train`."""

    workers: int = 0
    """Worker processes that read images, per process of the run; 0 reads them in the process itself."""
    log_every: int = 10
    """Batches between two log lines."""
    resume: str | None = None
    """Checkpoint to continue from; 'auto' takes the newest good one of the log folder, if there is one."""
    weights: str | None = None
    """Weights file to start from instead of random weights. A segmentation network takes a classifier's weights into
    its body."""
