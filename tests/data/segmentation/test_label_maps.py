"""Pairs are found in every layout, label maps are read as the ids they hold, and each fault names its file."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.sample_images import random_image
from tests.data.sample_labels import IGNORE, label_map, make_labeled, make_pair, random_classes
from tests.refusals import refused
from zoo.data.segmentation.label_maps import (
    CITYSCAPES,
    COCO_STUFF,
    NO_CLASS,
    LabeledImages,
    Split,
    labeled_images,
    read_label,
    read_pair,
)
from zoo.errors import ConfigError, DataError


def _find(data: Path, split: Split = "train", layout: str = "folders", num_classes: int = 3) -> LabeledImages:
    return labeled_images(data, split, layout, num_classes, IGNORE)


@pytest.fixture
def table(tmp_path: Path) -> np.ndarray:
    """The table of three classes in layout "folders"."""
    return _find(make_labeled(tmp_path / "data", 1, 1)).table


def _png(path: Path, rows: list[bytes], width: int, bits: int, color_type: int = 0) -> Path:
    """Write a PNG file of packed ``rows``, as PIL writes no gray values of two and four bits."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, len(rows), bits, color_type, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows))),
        (b"IEND", b""),
    ]
    content = b"\x89PNG\r\n\x1a\n"
    for name, data in chunks:
        content += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    path.write_bytes(content)
    return path


def test_folders_pair_images_and_label_maps_by_path(tmp_path: Path) -> None:
    data = make_labeled(tmp_path)
    (data / "train" / "images" / "000.png").rename(data / "train" / "images" / "000.JPG")
    found = _find(data)
    names = ["000.JPG", "002.png", "004.png", "sub/001.png", "sub/003.png"]
    assert found.images == [f"train/images/{name}" for name in names]
    assert found.labels == [f"train/labels/{name}".replace(".JPG", ".png") for name in names]
    assert found.classes == ["0", "1", "2"]
    assert np.flatnonzero(found.table != NO_CLASS).tolist() == [0, 1, 2, 255]
    assert len(_find(data, "val").images) == 3


def test_class_file_has_one_line_per_class(tmp_path: Path) -> None:
    data = make_labeled(tmp_path, 1, 1)
    (data / "classes.txt").write_text("ground\ncat\nçedilla\n", encoding="utf-8")
    assert _find(data).classes == ["ground", "cat", "çedilla"]
    (data / "classes.txt").write_text("\ufeffground\ncat\nhat\n", encoding="utf-8")
    assert _find(data).classes[0] == "ground"


def test_cityscapes_has_19_classes_and_void(tmp_path: Path) -> None:
    for split, city in (("train", "aachen"), ("train", "bonn"), ("val", "ulm")):
        stem = tmp_path / "gtFine" / split / city / "a_000001_000019_gtFine"
        image = tmp_path / "leftImg8bit" / split / city / "a_000001_000019_leftImg8bit.png"
        make_pair(image, Path(f"{stem}_labelIds.png"), 0, 19)
        label_map([list(range(34))]).save(f"{stem}_labelIds.png")
        random_image(1).save(f"{stem}_color.png")
        Path(f"{stem}_polygons.json").write_text("{}")
    found = _find(tmp_path, layout="cityscapes", num_classes=19)
    assert found.labels == [f"gtFine/train/{city}/a_000001_000019_gtFine_labelIds.png" for city in ("aachen", "bonn")]
    (classes,) = read_label(tmp_path / found.labels[0], found.table)
    assert [found.classes[number] for number in classes if number != IGNORE] == list(CITYSCAPES.values())
    assert np.flatnonzero(classes != IGNORE).tolist() == list(CITYSCAPES)
    assert (classes[7], classes[26], classes[33]) == (0, 13, 18)
    assert found.table[34] == NO_CLASS
    assert len(_find(tmp_path, "val", "cityscapes", 19).images) == 1
    refused(ConfigError, lambda: _find(tmp_path, layout="cityscapes"), "network.num_classes = 3", "19 classes")


def test_coco_stuff_has_91_stuff_classes_one_below_their_number(tmp_path: Path) -> None:
    for split in ("train2017", "val2017"):
        make_pair(tmp_path / f"images/{split}/1.jpg", tmp_path / f"annotations/{split}/1.png", 0, 3)
    found = _find(tmp_path, layout="coco_stuff", num_classes=91)
    assert (found.images, found.labels) == (["images/train2017/1.jpg"], ["annotations/train2017/1.png"])
    assert (len(COCO_STUFF), COCO_STUFF[0], COCO_STUFF[149 - 92], COCO_STUFF[-1]) == (91, "banner", "road", "wood")
    label_map([[0, 90, 91, 148, 181, 255]]).save(tmp_path / "x.png")
    assert read_label(tmp_path / "x.png", found.table).tolist() == [[255, 255, 0, 57, 90, 255]]
    label_map([[92, 183, 0]]).save(tmp_path / "x.png")
    refused(DataError, lambda: read_label(tmp_path / "x.png", found.table), "x.png: ", "183 (1 px)")


@pytest.mark.parametrize("version", ["", "v1.2"])
def test_vistas_takes_names_and_void_from_its_configuration(tmp_path: Path, version: str) -> None:
    entries = [("Bird", True), ("Ego Vehicle", True), ("Unlabeled", False), ("Later", True)]
    config = {
        "labels": [{"readable": name, "name": "x", "evaluate": flag, "color": [0, 0, 0]} for name, flag in entries]
    }
    file = tmp_path / (f"config_{version}.json" if version else "config.json")
    file.write_text(json.dumps(config))
    for split in ("training", "validation"):
        make_pair(tmp_path / split / "images" / "a.jpg", tmp_path / split / version / "labels" / "a.png", 0, 4)
    found = _find(tmp_path, layout="vistas")
    assert found.labels == [str(Path("training", version, "labels", "a.png"))]
    assert found.classes == ["Bird", "Ego Vehicle", "Later"]
    assert found.table[:5].tolist() == [0, 1, IGNORE, 2, NO_CLASS]
    file.write_text('{"labels": [{"readable": "Bird"}]}')
    refused(DataError, lambda: _find(tmp_path, layout="vistas"), f"{file.name}: ", '"labels"', "'evaluate'")
    file.unlink()
    refused(DataError, lambda: _find(tmp_path, layout="vistas"), f"{file.name}: ", "No such file or directory")


@pytest.mark.parametrize("mode", ["P", "L", "I;16"])
def test_ids_are_read_unchanged_from_palette_and_gray_images(tmp_path: Path, table: np.ndarray, mode: str) -> None:
    classes = random_classes(1, 3)
    label_map(classes, mode).save(tmp_path / "x.png")
    read = read_label(tmp_path / "x.png", table)
    assert read.dtype == np.int32
    assert np.array_equal(read, classes)


@pytest.mark.parametrize(
    ("row", "bits", "ids"), [(b"\x40", 1, [0, 1]), (b"\x18", 2, [0, 1, 2]), (b"\x01\x20", 4, [0, 1, 2])]
)
def test_ids_of_less_than_8_bits_are_not_scaled(
    tmp_path: Path, table: np.ndarray, row: bytes, bits: int, ids: list[int]
) -> None:
    assert read_label(_png(tmp_path / "x.png", [row], len(ids), bits), table).tolist() == [ids]


def test_ids_of_16_bits_beyond_byte_are_classes_of_their_own(tmp_path: Path) -> None:
    table = _find(make_labeled(tmp_path / "data", 1, 1), num_classes=3000).table
    label_map([[0, 2999, 256]], "I;16").save(tmp_path / "x.png")
    assert read_label(tmp_path / "x.png", table).tolist() == [[0, 2999, 256]]


def test_exif_orientation_rotates_neither_image_nor_label_map(tmp_path: Path, table: np.ndarray) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    random_image(0).save(tmp_path / "a.jpg", exif=exif)
    label_map(random_classes(0, 3)).save(tmp_path / "a.png", exif=exif)
    image, classes = read_pair(tmp_path / "a.jpg", tmp_path / "a.png", table)
    assert (image.size, classes.shape) == ((12, 10), (10, 12))


def test_skipped_files_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = make_labeled(tmp_path)
    random_image(0).save(data / "train" / "images" / "000.jpg")
    (data / "train" / "images" / "notes.txt").touch()
    assert len(_find(data).images) == 5
    assert caplog.messages == [f"skipped 2 files, the first is notes.txt; {data}/train/images"]
