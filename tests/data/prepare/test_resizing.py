"""Shards of resized images: what is resized and how, what is copied, and that their order is that of the originals."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.sample_images import random_image
from zoo.cli import main
from zoo.data.folder import open_source
from zoo.data.index import Index, index_path

SIDE = 24
SIZES = ((60, 30), (31, 47), (24, 80), (20, 90), (25, 25), (100, 24), (24, 24), (33, 70))  # width, height


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Photographs of several sizes, one of them PNG, gray with a comment, and CMYK."""
    root = tmp_path / "data" / "train"
    for index, (width, height) in enumerate(SIZES):
        path = root / "ab"[index % 2] / f"{index}.{'png' if index == 0 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = random_image(index, width, height)
        mode = {1: "L", 7: "CMYK"}.get(index, "RGB")
        image.convert(mode).save(path, **({"comment": b"of the original"} if index == 1 else {}))
    return tmp_path / "data"


def _shard(data: Path, out: Path, *options: str) -> Path:
    assert main(["data", "shard", str(data), str(out), "--per-shard", "3", *options]) == 0
    return out / "train"


def test_larger_images_are_resized_and_all_others_are_copied_to_the_byte(data: Path, tmp_path: Path) -> None:
    plain = open_source(_shard(data, tmp_path / "plain"))
    small = open_source(_shard(data, tmp_path / "small", "--resize", str(SIDE), "--quality", "85"))
    assert small.targets.tolist() == plain.targets.tolist()
    num_resized = 0
    for index in range(len(SIZES)):
        before, after = plain.read(index), small.read(index)
        width, height = (original := Image.open(io.BytesIO(before))).size
        if min(width, height) <= SIDE:
            assert after == before
            continue
        num_resized += 1
        size = (SIDE * width // min(width, height), SIDE * height // min(width, height))
        expected = io.BytesIO()
        pixels = original.convert("RGB").resize(size, Image.Resampling.LANCZOS)
        Image.fromarray(np.asarray(pixels)).save(expected, "JPEG", quality=85, subsampling="4:2:0")
        assert after == expected.getvalue()
    assert num_resized == sum(min(size) > SIDE for size in SIZES) == 4


def test_the_index_records_settings_and_encoder(data: Path, tmp_path: Path) -> None:
    plain, small = _shard(data, tmp_path / "plain"), _shard(data, tmp_path / "small", "--resize", str(SIDE))
    assert "resized" not in Index(index_path(plain)).header
    facts = Index(index_path(small)).header["resized"]
    assert {key: facts[key] for key in ("shorter_side_px", "quality", "subsampling", "interpolation")} == {
        "shorter_side_px": SIDE, "quality": 90, "subsampling": "4:2:0", "interpolation": "lanczos",
    }  # fmt: skip
    assert facts["pillow"]
    assert facts["libjpeg_turbo"]


def test_any_number_of_threads_writes_the_same_bytes(data: Path, tmp_path: Path) -> None:
    roots = [_shard(data, tmp_path / workers, "--resize", str(SIDE), "-j", workers) for workers in ("0", "3")]
    first, second = ({path.name: path.read_bytes() for path in root.iterdir()} for root in roots)
    assert first == second
    assert len(first) == math.ceil(len(SIZES) / 3) + 1


def test_a_file_that_is_no_image_is_named_and_nothing_is_left(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = data / "train" / "b" / "3.jpg"  # small enough to be copied
    bad.write_bytes(bad.read_bytes()[:300])
    assert main(["data", "shard", str(data), str(tmp_path / "out"), "--resize", str(SIDE)]) == 2
    assert "an image cannot be read: " in (error := capsys.readouterr().err)
    assert str(bad) in error
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--quality", "90"], "--quality 90 has no effect, because images are copied; give --resize PX"),
        (["--resize", "9", "--quality", "101"], "'101' is not a JPEG quality from 1 to 100"),
        (["--resize", "0"], "'0' is not a whole number of at least 1"),
    ],
)
def test_options_without_effect_or_out_of_range_are_errors(
    options: list[str], message: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["data", "shard", str(data), str(tmp_path / "out"), *options])
    except SystemExit as exit_:
        code = exit_.code
    assert code == 2
    assert message in capsys.readouterr().err
