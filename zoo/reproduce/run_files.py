"""The files of the training runs in a reproduction: their curves as NAME_runs.json, drawn in NAME_runs.png."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from zoo.files import write_bytes, write_json
from zoo.report.environment import describe_environment
from zoo.reproduce.plot import draw
from zoo.reproduce.runs import Run
from zoo.reproduce.schema import Panel, Section

COLUMNS = 2  # accuracy and loss, a row for each group


def write_runs(folder: Path, name: str, command: str, runs: Sequence[Run]) -> None:
    """Write the curves of all ``runs``, which may then be given in place of their log folders."""
    content = {
        "benchmark": f"{name} runs",
        "command": command,
        "environment": describe_environment(torch.device("cpu")),
        "runs": [
            run.curves.to_json(f"{run.experiment}{', stored' * run.is_stored}")
            for run in runs
            if run.curves is not None
        ],
    }
    write_json(folder / f"{name}_runs.json", content)


def draw_runs(folder: Path, name: str, runs: Sequence[Run]) -> None:
    """Write the plot of ``runs``, of which there is at least one; it needs matplotlib."""
    title = f"Training runs given to zoo reproduce {name}"
    section = Section("runs", title, "", panels=[panel for group in groups_of(runs) for panel in _panels(group)])
    write_bytes(folder / f"{name}_runs.png", draw(section, COLUMNS))


def groups_of(runs: Sequence[Run]) -> list[list[Run]]:
    """Return the runs in groups that can be compared: trained in the same way, whatever the network and the seed."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.curves is not None:
            settings = run.curves.config.model_dump(mode="json", include={"optimizer", "input"})
            groups.setdefault(json.dumps(settings, sort_keys=True), []).append(run)
    return list(groups.values())


def _panels(runs: Sequence[Run]) -> list[Panel]:
    """Return the panels of top-1 and of the training loss over the epochs; the latter without values nobody logged."""
    top1, losses = [], []
    archs: dict[str, None] = {}
    for run in runs:
        assert run.curves is not None
        archs[run.curves.config.network.arch] = None
        logged = [epoch for epoch in run.curves.epochs if epoch.get("train_loss") is not None]
        top1.append(run.line([epoch["epoch"] for epoch in run.curves.epochs], run.top1, run.stop_reason))
        if logged:
            losses.append(run.line([e["epoch"] for e in logged], [float(e["train_loss"]) for e in logged]))
    title = ", ".join(archs)
    panels = [Panel(title, "epoch", "top-1 on the validation images, %", top1)]
    return panels + [Panel(title, "epoch", "training loss, mean of the epoch", losses)] * bool(losses)
