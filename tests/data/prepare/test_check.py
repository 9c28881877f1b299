"""Everything that is wrong with a data folder is found at once."""

from __future__ import annotations

from pathlib import Path

from tests.data.sample_images import make_folder, random_image
from tests.data.sample_labels import experiment, label_map, make_labeled
from zoo.config import parse_experiment
from zoo.data.prepare.check import check_data


def test_all_faults_are_found_at_once(tmp_path: Path) -> None:
    data = make_labeled(tmp_path, 6, 2)
    labels = data / "train" / "labels"
    (labels / "000.png").unlink()
    (labels / "002.png").write_bytes(b"")
    label_map([[9] * 12] * 10).save(labels / "004.png")
    label_map([[0] * 10] * 12).save(labels / "sub" / "001.png")
    random_image(0).save(labels / "sub" / "003.png")
    train, val = check_data(experiment(), data, workers=0)
    assert (train.num_images, val.faults) == (5, [])
    for name, fault in zip(
        ("images/000.png", "labels/002.png", "labels/004.png", "labels/sub/001.png", "labels/sub/003.png"),
        sorted(train.faults, key=lambda text: text.split("/train/")[-1]),
        strict=True,
    ):
        assert str(data / "train" / name) in fault


def test_a_missing_split_is_a_fault_beside_those_of_the_other(tmp_path: Path) -> None:
    data = make_labeled(tmp_path, 2, 1)
    (data / "val" / "images" / "000.png").write_bytes(b"")
    (data / "train" / "images").rename(data / "train" / "pictures")
    train, val = check_data(experiment(), data, workers=0)
    assert f"{data / 'train' / 'images'}: there is no such folder" in train.faults[0]
    assert "an image cannot be read" in val.faults[0]


def test_class_folders_are_checked_too(tmp_path: Path) -> None:
    make_folder(tmp_path / "train", {"a": 3, "b": 2})
    make_folder(tmp_path / "val", {"a": 1, "c": 2})
    (tmp_path / "train" / "b" / "001.png").write_bytes(b"")
    (tmp_path / "val" / "c" / "000.png").unlink()
    (tmp_path / "val" / "c").joinpath("000.png").write_bytes(b"GIF")
    config = parse_experiment({"network": {"classes": 2}, "optimizer": {"batch_size": 2}}, "test")
    train, val = check_data(config, tmp_path, workers=2)
    assert (train.num_images, len(train.faults)) == (5, 1)
    assert str(tmp_path / "train/b/001.png") in train.faults[0]
    assert "different classes (1 only in train/: b; 1 only in val/: c)" in val.faults[0]
    assert str(tmp_path / "val/c/000.png") in val.faults[1]
