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
from zoo.data.segmentation.label_maps import (
    CITYSCAPES,
    COCO_STUFF,
    LAYOUTS,
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
    with pytest.raises(ConfigError, match=r"network\.num_classes = 4: the data have 3 classes \(ground, cat, "):
        _find(data, num_classes=4)
    (data / "classes.txt").write_bytes(b"\xff\n")
    with pytest.raises(DataError, match=r"classes\.txt: .*cannot be read: it is not UTF-8 text"):
        _find(data)
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
    with pytest.raises(ConfigError, match=r"network\.num_classes = 3: the data have 19 classes"):
        _find(tmp_path, layout="cityscapes")


def test_coco_stuff_has_91_stuff_classes_one_below_their_number(tmp_path: Path) -> None:
    for split in ("train2017", "val2017"):
        make_pair(tmp_path / f"images/{split}/1.jpg", tmp_path / f"annotations/{split}/1.png", 0, 3)
    found = _find(tmp_path, layout="coco_stuff", num_classes=91)
    assert (found.images, found.labels) == (["images/train2017/1.jpg"], ["annotations/train2017/1.png"])
    assert (len(COCO_STUFF), COCO_STUFF[0], COCO_STUFF[149 - 92], COCO_STUFF[-1]) == (91, "banner", "road", "wood")
    label_map([[0, 90, 91, 148, 181, 255]]).save(tmp_path / "x.png")
    assert read_label(tmp_path / "x.png", found.table).tolist() == [[255, 255, 0, 57, 90, 255]]
    label_map([[92, 183, 0]]).save(tmp_path / "x.png")
    with pytest.raises(DataError, match=r"x\.png: .*no class: 183 \(1 px\); correct"):
        read_label(tmp_path / "x.png", found.table)


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
    with pytest.raises(DataError, match=rf'{file.name}: .*no list "labels" .*KeyError: \'evaluate\''):
        _find(tmp_path, layout="vistas")
    file.unlink()
    with pytest.raises(DataError, match=f"{file.name}: .*No such file or directory"):
        _find(tmp_path, layout="vistas")


@pytest.mark.parametrize("mode", ["P", "L", "I;16"])
def test_ids_are_read_unchanged_from_palette_and_gray_images(tmp_path: Path, table: np.ndarray, mode: str) -> None:
    classes = random_classes(1, 3)
    label_map(classes, mode).save(tmp_path / "x.png")
    read = read_label(tmp_path / "x.png", table)
    assert read.dtype == np.int32
    assert np.array_equal(read, classes)


def test_ids_of_less_than_8_bits_are_not_scaled(tmp_path: Path, table: np.ndarray) -> None:
    assert read_label(_png(tmp_path / "1.png", [b"\x40"], 2, 1), table).tolist() == [[0, 1]]
    assert read_label(_png(tmp_path / "2.png", [b"\x18"], 3, 2), table).tolist() == [[0, 1, 2]]
    assert read_label(_png(tmp_path / "4.png", [b"\x01\x20"], 3, 4), table).tolist() == [[0, 1, 2]]


def test_ids_of_16_bits_beyond_byte_are_classes_of_their_own(tmp_path: Path) -> None:
    table = _find(make_labeled(tmp_path / "data", 1, 1), num_classes=3000).table
    label_map([[0, 2999, 256]], "I;16").save(tmp_path / "x.png")
    with pytest.raises(DataError, match="no class"):
        read_label(tmp_path / "x.png", _find(tmp_path / "data").table)
    assert read_label(tmp_path / "x.png", table).tolist() == [[0, 2999, 256]]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA"])
def test_colors_are_no_ids(tmp_path: Path, table: np.ndarray, mode: str) -> None:
    random_image(0).convert(mode).save(tmp_path / "x.png")
    with pytest.raises(DataError, match=rf"x\.png: a label map cannot be read: it has colors \(mode {mode}\)"):
        read_label(tmp_path / "x.png", table)


def test_label_out_of_range_is_named_with_its_number_of_pixels(tmp_path: Path, table: np.ndarray) -> None:
    label_map([[0, 3, 3, 254], [1, 2, 255, 3]]).save(tmp_path / "x.png")
    with pytest.raises(DataError, match=r"/x\.png: .*no class: 3 \(3 px\), 254 \(1 px\); correct"):
        read_label(tmp_path / "x.png", table)


def test_unreadable_label_map_is_named(tmp_path: Path, table: np.ndarray) -> None:
    path = tmp_path / "x.png"
    label_map(random_classes(0, 3, 60, 60)).save(path)
    whole = path.read_bytes()
    for content in (whole[:-40], b"", b"P5 2 1 255\n\0\1"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"x\.png: a label map cannot be read: ."):
            read_label(path, table)
    with pytest.raises(DataError, match="a label map cannot be read: No such file"):
        read_label(tmp_path / "none.png", table)


def test_image_and_label_map_of_different_sizes_are_both_named(tmp_path: Path, table: np.ndarray) -> None:
    random_image(0).save(tmp_path / "a.jpg")
    label_map(random_classes(0, 3, 10, 12)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"a\.jpg and .*a\.png: .*12 x 10 px but its label map 10 x 12"):
        read_pair(tmp_path / "a.jpg", tmp_path / "a.png", table)


def test_exif_orientation_rotates_neither_image_nor_label_map(tmp_path: Path, table: np.ndarray) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    random_image(0).save(tmp_path / "a.jpg", exif=exif)
    label_map(random_classes(0, 3)).save(tmp_path / "a.png", exif=exif)
    image, classes = read_pair(tmp_path / "a.jpg", tmp_path / "a.png", table)
    assert (image.size, classes.shape) == ((12, 10), (10, 12))


def test_files_without_counterpart_are_all_named(tmp_path: Path) -> None:
    data = make_labeled(tmp_path)
    (data / "train" / "labels" / "002.png").unlink()
    (data / "train" / "images" / "sub" / "003.png").unlink()
    named = r"002\.png has no label map 002\.png, sub/003\.png has no image; add the missing files"
    with pytest.raises(DataError, match=rf"train/images and .*train/labels: {named}"):
        _find(data)


def test_files_not_read_as_images_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = make_labeled(tmp_path)
    random_image(0).save(data / "train" / "images" / "000.jpg")
    (data / "train" / "images" / "notes.txt").touch()
    assert len(_find(data).images) == 5
    assert caplog.messages == [f"skipped 2 files, the first is notes.txt; {data}/train/images"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_missing_folder_is_named(tmp_path: Path, layout: str) -> None:
    with pytest.raises(DataError, match=rf"there is no such folder; segmentation\.layout {layout} needs it"):
        _find(tmp_path, layout=layout)


def test_empty_folder_raises(tmp_path: Path) -> None:
    for name in ("images", "labels"):
        (tmp_path / "train" / name).mkdir(parents=True)
    with pytest.raises(
        DataError, match=r"train/images: .*no image in the folder; images of layout folders end in \.jpg"
    ):
        _find(tmp_path)
