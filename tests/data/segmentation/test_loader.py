"""Batches of crops and whole images are bit-identical for any number of workers, and faults are readable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.sample_labels import IGNORE, experiment, label_map, make_labeled, make_pair, random_classes
from tests.refusals import refused
from zoo.data.dataset import Batch
from zoo.data.loader import Loader, LoaderOptions
from zoo.data.sampler import TrainBatches
from zoo.data.segmentation.loader import build_segmentation_train_loader, build_segmentation_val_loader
from zoo.errors import DataError

# torch warns about more workers than cores
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_labeled(tmp_path / "data", 7, 3)


def _epochs(loader: Loader[TrainBatches], *epochs: int, first_batch: int = 0) -> list[Batch]:
    batches: list[Batch] = []
    for epoch in epochs:
        loader.batch_sampler.set_epoch(epoch)
        loader.batch_sampler.skip_to(first_batch)
        batches += loader
    return batches


def _equal(first: list[Batch], second: list[Batch]) -> bool:
    return all(
        torch.equal(a.images, b.images) and torch.equal(a.targets, b.targets) and a.paths == b.paths
        for a, b in zip(first, second, strict=True)
    )


def test_training_batches_are_crops_with_classes_of_their_pixels(data: Path) -> None:
    batches = _epochs(build_segmentation_train_loader(data, experiment()), 0)
    assert [batch.images.shape for batch in batches] == [(2, 3, 8, 8), (2, 3, 8, 8), (3, 3, 8, 8)]
    for batch in batches:
        assert (batch.images.dtype, batch.targets.dtype) == (torch.float32, torch.int64)
        assert batch.targets.shape == (len(batch.images), 8, 8)
        assert set(batch.targets.unique().tolist()) <= {0, 1, 2, IGNORE}
    assert len({path for batch in batches for path in batch.paths}) == 7


@pytest.mark.parametrize("class_uniform", [False, True])
def test_batches_do_not_depend_on_workers_or_resume(data: Path, class_uniform: bool) -> None:
    config = experiment(class_uniform=class_uniform)
    expected = _epochs(build_segmentation_train_loader(data, config), 0, 1)
    assert not _equal(expected[:3], expected[3:])
    loader = build_segmentation_train_loader(data, config, LoaderOptions(workers=2))
    assert _equal(_epochs(loader, 0, 1), expected)
    assert _equal(_epochs(loader, 1, first_batch=2), expected[5:])


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
    batches = _epochs(build_segmentation_train_loader(tmp_path, config), *range(30))
    assert sum(len(batch.images) for batch in batches) == 300
    rare = [path for batch in batches for path, target in zip(batch.paths, batch.targets, strict=True)
            if (target == 2).any()]  # fmt: skip
    assert 70 <= len(rare) <= 130
    assert {Path(path).name for path in rare} == {"4.png"}


def test_validation_batches_are_whole_images_at_their_own_size(data: Path) -> None:
    make_pair(data / "val/images/wide.png", data / "val/labels/wide.png", 5, 3, 21, 7)
    for workers in (0, 2):
        batches = list(build_segmentation_val_loader(data, experiment(), LoaderOptions(workers=workers)))
        assert [tuple(batch.images.shape) for batch in batches] == [(1, 3, 10, 12)] * 2 + [
            (1, 3, 7, 21),
            (1, 3, 10, 12),
        ]
        assert [tuple(batch.targets.shape) for batch in batches] == [(1, 10, 12)] * 2 + [(1, 7, 21), (1, 10, 12)]
    assert torch.equal(batches[2].targets[0], torch.from_numpy(random_classes(5, 3, 21, 7)).long())
    (batch, *_) = build_segmentation_val_loader(data, experiment(longest_side_val=24), limit=1)
    assert (tuple(batch.images.shape), tuple(batch.targets.shape)) == ((1, 3, 20, 24), (1, 10, 12))


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_label_map_arrives_as_one_line(data: Path, workers: int) -> None:
    bad = data / "val" / "labels" / "002.png"
    label_map([[7] * 12] * 10).save(bad)
    loader = build_segmentation_val_loader(data, experiment(), LoaderOptions(workers=workers))
    assert "\n" not in refused(DataError, lambda: list(loader), f"{bad}: ", "7 (120 px)")


def test_data_set_has_classes_files_and_digest_of_both(data: Path) -> None:
    (data / "classes.txt").write_text("a\nb\nc\n")
    images = build_segmentation_train_loader(data, experiment()).dataset
    assert (images.root, images.classes, len(images)) == (data, ["a", "b", "c"], 7)
    assert images.file_name(0) == str(data / "train" / "images" / "000.png")
    digest = images.names_digest()
    assert digest == build_segmentation_train_loader(data, experiment(seed=1)).dataset.names_digest()
    (data / "classes.txt").write_text("a\nb\nd\n")
    assert digest != build_segmentation_train_loader(data, experiment()).dataset.names_digest()


@pytest.mark.parametrize("file", ["labels/006.png", "images/000.png"])
def test_edited_file_changes_digest_of_sizes(data: Path, file: str) -> None:
    before = build_segmentation_train_loader(data, experiment()).dataset.digests()
    edited = data / "train" / file
    edited.write_bytes(edited.read_bytes() + b"x")
    now = build_segmentation_train_loader(data, experiment()).dataset.digests()
    assert [key for key in before if before[key] != now[key]] == ["sizes"]


def test_classes_can_be_numbered_as_networks_outputs(data: Path) -> None:
    loader = build_segmentation_val_loader(data, experiment())
    before = [batch.targets for batch in loader]
    loader.dataset.remap_targets([2, 0, 1])
    renumbered = torch.tensor([2, 0, 1] + [IGNORE] * 253)
    for batch, targets in zip(loader, before, strict=True):
        assert torch.equal(batch.targets, renumbered[targets])
