"""The bundled images have the stated origin, and their cache folder is either complete or absent."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import ImageFolder as TorchvisionFolder

from tests.refusals import refused
from zoo.data.prepare import sample
from zoo.data.prepare.sample import ARCHIVE, CLASSES, LICENSE, unpack_sample
from zoo.errors import DataError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the archive hold three and two images of each class, for tests that unpack several times."""
    with np.load(ARCHIVE, allow_pickle=False) as archive:
        small = {"train": archive["train"][:, :3], "val": archive["val"][:, :2]}
    monkeypatch.setattr(sample, "ARCHIVE", tmp_path / "small.npz")
    np.savez_compressed(tmp_path / "small.npz", **small)


@pytest.mark.usefixtures("few")
def test_tree_is_image_folder_with_license() -> None:
    with np.load(ARCHIVE, allow_pickle=False) as archive:
        assert (archive["train"].shape, archive["val"].shape) == ((10, 400, 28, 28), (10, 100, 28, 28))
    unpacked = unpack_sample()
    for split, count in (("train", 3), ("val", 2)):
        folder = TorchvisionFolder(unpacked / split)
        assert sorted(folder.classes) == sorted(CLASSES)
        assert np.bincount(folder.targets).tolist() == [count] * 10
    with Image.open(unpacked / "val" / "ankle_boot" / "000.png") as image:
        assert (image.size, image.mode, image.format) == ((28, 28), "L", "PNG")
    assert "Copyright (c) 2017 Zalando SE" in (unpacked / LICENSE.name).read_text()


@pytest.mark.usefixtures("few")
def test_each_archive_has_its_own_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = unpack_sample()
    times = {path: path.stat().st_mtime_ns for path in older.rglob("*")}
    assert unpack_sample() == older
    assert {path: path.stat().st_mtime_ns for path in older.rglob("*")} == times
    newer = tmp_path / "newer.npz"
    np.savez(newer, train=np.full((10, 1, 28, 28), 9, np.uint8), val=np.full((10, 1, 28, 28), 8, np.uint8))
    monkeypatch.setattr(sample, "ARCHIVE", newer)
    tree = unpack_sample()
    assert len(list(tree.glob("train/*/*"))) == len(list(tree.glob("val/*/*"))) == 10
    assert len(list(older.glob("*/*/*"))) == 50


@pytest.mark.usefixtures("few")
def test_interrupted_extraction_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def _fail(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sample.shutil, "copyfile", _fail)
    with pytest.raises(KeyboardInterrupt):
        unpack_sample()
    assert os.listdir(tmp_path / "cache") == []


@pytest.mark.usefixtures("few")
def test_unwritable_cache_raises_with_remedy(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    refused(DataError, unpack_sample, "ZOO_CACHE")


def _unpack_together(barrier: Barrier, found: Queue[int]) -> None:
    barrier.wait()
    found.put(len(list(unpack_sample().glob("*/*/*.png"))))


@pytest.mark.dist
@pytest.mark.usefixtures("few")
def test_several_processes_may_unpack_at_once(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")  # the archive of this test is set in this process
    barrier, found = fork.Barrier(4), fork.Queue()
    processes = [fork.Process(target=_unpack_together, args=(barrier, found)) for _ in range(4)]
    for process in processes:
        process.start()
    assert [found.get(timeout=60) for _ in processes] == [50] * 4
    for process in processes:
        process.join()
    (tree,) = os.listdir(tmp_path / "cache")
    assert tree.startswith(f"{sample.SAMPLE_NAME}-")
