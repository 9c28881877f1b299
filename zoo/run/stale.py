"""Which results are older than the code that they measure."""

from __future__ import annotations

from collections.abc import Mapping

from zoo.run.history import commit_dates, has_changed

KERNELS = ("csrc", "zoo/ops")
# Captured graphs are measured by zoo benchmark lean alone.
OF_GRAPHS = ("autocast", "capture", "cudnn_norm", "cut", "joint_graph", "layouts", "nodes")
LEAN = ("zoo/remat", *(f":(exclude)zoo/remat/{name}.py" for name in OF_GRAPHS))
NETWORKS = (*KERNELS, "zoo/layers", "zoo/models", *LEAN)
TRAINING = (*NETWORKS, "zoo/data", "zoo/engine", "zoo/tasks")
# The code that is measured, by the kind of result ("benchmark" in its file) or of evidence (of a published number).
MEASURED_CODE: Mapping[str, tuple[str, ...]] = {
    "layer": ("csrc", "zoo/ops/abn", "zoo/layers/norm.py"),
    "model": NETWORKS,
    "pareto": NETWORKS,
    "max-batch": NETWORKS,
    "lean": ("zoo/remat",),
    "input": ("zoo/data",),
    "quickstart": TRAINING,
    "runs": TRAINING,
    "setting": ("experiments",),
    "identity": (),
    "count": ("zoo/layers", "zoo/models"),
    "parameters": ("zoo/layers", "zoo/models"),
    "memory predicted": NETWORKS,
    "memory measured": NETWORKS,
    "time measured": NETWORKS,
    "signal-to-noise measured": ("zoo/ops", "zoo/layers", "zoo/models"),
    "accuracy scored": TRAINING,
    "accuracy trained": TRAINING,
}


def is_stale(kind: str, commit: str) -> bool:
    """Return True if the code that a kind of result measures has changed since the ``commit`` of a result.

    Several commits are separated by ", ". False if the history of the checkout is not known.
    """
    known = commit_dates()
    return any(each in known and has_changed(each, MEASURED_CODE[kind]) for each in commit.split(", "))
