"""``zoo data`` prints what is in a folder and all that is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data.sample_labels import label_map, make_labeled
from zoo.cli import main


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    network = {"arch": "deeplab_resnet18", "activation": "leaky_relu", "classes": 3}
    path.write_text(json.dumps({"network": network, "segmentation": {"layout": "folders"}}))
    return path


def test_the_images_of_a_sound_folder_are_counted(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_labeled(tmp_path / "data", 3, 2)
    assert main(["data", "check", str(config), str(data), "-j", "0"]) == 0
    assert capsys.readouterr().out.splitlines() == ["train: 3 images, 0 faults", "val: 2 images, 0 faults"]


def test_all_faults_are_printed_and_the_exit_code_is_that_of_an_error(
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
