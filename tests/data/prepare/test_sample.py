"""The bundled images are the ones that are named, and their folder, one of the cache, is complete or not there."""

from __future__ import annotations

import gzip
import multiprocessing
import os
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import ImageFolder as TorchvisionFolder

from zoo.data.prepare import sample
from zoo.data.prepare.sample import ARCHIVE, CLASSES, LICENSE, unpack_sample
from zoo.errors import DataError

ORIGINALS = Path("/usr/share/datasets/fashion-mnist")  # where Debian's dataset-fashion-mnist puts them


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree that tests read but do not change."""
    return unpack_sample(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the archive hold three and two images of each class, for tests that unpack several times."""
    with np.load(ARCHIVE, allow_pickle=False) as archive:
        small = {"train": archive["train"][:, :3], "val": archive["val"][:, :2]}
    monkeypatch.setattr(sample, "ARCHIVE", tmp_path / "small.npz")
    np.savez_compressed(tmp_path / "small.npz", **small)


def test_the_tree_is_an_image_folder_of_5000_gray_images_with_its_license(unpacked: Path) -> None:
    for split, count in (("train", 400), ("val", 100)):
        folder = TorchvisionFolder(unpacked / split)
        assert sorted(folder.classes) == sorted(CLASSES)
        assert np.bincount(folder.targets).tolist() == [count] * 10
    with Image.open(unpacked / "val" / "ankle_boot" / "000.png") as image:
        assert (image.size, image.mode, image.format) == ((28, 28), "L", "PNG")
    assert "Copyright (c) 2017 Zalando SE" in (unpacked / LICENSE.name).read_text()


def test_the_archive_is_compact_and_holds_no_pickle() -> None:
    assert ARCHIVE.stat().st_size < 2_500_000
    with np.load(ARCHIVE, allow_pickle=False) as archive:
        assert {name: archive[name].dtype for name in archive} == {"train": np.uint8, "val": np.uint8}


def _originals(name: str) -> tuple[np.ndarray, np.ndarray]:
    images = gzip.decompress((ORIGINALS / f"{name}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((ORIGINALS / f"{name}-labels-idx1-ubyte.gz").read_bytes())
    return np.frombuffer(images, np.uint8, offset=16).reshape(-1, 28, 28), np.frombuffer(labels, np.uint8, offset=8)


@pytest.mark.skipif(not ORIGINALS.is_dir(), reason="the original files (dataset-fashion-mnist) are not installed")
@pytest.mark.parametrize(("split", "name", "count"), [("train", "train", 400), ("val", "t10k", 100)])
def test_the_images_are_the_first_of_each_class_of_the_original_files(
    unpacked: Path, split: str, name: str, count: int
) -> None:
    images, labels = _originals(name)
    for label, class_name in enumerate(CLASSES):
        for index, original in enumerate(images[labels == label][:count]):
            with Image.open(unpacked / split / class_name / f"{index:03}.png") as image:
                assert np.array_equal(np.asarray(image), original)


@pytest.mark.usefixtures("few")
def test_a_tree_that_is_there_is_used_again_untouched(tmp_path: Path) -> None:
    tree = unpack_sample(tmp_path / "cache")
    times = {path: path.stat().st_mtime_ns for path in tree.rglob("*")}
    assert unpack_sample(tmp_path / "cache") == tree
    assert {path: path.stat().st_mtime_ns for path in tree.rglob("*")} == times


@pytest.mark.usefixtures("few")
def test_another_archive_has_another_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = unpack_sample(tmp_path / "cache")
    newer = tmp_path / "newer.npz"
    np.savez(newer, train=np.full((10, 1, 28, 28), 9, np.uint8), val=np.full((10, 1, 28, 28), 8, np.uint8))
    monkeypatch.setattr(sample, "ARCHIVE", newer)
    tree = unpack_sample(tmp_path / "cache")
    assert len(list(tree.glob("train/*/*"))) == len(list(tree.glob("val/*/*"))) == 10
    assert len(list(older.glob("*/*/*"))) == 50


@pytest.mark.usefixtures("few")
def test_the_finished_tree_is_moved_into_place_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def _build_and_look(tree: Path) -> None:
        build(tree)
        built.append(tree.stat().st_ino)

    build = sample._build
    monkeypatch.setattr(sample, "_build", _build_and_look)
    assert [unpack_sample(tmp_path / "cache").stat().st_ino] == built


@pytest.mark.usefixtures("few")
def test_an_interrupted_unpacking_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def _fail(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sample.shutil, "copyfile", _fail)
    with pytest.raises(KeyboardInterrupt):
        unpack_sample(tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


@pytest.mark.usefixtures("few")
def test_a_cache_that_cannot_be_written_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be unpacked: .*set ZOO_CACHE to another folder"):
        unpack_sample(tmp_path / "file" / "cache")


def _unpack_together(cache: Path, barrier: Barrier, found: Queue[int]) -> None:
    barrier.wait()
    found.put(len(list(unpack_sample(cache).glob("*/*/*.png"))))


@pytest.mark.dist
@pytest.mark.usefixtures("few")
def test_several_processes_may_unpack_at_once(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    fork = multiprocessing.get_context("fork")  # the archive of this test is set in this process
    barrier, found = fork.Barrier(4), fork.Queue()
    processes = [fork.Process(target=_unpack_together, args=(cache, barrier, found)) for _ in range(4)]
    for process in processes:
        process.start()
    assert [found.get(timeout=60) for _ in processes] == [50] * 4
    for process in processes:
        process.join()
    (tree,) = os.listdir(cache)
    assert tree.startswith(f"{sample.SAMPLE_NAME}-")
