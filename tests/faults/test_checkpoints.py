"""A checkpoint by its format that holds something else is one clear error, never a traceback or a wrong run."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.tiny import MemoryLog, build_net, make_config, this_process
from zoo.engine.checkpoint import CHECKPOINT, read, save, write
from zoo.engine.process import Process
from zoo.engine.start import start
from zoo.engine.state import build_state
from zoo.engine.step import StepBatch, train_step
from zoo.errors import CheckpointError

MISSING = object()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint after one step."""
    config = make_config()
    state = build_state(config, build_net(config.network), Process())
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
        for key in ("optimizer", "ranks", "position", "scaler", "config", "state_dict", "world_size")
        for value in (MISSING, None, 3, "x", [], [1], {}, {"a": 1}, torch.zeros(2))
        if (key, value) not in (("position", MISSING), ("scaler", {}))  # is no checkpoint; has no scaler
    ],
    *[(key, value) for key in ("num_threads", "device", "torch_version", "best_prec1") for value in (MISSING,)],
    *[("ema", value) for value in (None, 3, "x", [], {}, {"a": 1}, torch.zeros(2))],
    *[("best_prec1", value) for value in ("x", None, -1.0, 101.0, float("nan"), True)],
    *[("best_epoch", value) for value in ("x", -1, 1.5)],
    *[
        (f"position.{key}", value)
        for key in ("epoch", "batch", "step", "num_pictures")
        for value in (MISSING, -1, 1.0, "x", None, True)
    ],
    *[("ranks.rng", value) for value in (MISSING, None, {}, {"torch": 1, "python": 1, "device": None})],
    *[("ranks.meter", value) for value in (MISSING, None, {}, {"loss": "x", "counts": 1})],
    ("config", _recursive()),
    ("config", _nested(600)),
    ("optimizer.momentum", torch.zeros(3)),
]


@pytest.mark.parametrize(("key", "value"), ODD, ids=lambda item: "missing" if item is MISSING else str(item)[:20])
def test_odd_content_is_a_checkpoint_error_that_names_the_file(
    folder: Path, key: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = read(folder / CHECKPOINT)
    parent, _, child = key.rpartition(".")
    target = content
    if parent == "ranks":
        target = content["ranks"][0]
    elif parent == "position":
        target = content["position"]
    elif parent == "optimizer":
        target, child = content["optimizer"]["state"][0], "momentum_buffer"
    if value is MISSING:
        del target[child]
    else:
        target[child] = value
    monkeypatch.setattr("zoo.engine.checkpoint.read", lambda path: content)
    with pytest.raises(CheckpointError, match=CHECKPOINT) as error:
        start(make_config(), this_process(), folder, MemoryLog(), resume="auto", build=build_net)
    assert len(str(error.value)) < 2000


def test_a_message_about_other_settings_is_cut_to_a_length_that_somebody_reads(folder: Path, tmp_path: Path) -> None:
    content = read(folder / CHECKPOINT)
    content["config"] |= {f"key{index}\x1b[31m": index for index in range(5000)}
    write(content, tmp_path, is_best=False)
    with pytest.raises(CheckpointError, match="and 4,990 more") as error:
        start(make_config(), this_process(), tmp_path, MemoryLog(), resume="auto", build=build_net)
    assert "\x1b" not in str(error.value)


def test_a_small_file_that_unpacks_to_gigabytes_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / CHECKPOINT
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("checkpoint/data.pkl", bytes(10**7))
    with pytest.raises(CheckpointError, match=r"damaged \(Oversized: its entry checkpoint/data.pkl is compressed"):
        read(path)
