"""Batches of crops and whole images with their label maps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.sample_labels import IGNORE, experiment, label_map, make_pair, random_classes
from zoo.data.segmentation.loader import build_segmentation_train_loader, build_segmentation_val_loader


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))


def test_training_batches_are_crops_with_classes_of_their_pixels(originals: Path) -> None:
    batches = list(build_segmentation_train_loader(originals / "labeled", experiment()))
    assert [batch.images.shape for batch in batches] == [(2, 3, 8, 8), (2, 3, 8, 8), (3, 3, 8, 8)]
    for batch in batches:
        assert (batch.images.dtype, batch.targets.dtype) == (torch.float32, torch.int64)
        assert batch.targets.shape == (len(batch.images), 8, 8)
        assert set(batch.targets.unique().tolist()) <= {0, 1, 2, IGNORE}
    assert len({path for batch in batches for path in batch.paths}) == 7


def test_class_uniform_crops_balance_rare_classes(tmp_path: Path) -> None:
    """One pixel of class 2 in one image of ten; each crop covers a twenty-fifth of an image."""
    for index in range(10):
        name = f"{index}.png"
        make_pair(tmp_path / "train/images" / name, tmp_path / "train/labels" / name, index, 1, 40, 40)
        classes = np.zeros((40, 40), dtype=np.uint8)
        classes[:20] = 1
        classes[7, 31] = 2 if index == 4 else IGNORE
        label_map(classes).save(tmp_path / "train/labels" / name)
    config = experiment(class_uniform=True, scale_range=[1.0, 1.0], batch=10)
    loader, batches = build_segmentation_train_loader(tmp_path, config), []
    for epoch in range(30):
        loader.batch_sampler.set_epoch(epoch)
        batches += loader
    assert sum(len(batch.images) for batch in batches) == 300
    rare = [path for batch in batches for path, target in zip(batch.paths, batch.targets, strict=True)
            if (target == 2).any()]  # fmt: skip
    assert 70 <= len(rare) <= 130
    assert {Path(path).name for path in rare} == {"4.png"}


def test_validation_batches_are_whole_images_at_their_own_size(labeled: Path) -> None:
    make_pair(labeled / "val/images/wide.png", labeled / "val/labels/wide.png", 5, 3, 21, 7)
    batches = list(build_segmentation_val_loader(labeled, experiment()))
    sizes = [(10, 12), (10, 12), (7, 21), (10, 12)]
    assert [tuple(batch.images.shape) for batch in batches] == [(1, 3, *size) for size in sizes]
    assert [tuple(batch.targets.shape) for batch in batches] == [(1, *size) for size in sizes]
    assert torch.equal(batches[2].targets[0], torch.from_numpy(random_classes(5, 3, 21, 7)).long())
    (batch, *_) = build_segmentation_val_loader(labeled, experiment(longest_side_val=24), limit=1)
    assert (tuple(batch.images.shape), tuple(batch.targets.shape)) == ((1, 3, 20, 24), (1, 10, 12))


def test_data_set_has_classes_files_and_digest_of_both(labeled: Path) -> None:
    (labeled / "classes.txt").write_text("a\nb\nc\n")
    images = build_segmentation_train_loader(labeled, experiment()).dataset
    assert (images.root, images.classes, len(images)) == (labeled, ["a", "b", "c"], 7)
    assert images.file_name(0) == str(labeled / "train" / "images" / "000.png")
    digest = images.names_digest()
    assert digest == build_segmentation_train_loader(labeled, experiment(seed=1)).dataset.names_digest()
    (labeled / "classes.txt").write_text("a\nb\nd\n")
    assert digest != build_segmentation_train_loader(labeled, experiment()).dataset.names_digest()


@pytest.mark.parametrize("file", ["labels/006.png", "images/000.png"])
def test_edited_file_changes_digest_of_sizes(labeled: Path, file: str) -> None:
    before = build_segmentation_train_loader(labeled, experiment()).dataset.digests()
    edited = labeled / "train" / file
    edited.write_bytes(edited.read_bytes() + b"x")
    now = build_segmentation_train_loader(labeled, experiment()).dataset.digests()
    assert [key for key in before if before[key] != now[key]] == ["sizes"]


def test_classes_can_be_numbered_as_networks_outputs(labeled: Path) -> None:
    loader = build_segmentation_val_loader(labeled, experiment())
    before = [batch.targets for batch in loader]
    loader.dataset.remap_targets([2, 0, 1])
    renumbered = torch.tensor([2, 0, 1] + [IGNORE] * 253)
    for batch, targets in zip(loader, before, strict=True):
        assert torch.equal(batch.targets, renumbered[targets])
