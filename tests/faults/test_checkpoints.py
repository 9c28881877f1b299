"""A malformed checkpoint raises one clear error, never a traceback, and never starts a wrong run."""

from __future__ import annotations

import pickle
import shutil
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.tiny import build_net, make_config, new_state, save, this_process
from tests.refusals import refused
from zoo.engine._checkpoint import BEST, CHECKPOINT, read
from zoo.engine._start import start
from zoo.engine._step import StepBatch, train_step
from zoo.errors import CheckpointError
from zoo.tasks import task_of

MISSING = object()
WEIGHT = torch.zeros(8, 3, 3, 3)  # has the shape of the network's first parameter


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint after one step."""
    state = new_state()
    train_step(state, StepBatch(torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 0, 1]), 4))
    path = tmp_path_factory.mktemp("log")
    save(state, path, is_best=True)
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
    monkeypatch.setattr("zoo.engine._checkpoint.read", lambda path: content)
    resume = partial(start, task_of(make_config()), this_process(), folder, resume="auto", build=build_net)
    assert len(refused(CheckpointError, resume, CHECKPOINT)) < 2000


class _RunsCode:
    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (Path("trace"),)


ORIGINAL = {"epoch": 3, "arch": "resnet101", "state_dict": {}, "best_prec1": 75.0, "optimizer": {}}
UNKNOWN_FORMATS = ("x" * 10**6, 10**500, _nested(100), torch.zeros(3), torch.ones(1), 2, True, None)


def _truncate(path: Path, fraction: float) -> None:
    path.write_bytes(path.read_bytes()[: int(fraction * path.stat().st_size)])


def _flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(read(path)["state_dict"]["0.weight"].numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)
    assert torch.load(path, weights_only=True)["position"]["step"] == 1  # torch itself does not check


def _write_zip_bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("checkpoint/data.pkl", bytes(10**7))


def _save(content: dict[str, Any], zipped: bool = True) -> Callable[[Path], None]:
    return lambda path: torch.save(content, path, _use_new_zipfile_serialization=zipped)


FILES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    **{f"{part} of it": (partial(_truncate, fraction=part), ("damaged",)) for part in (0.0, 0.3, 0.999)},
    "a flipped bit in a weight": (_flip_bit, ("BadZipFile",)),
    "zip bomb": (_write_zip_bomb, ("Oversized", "checkpoint/data.pkl")),
    "code": (_save({"position": {}, "format_version": 1, "state_dict": _RunsCode()}), ()),
    "pickled code": (lambda path: path.write_bytes(pickle.dumps(_RunsCode())), ()),
    "best weights": (lambda path: path.with_name(BEST).replace(path), ("checkpoint.pth.tar",)),
    **{
        f"format {index}": (_save({"position": {}, "format_version": value}), ("reads 1;",))
        for index, value in enumerate(UNKNOWN_FORMATS)
    },
    # The original trainer writes all four keys, and the trainers of other packages others.
    **{
        f"without {key}, zipped: {zipped}": (
            _save({name: value for name, value in ORIGINAL.items() if name != key}, zipped),
            ("--weights",),
        )
        for key in ORIGINAL
        if key != "arch"
        for zipped in (True, False)
    },
}


@pytest.mark.parametrize(("change", "names"), FILES.values(), ids=FILES)
def test_malformed_file_raises_short_message(
    change: Callable[[Path], object],
    names: tuple[str, ...],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = shutil.copytree(folder, tmp_path / "log") / CHECKPOINT
    change(path)
    assert len(refused(CheckpointError, lambda: read(path), f"{path}: ", *names)) < 1000
    assert [each.name for each in tmp_path.iterdir()] == ["log"]  # no code has run


@pytest.mark.parametrize("zipped", [True, False])
def test_file_of_original_trainer_is_read(zipped: bool, tmp_path: Path) -> None:
    _save(ORIGINAL, zipped)(tmp_path / CHECKPOINT)
    assert read(tmp_path / CHECKPOINT) == ORIGINAL
