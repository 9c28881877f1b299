"""Batches are bit-identical for any number of workers, and faults are readable."""

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
from torch import Tensor

from tests.data.sample_images import make_folder
from tests.refusals import refused
from zoo.config.experiment import Experiment
from zoo.config.parse import parse_experiment
from zoo.data.loader import Loader, LoaderOptions, build_train_loader, build_val_loader
from zoo.data.sampler import TrainBatches, ValBatches
from zoo.data.transforms.classification import ValTransform
from zoo.errors import DataError

# torch warns about more workers than cores
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

CPU = torch.device("cpu")
MEAN, STD = [0.5] * 3, [0.5] * 3


@pytest.fixture
def data(tmp_path: Path) -> Path:
    make_folder(tmp_path / "train", {"a": 8, "b": 9})
    make_folder(tmp_path / "val", {"a": 5, "b": 6})
    return tmp_path


def _experiment(**settings: object) -> Experiment:
    augment = {"crop_train": 8, "color_jitter_train": True, "lighting_train": True}
    optimizer = {"batch_size": 4, "accumulate_steps": 2}
    return parse_experiment({"network": {"classes": 2}, "optimizer": optimizer, "input": augment, **settings}, "test")


def _train_loader(data: Path, workers: int, **options: Any) -> Loader[TrainBatches]:
    return build_train_loader(data, _experiment(), LoaderOptions(workers=workers, **options))


def _val_loader(data: Path, *, ten_crops: bool = False, **options: Any) -> Loader[ValBatches]:
    return build_val_loader(data, ValTransform(-1, 8, MEAN, STD, ten_crops), 2, LoaderOptions(**options))


def _two_epochs(loader: Loader[TrainBatches]) -> list[tuple[Tensor, Tensor]]:
    batches = []
    for epoch in (0, 1):
        loader.batch_sampler.set_epoch(epoch)
        batches += [(batch.on(CPU), batch.targets) for batch in loader]
    return batches


def _equal(first: list[tuple[Tensor, Tensor]], second: list[tuple[Tensor, Tensor]]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in pairs)


def test_batches_are_bit_identical_for_any_number_of_workers(data: Path) -> None:
    expected = _two_epochs(_train_loader(data, workers=0))
    assert [len(images) for images, _ in expected] == [4, 4, 4, 5] * 2
    assert not any(torch.equal(a[0], b[0]) for a, b in zip(expected[:4], expected[4:], strict=True))
    for workers in (1, 3):
        assert _equal(_two_epochs(_train_loader(data, workers=workers)), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_run_continued_within_epoch_sees_the_same_images(data: Path, workers: int) -> None:
    expected = _two_epochs(_train_loader(data, workers=0))
    loader = _train_loader(data, workers=workers)
    loader.batch_sampler.set_epoch(1)
    loader.batch_sampler.skip_to(2)
    assert _equal([(batch.on(CPU), batch.targets) for batch in loader], expected[6:])


def test_epoch_after_interrupted_one_is_complete(data: Path) -> None:
    expected = _two_epochs(_train_loader(data, workers=0))
    loader = _train_loader(data, workers=2)
    for _ in loader:
        break
    assert _equal(_two_epochs(loader), expected)


def test_seed_of_experiment_decides_order_and_augmentation(data: Path) -> None:
    loaders = [build_train_loader(data, _experiment(seed=seed)) for seed in (0, 0, 1)]
    first, again, other = (list(loader.batch_sampler) for loader in loaders)
    assert first == again != other
    first, again, other = (loader.dataset[0, 0].drawn.pixels for loader in loaders)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("workers", [0, 2])
def test_global_generators_stay_unchanged(data: Path, workers: int) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    _two_epochs(_train_loader(data, workers=workers))
    list(_val_loader(data, workers=workers))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_image_arrives_as_one_line_with_its_name(data: Path, workers: int) -> None:
    bad = data / "val" / "b" / "002.png"
    bad.write_bytes(b"")
    loader = iter(_val_loader(data, workers=workers))
    for _ in range(3):
        assert len(next(loader).targets) == 2
    assert "\n" not in refused(DataError, lambda: next(loader), f"{bad}: an image cannot be read: ")


def test_workers_end_with_loader_after_fault(data: Path) -> None:
    (data / "val" / "b" / "002.png").write_bytes(b"")
    before = set(multiprocessing.active_children())
    loader = _val_loader(data, workers=2)
    gc.disable()
    try:
        with suppress(DataError):
            list(loader)
        assert len(set(multiprocessing.active_children()) - before) == 2
        del loader
        assert not set(multiprocessing.active_children()) - before
    finally:
        gc.enable()


def test_class_may_be_missing_from_validation(data: Path) -> None:
    (data / "val" / "aa").mkdir()
    assert torch.cat([batch.targets for batch in _val_loader(data)]).unique().tolist() == [0, 2]


def test_workers_ignore_signals_to_process_group(data: Path) -> None:
    loader = iter(_val_loader(data, workers=2))
    for _ in range(2):  # one batch of each worker: now both have begun
        next(loader)
    groups = {os.getpgid(worker.pid) for worker in multiprocessing.active_children()}
    assert len(groups) >= 2
    assert os.getpgid(0) not in groups
