"""The images of `CLASSES` in class folders and in shards, written once per process and copied for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.data.sample_images import make_splits
from tests.data.sample_labels import make_labeled
from zoo.data.prepare.write_shards import write_shards
from zoo.data.sources.folder import FolderSource


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets to read only: folder/, the same images in shards/, and labeled/ with label maps."""
    root = tmp_path_factory.mktemp("originals")
    make_splits(root / "folder")
    for split, seed in (("train", 0), ("val", None)):
        write_shards(FolderSource(root / "folder" / split), root / "shards" / split, per_shard=4, seed=seed)
    make_labeled(root / "labeled", 7, 3)
    return root


@pytest.fixture
def folder(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "folder", tmp_path / "folder"))


@pytest.fixture
def shards(originals: Path, tmp_path: Path) -> Path:
    """Shards of four images, shuffled in train/."""
    return Path(shutil.copytree(originals / "shards", tmp_path / "shards"))


@pytest.fixture
def labeled(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "labeled", tmp_path / "labeled"))
