"""Loaders leave no trace: not in random generators, not in worker processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.sample_images import small_experiment
from zoo.data.loader import Loader, LoaderOptions, build_train_loader, build_val_loader
from zoo.data.sampler import TrainBatches, ValBatches
from zoo.data.transforms.classification import ValTransform
from zoo.errors import DataError

# torch warns about more workers than cores
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def _train_loader(data: Path, workers: int = 0, seed: int = 0) -> Loader[TrainBatches]:
    config = small_experiment(color_jitter_train=True, lighting_train=True).model_copy(update={"seed": seed})
    return build_train_loader(data, config, LoaderOptions(workers=workers))


def _val_loader(data: Path, workers: int = 0) -> Loader[ValBatches]:
    return build_val_loader(data, ValTransform(-1, 8, [0.5] * 3, [0.5] * 3), 2, LoaderOptions(workers=workers))


def _pixels(loader: Any) -> list[torch.Tensor]:
    return [batch.on(torch.device("cpu")) for batch in loader]


def test_epoch_after_interrupted_one_is_complete(originals: Path) -> None:
    expected = _pixels(_train_loader(originals / "folder"))
    assert [len(images) for images in expected] == [4, 4, 4, 4, 5]
    loader = _train_loader(originals / "folder", workers=2)
    for _ in loader:
        break
    found = _pixels(loader)
    assert len(found) == 5
    assert all(map(torch.equal, found, expected))


def test_seed_of_experiment_decides_order_and_augmentation(originals: Path) -> None:
    loaders = [_train_loader(originals / "folder", seed=seed) for seed in (0, 0, 1)]
    first, again, other = (list(loader.batch_sampler) for loader in loaders)
    assert first == again != other
    first, again, other = (loader.dataset[0, 0].drawn.pixels for loader in loaders)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("workers", [0, 2])
def test_global_generators_stay_unchanged(originals: Path, workers: int) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for load in (_train_loader, _val_loader):
        list(load(originals / "folder", workers=workers))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


def test_workers_end_with_loader_after_fault(folder: Path) -> None:
    (folder / "val/bee/002.png").write_bytes(b"")
    before = set(multiprocessing.active_children())
    loader = _val_loader(folder, workers=2)
    gc.disable()
    try:
        with suppress(DataError):
            list(loader)
        assert len(set(multiprocessing.active_children()) - before) == 2
        del loader
        assert not set(multiprocessing.active_children()) - before
    finally:
        gc.enable()


def test_class_may_be_missing_from_validation(folder: Path) -> None:
    (folder / "val/aa").mkdir()
    assert torch.cat([batch.targets for batch in _val_loader(folder)]).unique().tolist() == [1, 2, 3]


def test_workers_ignore_signals_to_process_group(originals: Path) -> None:
    loader = iter(_val_loader(originals / "folder", workers=2))
    for _ in range(2):  # one batch of each worker: now both have begun
        next(loader)
    groups = {os.getpgid(worker.pid) for worker in multiprocessing.active_children()}
    assert len(groups) >= 2
    assert os.getpgid(0) not in groups
