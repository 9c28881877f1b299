"""``zoo data`` prints the contents of a folder and all its faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data.sample_labels import label_map, make_labeled
from tests.engine.tiny import make_images
from zoo.cli import main


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    network = {"arch": "deeplab_resnet18", "activation": "leaky_relu", "classes": 3}
    path.write_text(json.dumps({"network": network, "segmentation": {"layout": "folders"}}))
    return path


def test_images_of_sound_folder_are_counted(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_labeled(tmp_path / "data", 3, 2)
    assert main(["data", "check", str(config), str(data), "-j", "0"]) == 0
    assert capsys.readouterr().out.splitlines() == ["train: 3 images, 0 faults", "val: 2 images, 0 faults"]


@pytest.mark.parametrize("name", ["resnet18", "torchvision:resnet18", "resnet18.json", "imagenet_convnext_tiny"])
def test_check_accepts_data_of_train(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_images(tmp_path / "data", num_train=4, num_val=2)
    if name.endswith(".json"):
        (tmp_path / name).write_text('{"network": {"arch": "resnet18"}}')
        name = str(tmp_path / name)
    (data / "train" / "class0" / "bad.png").write_bytes(b"")
    assert main(["data", "check", name, str(data), "-j", "0"]) == 2
    output, error = capsys.readouterr()
    assert "train: 5 images, 1 fault\n" in output
    assert "bad.png" in output
    assert ": 1 fault, listed above;" in error


def test_all_faults_are_printed_and_exit_code_is_2(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_labeled(tmp_path / "data", 3, 1)
    label_map([[9] * 12] * 10).save(data / "train" / "labels" / "000.png")
    (data / "val" / "labels" / "000.png").write_bytes(b"")
    assert main(["data", "check", str(config), str(data), "-j", "2"]) == 2
    output, error = capsys.readouterr()
    faults = [line for line in output.splitlines() if line.startswith("fault: ")]
    assert [
        str(path) in fault for path, fault in zip(("train/labels/000.png", "val/labels/000.png"), faults, strict=True)
    ]
    assert ": 2 faults, listed above;" in error


def _masks(data: Path, split: str, values: list[int]) -> None:
    """Write label maps with these values, row by row, to all images of a split."""
    rows = [[values[row % len(values)]] * 12 for row in range(10)]
    for path in (data / split / "labels").rglob("*.png"):
        label_map(rows).save(path)


@pytest.fixture
def binary(config: Path) -> Path:
    config.write_text(config.read_text().replace('"classes": 3', '"classes": 2'))
    return config


def test_masks_of_0_and_255_are_named_with_their_remedy(
    binary: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_labeled(tmp_path / "data", 3, 2)
    _masks(data, "train", [0, 255])
    _masks(data, "val", [0, 1])
    assert main(["data", "check", str(binary), str(data)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "train: 3 images, 0 faults",
        "warning: 1 of 2 classes have no pixel: 1; 255 is void: write 1 in place of 255 in masks of 0 and 255",
        "val: 2 images, 0 faults",
    ]


@pytest.mark.parametrize("split", ["train", "val"])
def test_classes_without_pixel_are_named_for_each_split(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], split: str
) -> None:
    data = make_labeled(tmp_path / "data", 3, 2)
    _masks(data, split, [1, 255])
    (data / "classes.txt").write_text("sky\nroad\ncar\n")
    assert main(["data", "check", str(config), str(data)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "warning" in line] == ["warning: 2 of 3 classes have no pixel: sky, car"]
    assert lines.index("warning: 2 of 3 classes have no pixel: sky, car") == (1 if split == "train" else 2)


@pytest.mark.parametrize("split", ["train", "val"])
def test_void_split_raises_but_void_label_map_does_not(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], split: str
) -> None:
    data = make_labeled(tmp_path / "data", 3, 2)
    label_map([[255] * 12] * 10).save(data / split / "labels" / "000.png")
    assert main(["data", "check", str(config), str(data)]) == 0
    _masks(data, split, [255])
    assert main(["data", "check", str(config), str(data)]) == 2
    output = capsys.readouterr().out
    assert "no pixel has a class; 3 of 3 classes have no pixel: 0, 1, 2" in output
    assert output.count("fault: ") == 1
