"""``zoo data`` prints what is in a folder and all that is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data.sample_labels import label_map, make_labeled, random_classes
from zoo.cli import main


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    network = {"arch": "deeplab_resnet18", "activation": "leaky_relu", "classes": 3}
    path.write_text(json.dumps({"network": network, "segmentation": {"layout": "folders"}}))
    return path


def test_a_sound_folder_is_described_with_its_classes(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_labeled(tmp_path / "data", 3, 2)
    (data / "classes.txt").write_text("ground\ncat\nhat\n")
    assert main(["data", "check", str(config), str(data), "-j", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "train: 3 images of 12 x 10 px, 0 faults"
    assert lines[2] == "| number | class  | images with it | pixels, % |"
    share = 100 * (random_classes(100, 3) == 0).mean() / 2 + 100 * (random_classes(101, 3) == 0).mean() / 2
    assert f"|      0 | ground |              2 | {share:9.2f} |" in lines
    assert next(line for line in lines if "(void)" in line).startswith("|        | (void) |                |")
    assert "val: 2 images of 12 x 10 px, 0 faults" in lines


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
