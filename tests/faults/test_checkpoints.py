"""A malformed checkpoint raises one clear error, never a traceback, and never starts a wrong run."""

from __future__ import annotations

import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.tiny import build_net, make_config, save, this_process
from tests.refusals import refused
from zoo.engine.checkpoint import CHECKPOINT, read
from zoo.engine.process import Process
from zoo.engine.start import start
from zoo.engine.state import build_state
from zoo.engine.step import StepBatch, train_step
from zoo.errors import CheckpointError
from zoo.tasks import task_of

MISSING = object()
WEIGHT = torch.zeros(8, 3, 3, 3)  # has the shape of the network's first parameter


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint after one step."""
    config = make_config()
    state = build_state(task_of(config), build_net(config.network), Process())
    train_step(state, StepBatch(torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 0, 1]), 4))
    path = tmp_path_factory.mktemp("log")
    save(state, path)
    return path


def _nested(depth: int) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for _ in range(depth):
        tree = {"a": tree}
    return tree


def _recursive() -> dict[str, Any]:
    tree: dict[str, Any] = {}
    tree["network"] = tree
    return tree


ODD: list[tuple[str, Any]] = [
    *[
        (key, value)
        for key in ("optimizer", "ranks", "position", "config", "state_dict", "world_size")
        for value in (MISSING, None, 3, "x", [], [1], {}, {"a": 1}, torch.zeros(2))
        if (key, value) != ("position", MISSING)  # is no checkpoint
    ],
    *[(key, MISSING) for key in ("scaler", "num_threads", "device", "torch_version", "best_prec1")],
    *[("ema", value) for value in (None, 3, "x", [], {}, {"a": 1}, torch.zeros(2))],
    *[("eval_modules", value) for value in (MISSING, None, 3, "x", [1], ["none"])],
    *[("ranking", value) for value in (MISSING, None, 3, "x", [1], [["x", 1]])],
    *[("images", value) for value in (MISSING, None, 3, "x", [1], {"train": 3})],
    *[("best_prec1", value) for value in ("x", None)],
    *[(f"position.{key}", value) for key in ("epoch", "batch", "step") for value in (MISSING, "x", None)],
    *[("ranks.rng", value) for value in (MISSING, None, {}, {"torch": 1, "python": 1, "device": None})],
    *[("ranks.meter", value) for value in (MISSING, None, {}, {"loss": "x", "counts": 1})],
    ("config", _recursive()),
    ("config", _nested(600)),
    *[("optimizer.param_groups.params", value) for value in (MISSING, [])],
    *[(f"{network}.0.weight", value) for network in ("state_dict", "ema") for value in ("x", WEIGHT[0])],
]


@pytest.mark.parametrize(("key", "value"), ODD, ids=lambda item: "missing" if item is MISSING else str(item)[:20])
def test_malformed_content_error_names_file(
    folder: Path, key: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = read(folder / CHECKPOINT)
    parent, _, child = key.partition(".")
    target = content
    if not child:
        child = parent
    elif parent == "ranks":
        target = content["ranks"][0]
    elif parent == "optimizer":
        of, _, child = child.partition(".")
        target = content["optimizer"][of][0]
    else:
        target = content[parent]
    if value is MISSING:
        del target[child]
    else:
        target[child] = value
    monkeypatch.setattr("zoo.engine.checkpoint.read", lambda path: content)
    resume = partial(start, task_of(make_config()), this_process(), folder, resume="auto", build=build_net)
    assert len(refused(CheckpointError, resume, CHECKPOINT)) < 2000


def test_zip_bomb_raises_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / CHECKPOINT
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("checkpoint/data.pkl", bytes(10**7))
    refused(CheckpointError, lambda: read(path), "Oversized", "checkpoint/data.pkl")


@pytest.mark.parametrize(
    "value", ["x" * 10**6, 10**500, _nested(100), torch.zeros(3), torch.ones(1), 2, True, None], ids=range(8)
)
def test_unknown_format_raises_short_message(tmp_path: Path, value: Any) -> None:
    path = tmp_path / CHECKPOINT
    torch.save({"position": {}, "format_version": value}, path)
    assert len(refused(CheckpointError, lambda: read(path), f"{path}: ", "reads 1;")) < 1000
