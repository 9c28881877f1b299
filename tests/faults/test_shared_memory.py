"""Data workers whose shared memory is too small end the run with one line."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import TensorDataset

from tests.data.sample_images import make_splits, small_experiment
from tests.data.sample_labels import experiment, make_labeled
from tests.refusals import refused
from zoo.data.dataset import Batch, collate
from zoo.data.loader import Loader, LoaderOptions, build_train_loader, build_val_loader
from zoo.data.map_dataset import Datasets
from zoo.data.segmentation.loader import build_segmentation_train_loader, build_segmentation_val_loader
from zoo.data.transforms.classification import ValTransform
from zoo.errors import DataError

Load = Callable[[str], Loader[Any]]

WORKER = LoaderOptions(workers=1)
KINDS = ["train", "val", "ten crops", "tensors", "segmentation train", "segmentation val"]
SIDE = 160  # px; an image has 77 kB, or four times as many in float32
MOUNT = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
TIMEOUT_S = 120  # torch's own error takes as long as starting a worker; without an error the trainer waits for ever


def _loader(kind: str, folder: Path) -> Loader[Any]:
    """Return a loader with one worker, over images in ``folder``."""
    if kind.startswith("segmentation"):
        data = make_labeled(folder, 3, 3)
        build = build_segmentation_train_loader if kind.endswith("train") else build_segmentation_val_loader
        return build(data, experiment(crop=SIDE, longest_side_val=SIDE), WORKER)
    settings = small_experiment(crop_train=SIDE, color_jitter_train=True, lighting_train=True)
    if kind == "tensors":
        images = TensorDataset(torch.zeros(8, 3, SIDE, SIDE), torch.zeros(8, dtype=torch.int64))
        return build_train_loader(Datasets(images), settings, WORKER)
    data = make_splits(folder)
    if kind == "train":
        return build_train_loader(data, settings, WORKER)
    return build_val_loader(data, ValTransform(SIDE, SIDE, [0.5] * 3, [0.5] * 3, kind == "ten crops"), 2, WORKER)


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    """Return `_loader` for images in a temporary folder. Ends the workers, for which torch would wait five seconds."""
    loaders: list[Loader[Any]] = []

    def build(kind: str) -> Loader[Any]:
        loaders.append(_loader(kind, tmp_path))
        return loaders[-1]

    yield build
    for loader in loaders:
        loader.stop_workers()


def _read_all(kind: str, folder: str) -> None:
    """Print the DataError that ends the iteration over a loader."""
    try:
        list(_loader(kind, Path(folder)))
    except DataError as error:
        print(error)


def _in_small_memory(code: str) -> list[str]:
    command = ["unshare", "-m", "sh", "-c", f'{MOUNT} && exec "$@"', "sh", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return done.stdout.splitlines()


def _can_mount() -> bool:
    command = ["unshare", "-m", "sh", "-c", MOUNT]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.dist
@pytest.mark.parametrize("kind", KINDS)
def test_batch_beyond_shared_memory_raises(tmp_path: Path, kind: str) -> None:
    if not _can_mount():
        pytest.skip("mounting needs privileges")
    code = f"from tests.faults.test_shared_memory import _read_all; _read_all({kind!r}, {str(tmp_path)!r})"
    (line,) = _in_small_memory(code)
    for part in ("No space left on device", "/dev/shm has 0.1 MB", "--workers"):
        assert part in line


def _collate_shared(samples: Any) -> Batch | DataError:
    """Collate as usual, but replace the paths by flags: whether each tensor is in shared memory."""
    batch = collate(samples)
    assert isinstance(batch, Batch)
    tensors = [tensor for tensor in (batch.images, batch.targets, batch.colors) if tensor is not None]
    return batch._replace(paths=[str(tensor.is_shared()) for tensor in tensors])


@pytest.mark.parametrize("kind", KINDS)
def test_worker_stacks_batch_in_shared_memory(load: Load, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """An error of the allocation is then one of the worker's own code, and not of a thread of its queue."""
    monkeypatch.setattr("zoo.data.loader.collate", _collate_shared)
    batch = next(iter(load(kind)))
    assert set(batch.paths) == {"True"}


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("unable to allocate shared memory(shm) for file </torch_7>: No space left on device (28)", "/dev/shm has"),
        ("unable to open shared memory object </torch_7> in read-write mode: Too many open files (24)", "ulimit -n"),
        ("unable to write to file of shared memory: Cannot allocate memory (12)", "/dev/shm has"),
    ],
)
def test_worker_without_shared_memory_names_remedy(
    load: Load, monkeypatch: pytest.MonkeyPatch, reason: str, advice: str
) -> None:
    monkeypatch.setattr("zoo.data.dataset.default_collate", Mock(side_effect=RuntimeError(reason)))
    assert "\n" not in refused(DataError, lambda: next(iter(load("train"))), advice, "--workers")


@pytest.mark.parametrize("reason", ["Too many open files. Communication is impossible", "received 0 items of ancdata"])
def test_limit_of_open_files_names_remedy(load: Load, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    loader = load("train")

    def fail(self: Any) -> Any:
        yield next(batches)
        raise RuntimeError(reason)

    batches = iter(loader)
    monkeypatch.setattr("torch.utils.data.DataLoader.__iter__", fail)
    refused(DataError, lambda: list(loader), "ulimit -n")


def test_failed_start_of_workers_names_remedy(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    no_semaphore = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("torch.utils.data.DataLoader.__iter__", no_semaphore)
    refused(DataError, lambda: iter(load("train")), "/dev/shm has")
