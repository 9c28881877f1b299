"""An image's augmentation is a function of (seed, epoch, index), and the user's faults are named."""

from __future__ import annotations

import logging
import os
import random
import warnings
from pathlib import Path
from random import Random

import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.data.sample_images import make_folder
from tests.refusals import refused
from zoo.config.experiment import Input
from zoo.data.classes import check_num_classes
from zoo.data.dataset import ImageFolder
from zoo.data.transforms.classification import Drawn, TrainTransform, Transform, ValTransform
from zoo.data.transforms.pixels import Pixels
from zoo.errors import DataError

CPU = torch.device("cpu")
SHAPE = (3, 8, 8)
AUGMENT = TrainTransform(Input(crop_train=8, color_jitter_train=True, lighting_train=True))
PLAIN = ValTransform(-1, 8, [0.5] * 3, [0.5] * 3)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "train", {"a": 3, "b": 2})


def _image(images: ImageFolder, epoch: int, index: int) -> Tensor:
    return images[epoch, index].drawn.finished()


def test_samples_have_image_target_and_file(root: Path) -> None:
    images = ImageFolder(root, PLAIN)
    assert (len(images), images.classes) == (5, ["a", "b"])
    for index in range(5):
        sample = images[0, index]
        assert sample.target == int(index > 2)
        assert Path(sample.path) == root / "aaabb"[index] / f"{index % 3:03}.png"
        assert torch.equal(_image(images, 0, index), PLAIN(Image.open(sample.path)))


def test_augmentation_repeats_after_any_draws_in_between(root: Path) -> None:
    keys = [(epoch, index) for epoch in range(3) for index in range(5)]
    first = ImageFolder(root, AUGMENT, seed=4)
    images = {key: _image(first, *key) for key in keys}
    second = ImageFolder(root, AUGMENT, seed=4)
    for key in reversed(keys):
        torch.rand(3)
        random.random()
        assert torch.equal(_image(second, *key), images[key])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 1000])
def test_sizes_of_at_most_so_many_files_are_read(root: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[str] = []
    getsize = os.path.getsize
    monkeypatch.setattr("zoo.data.sources.folder.MAX_SIZES", count)
    monkeypatch.setattr("os.path.getsize", lambda path: sizes.append(path) or getsize(path))
    images = ImageFolder(root, PLAIN)
    assert images.digests().keys() == {"names", "sizes"}
    assert 0 < len(sizes) <= min(count, 5)
    assert sizes == sorted({images.file_name(index) for index in range(5)} & {*sizes})


def test_files_are_closed(root: Path) -> None:
    bad = root / "a" / "001.png"
    bad.write_bytes(bad.read_bytes()[:-40])
    images = ImageFolder(root, PLAIN)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        assert images[0, 0].path == str(root / "a" / "000.png")
        refused(DataError, lambda: images[0, 1], f"{bad}: ")


def test_bug_in_transform_is_not_reported_as_data_error(root: Path) -> None:
    class _Broken(Transform):
        def draw(self, image: Pixels, generator: Random) -> Drawn:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        ImageFolder(root, _Broken()).__getitems__([(0, 0)])


def test_fewer_classes_than_outputs_warn(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    images = ImageFolder(root, PLAIN)
    check_num_classes(images, 2)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        check_num_classes(images, 1000)
    assert f"{root}: 2 class folders for a network with 1,000 outputs" in caplog.text
    assert "; set network.num_classes to 2" in caplog.text
