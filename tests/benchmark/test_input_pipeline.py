"""The input pipeline is measured beside the bare decoder, on the JPEG files of a data folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data.sample_images import make_folder, random_image
from zoo.cli import main

OPTIONS = ["--images", "3", "--rounds", "1"]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"input": {"crop_train": 24, "color_jitter_train": True}}))
    return str(path)


def _make_jpegs(root: Path) -> None:
    for split in ("train", "val"):
        for index in range(4):
            path = root / split / "ab"[index % 2] / f"{index}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            random_image(index, width=300, height=280).save(path)


def test_the_result_has_a_ratio_for_each_setting_and_a_plot(config: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _make_jpegs(tmp_path)
    summary, out = tmp_path / "summary.json", tmp_path / "out"
    assert main(["benchmark", "input", config, str(tmp_path), "--json", str(summary), "--out", str(out), *OPTIONS]) == 0
    content = json.loads(summary.read_text())
    keys = {"train", "train_pil", "center", "center_pil", "tencrop", "tencrop_pil"}
    assert set(content["ratios"]) == keys | {f"{key}_finished" for key in keys}
    rates = content["images_per_s"]
    assert set(rates) == keys | {"train", "val"}
    for key, stages in rates.items():
        assert min(stages.values()) > 0
        if key in keys:  # a part takes no longer than the whole
            assert stages["read to collate"] < stages["read"]
    assert content["settings"]["images of train/"] == content["settings"]["images of val/"] == 3
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_jpeg_files_cannot_be_compared(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "val"):
        make_folder(tmp_path / split, {"a": 4})
    assert main(["benchmark", "input", config, str(tmp_path), "--out", str(tmp_path / "out"), *OPTIONS]) == 2
    assert f"none of 3 images is an 8-bit gray or RGB JPEG file; {tmp_path / 'train'}" in capsys.readouterr().err
