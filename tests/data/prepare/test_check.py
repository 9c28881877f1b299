"""Every image of a data set that cannot be read is found at once."""

from __future__ import annotations

from pathlib import Path

from tests.data.sample_images import make_folder, random_image
from tests.data.sample_labels import experiment, label_map, make_labeled
from zoo.data.dataset import ImageFolder
from zoo.data.prepare.check import check_images
from zoo.data.segmentation.loader import build_segmentation_train_loader
from zoo.data.transforms.classification import ValTransform


def test_all_faulty_label_maps_are_found_at_once(tmp_path: Path) -> None:
    data = make_labeled(tmp_path, 6, 2)
    labels = data / "train/labels"
    (labels / "002.png").write_bytes(b"")
    label_map([[9] * 12] * 10).save(labels / "004.png")
    label_map([[0] * 10] * 12).save(labels / "sub" / "001.png")
    random_image(0).save(labels / "sub" / "003.png")
    faults = check_images(build_segmentation_train_loader(data, experiment()).dataset, "train", workers=0).faults
    for name, fault in zip(("002.png", "004.png", "sub/001.png", "sub/003.png"), faults, strict=True):
        assert str(labels / name) in fault


def test_all_faulty_images_and_absent_classes_are_found_at_once(tmp_path: Path) -> None:
    make_folder(tmp_path, {"a": 3, "b": 2})
    (tmp_path / "a/000.png").write_bytes(b"GIF")
    (tmp_path / "b/001.png").write_bytes(b"")
    images = ImageFolder(tmp_path, ValTransform(8, 8, [0.5] * 3, [0.2] * 3))
    findings = check_images(images, "train", workers=2)
    first, second = findings.faults
    assert str(tmp_path / "a/000.png") in first
    assert str(tmp_path / "b/001.png") in second
    assert findings.absent == ""
    (tmp_path / "b/000.png").write_bytes(b"")
    assert check_images(images, "train", workers=0).absent == "1 of 2 classes have no image: b"
