"""``zoo data`` prints what is in a folder and all that is wrong with it, and makes one of what owners distribute."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data.distributed import md5_of
from tests.data.sample_labels import label_map, make_labeled, random_classes
from tests.data.test_cifar import files_of, release_of, write_folder
from tests.data.test_imagenet_validation import write_release
from zoo.cli import main
from zoo.data.prepare.cifar import CIFAR


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
    assert "zoo data check: 2 faults, listed above;" in error


def test_cifar_is_made_into_folders_that_check_finds_nothing_wrong_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = files_of()
    monkeypatch.setitem(CIFAR, "cifar10", release_of(files))
    write_folder(tmp_path / "small-py", files)
    command = ["data", "cifar10", str(tmp_path), str(tmp_path / "out")]
    assert main(command) == 0
    assert f"written to {tmp_path / 'out'}" in capsys.readouterr().out
    written = json.loads((tmp_path / "out" / "cifar10.json").read_text())
    assert written["made_by"] == "zoo data cifar10"
    assert written["md5_of_source"] == {name: md5_of(content) for name, content in files.items()}
    assert main(["data", "check", "resnet32_cifar10", str(tmp_path / "out"), "-j", "0"]) == 0
    assert "train: 6 images of 32 x 32 px, 0 faults" in capsys.readouterr().out
    assert main(command) == 2
    assert "OUT exists and is not overwritten" in capsys.readouterr().err


def test_validation_images_of_imagenet_are_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    release = write_release(tmp_path / "in")
    monkeypatch.setattr("zoo.data.prepare.imagenet_validation.ImageNetRelease", lambda: release)
    assert main(["data", "imagenet-val", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    assert len(list((tmp_path / "out" / "val").iterdir())) == 1000
    assert json.loads((tmp_path / "out" / "imagenet-val.json").read_text())["made_by"] == "zoo data imagenet-val"
