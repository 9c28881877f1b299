"""Parquet files of Hugging Face, written here by pyarrow, become shards of the same images."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.sample_images import CLASSES, make_folder, make_splits
from zoo.cli import main
from zoo.data.folder import open_source
from zoo.data.imagenet import imagenet_names, imagenet_wnids
from zoo.data.prepare import parquet
from zoo.data.prepare.parquet import ParquetImages, as_imagenet_wnids, parquet_files
from zoo.data.prepare.write_shards import open_shardable
from zoo.data.shards import Shards
from zoo.data.source import FolderSource
from zoo.errors import DataError, ZooError

pa = pytest.importorskip("pyarrow", exc_type=ImportError)  # the newest one needs numpy 2
pq = pytest.importorskip("pyarrow.parquet")

NAMES = list(CLASSES)
IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


def _table(images: list, labels: list, names: list[str] | None = NAMES, image=IMAGE, label=None):
    """Return a table with the schema that Hugging Face's datasets package gives images with classes."""
    label = label or pa.int64()
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    metadata = None if names is None else {"huggingface": json.dumps({"info": {"features": features}})}
    schema = pa.schema({"image": image, "label": label}, metadata=metadata)
    return pa.table({"image": pa.array(images, image), "label": pa.array(labels, label)}, schema=schema)


def _rows(folder: FolderSource) -> tuple[list, list]:
    """Return the images and labels of a folder, in an order in which the classes are mixed."""
    order = np.random.default_rng(0).permutation(len(folder.names)).tolist()
    paths = [os.path.basename(os.fsdecode(folder.names[index])) for index in order]
    images = [{"bytes": folder.read(index), "path": path} for index, path in zip(order, paths, strict=True)]
    return images, folder.targets[order].tolist()


def _write(folder: Path, split: str, images: list, labels: list, count: int = 3, **options: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(np.array_split(np.arange(len(images)), count)):
        table = _table([images[index] for index in part], [labels[index] for index in part])
        options = {"row_group_size": 3, **options}
        pq.write_table(table, folder / f"{split}-{number:05}-of-{count:05}.parquet", **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_splits(tmp_path / "folder")


@pytest.fixture
def data(folder: Path, tmp_path: Path) -> Path:
    for split, name in (("train", "train"), ("val", "validation")):
        _write(tmp_path / "hub" / "data", name, *_rows(FolderSource(folder / split)))
    return tmp_path / "hub"


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "snappy"},
        {"compression": "none", "use_dictionary": False},
        {"compression": "zstd", "data_page_version": "2.0"},
        {"compression": "gzip", "write_page_checksum": True},
        {"compression": "snappy", "write_page_index": True, "data_page_size": 100, "row_group_size": 100},
        {"compression": "brotli", "row_group_size": 1},
    ],
    ids=str,
)
def test_every_image_is_there_with_its_class(folder: Path, tmp_path: Path, options: dict[str, object]) -> None:
    images, labels = _rows(FolderSource(folder / "train"))
    _write(tmp_path / "data", "train", images, labels, **options)
    source = open_shardable(tmp_path / "train")
    assert type(source) is ParquetImages
    assert source.classes == NAMES
    assert source.targets.tolist() == labels
    order = np.random.default_rng(1).permutation(21).tolist()
    assert [source.read(index) for index in order] == [images[index]["bytes"] for index in order]
    assert source.names[8] == f"train-00001-of-00003.parquet/1/{images[8]['path']}".encode()


def test_files_are_found_where_hugging_face_has_them(tmp_path: Path) -> None:
    table = _table([{"bytes": b"x", "path": None}], [0])
    places = {
        "data/train-00000-of-00001.parquet": "train",
        "data/validation-00000-of-00001.parquet": "val",
        "train-00000-of-00001.parquet": "train",
        "val-00000-of-00001.parquet": "val",
        "train/0000.parquet": "train",
        "val/a.parquet": "val",
        "validation/0000.parquet": "val",
    }
    for number, (name, split) in enumerate(places.items()):
        path = tmp_path / str(number) / name
        path.parent.mkdir(parents=True)
        pq.write_table(table, path)
        (path.parent / ".hidden.parquet").write_bytes(b"")
        other = {"train": "val", "val": "train"}[split]
        assert parquet_files(path.parents[name.count("/")] / split) == [path]
        assert parquet_files(path.parents[name.count("/")] / other) == []
    (tmp_path / "0" / "train-0.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"there are several sets of Parquet files: .*keep one"):
        open_shardable(tmp_path / "0" / "train")
    make_folder(tmp_path / "0" / "train", {"a": 1})
    assert type(open_shardable(tmp_path / "0" / "train")) is FolderSource


def test_no_more_row_groups_are_kept_than_fit(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_shardable(data / "train")
    largest = max(group.num_bytes for group in source._groups)
    monkeypatch.setattr(parquet, "CACHE_BYTES", 2 * largest)
    opened = []
    real = parquet._opened
    monkeypatch.setattr(parquet, "_opened", lambda path: opened.append(path) or real(path))
    order = source.order(torch.Generator().manual_seed(0), None)
    for index in order.tolist():
        source.read(index)
        assert sum(images.nbytes for images in source._kept.values()) <= 2 * largest
    assert len(opened) == 9  # each row group once
    monkeypatch.setattr(parquet, "CACHE_BYTES", 1)
    assert sorted(source.order(torch.Generator(), None).tolist()) == list(range(21))
    source = open_shardable(data / "train")
    for index in (0, 20):
        source.read(index)
    assert len(source._kept) == 1


def test_they_become_tar_files(data: Path, tmp_path: Path) -> None:
    images = [{"bytes": image["bytes"], "path": None} for image in _rows_of(data)]
    _write(tmp_path / "nameless", "train", images, [0] * 7 + [1] * 7 + [2] * 7)
    assert main(["data", "shard", str(tmp_path / "nameless"), str(tmp_path / "shards"), "--per-shard", "8"]) == 0
    source = open_source(tmp_path / "shards" / "train")
    assert type(source) is Shards
    assert sorted(source.read(index) for index in range(21)) == sorted(image["bytes"] for image in images)
    assert source.classes == NAMES


def _rows_of(data: Path) -> list[dict[str, bytes]]:
    source = open_shardable(data / "train")
    return [{"bytes": source.read(index)} for index in range(len(source.names))]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (lambda: _table([None, {"bytes": b"x"}], [0, None]), "row 1 has label None, not a class from 0 to 2"),
        (lambda: _table([None, None], [0, 3]), "row 1 has label 3, not a class from 0 to 2"),
        (lambda: _table([None], [-1]), "row 0 has label -1, not a class from 0 to 2"),
        (lambda: _table([None], [2**63 - 1], names=None), f"row 0 has label {2**63 - 1}, not a class from 0 to 99,999"),
        (lambda: _table([None], [2**64 - 1], label=pa.uint64()), f"row 0 has label {2**64 - 1}, not a class"),
        (lambda: _table([None], ["a"], label=pa.string()), "column label is string, not whole numbers"),
        (lambda: _table([b"x"], [0], image=pa.binary()), "column image is binary, not a struct of bytes and path"),
        (
            lambda: pa.table({"img": [b"x"], "label": [0]}),
            "column image is None, not a struct of bytes and path; columns: img, label",
        ),
        (lambda: _table([None], [0], names=["a", "a"]), "several classes have the same name: a"),
        (lambda: _table([None], [0], names=[]), "names of the classes in the metadata of the schema are not a list"),
        (
            lambda: _table([None], [0]).replace_schema_metadata({"huggingface": "[" * 9}),
            "the metadata of the schema, huggingface, does not describe the labels",
        ),
        (lambda: pa.table({"image": pa.array([], IMAGE), "label": pa.array([], pa.int64())}), None),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path: Path, table, message: str | None) -> None:
    (tmp_path / "train").mkdir()
    pq.write_table(table(), tmp_path / "train" / "0.parquet")
    place = "0.parquet: download it again" if message else "it needs one folder per class"
    with pytest.raises(DataError, match=f"{message or 'there are 0 class'}.*{place}"):
        open_shardable(tmp_path / "train")


def test_all_files_have_the_same_classes(data: Path) -> None:
    path = data / "data" / "train-00001-of-00003.parquet"
    pq.write_table(_table([{"bytes": b"x"}], [0], names=["ant", "cat", "bee"]), path)
    with pytest.raises(DataError, match=f"the names of the classes differ from those of .*00000-of-00003.*{path}"):
        open_shardable(data / "train")


def test_a_row_without_an_image_is_named_when_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    rows = [{"bytes": b"x", "path": "a"}, {"bytes": None, "path": "/b/c.jpg"}, None]
    pq.write_table(_table(rows, [0, 1, 2]), tmp_path / "train" / "0.parquet")
    source = open_shardable(tmp_path / "train")
    assert source.read(0) == b"x"
    for index, place in ((1, "0.parquet/1/c.jpg"), (2, "0.parquet/2")):
        with pytest.raises(DataError, match=f"an image cannot be read: the row has no image.bytes; .*train/{place}$"):
            source.read(index)


def test_damaged_bytes_end_in_one_message_or_leave_the_images_as_they_are(tmp_path: Path, folder: Path) -> None:
    """The files have checksums here, so that no byte can change unnoticed."""
    images, labels = _rows(FolderSource(folder / "train"))
    _write(tmp_path / "data", "train", images, labels, 1, write_page_checksum=True)
    path = tmp_path / "data" / "train-00000-of-00001.parquet"
    whole = path.read_bytes()
    generator = np.random.default_rng(0)
    outcomes = set()
    for place in generator.choice(len(whole), 150, replace=False):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(generator.integers(8))
        path.write_bytes(damaged)
        try:
            source = open_shardable(tmp_path / "train")
            read = [source.read(index) for index in range(len(source.names))]
        except ZooError as error:
            outcomes.add("named" if path.name in str(error) else str(error))
        else:
            outcomes.add("whole" if read == [image["bytes"] for image in images] else "changed")
    assert outcomes == {"whole", "named"}


def test_an_image_that_is_stored_once_and_read_often_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train").mkdir()
    path = tmp_path / "train" / "0.parquet"
    pq.write_table(_table([{"bytes": b"x" * 100_000, "path": None}] * 500, [0] * 500, names=None), path)
    assert path.stat().st_size < 20_000
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 1_000_000)
    with pytest.raises(DataError, match=r"row group 0 has more than 1,000,000 bytes of images; .*0.parquet/3"):
        open_shardable(tmp_path / "train").read(3)
    pq.write_table(_table([{"bytes": b"x", "path": None}] * 100_000, [0] * 100_000, names=None), path)
    with pytest.raises(DataError, match=r"it has 100,000 rows, and not even a byte for each of them; .*0.parquet"):
        open_shardable(tmp_path / "train")


@pytest.mark.parametrize("suffix", ["", "-1a2b"])
def test_missing_files_are_logged(data: Path, suffix: str, caplog: pytest.LogCaptureFixture) -> None:
    (data / "data" / "train-00001-of-00003.parquet").unlink()
    for number in (0, 2):
        path = data / "data" / f"train-0000{number}-of-00003.parquet"
        path.rename(path.with_stem(f"{path.stem}{suffix and suffix + str(number)}"))  # each has a hash of its own
    open_shardable(data / "train")
    assert "1 of 3 Parquet files are missing" in caplog.text


@pytest.mark.parametrize(
    "other",
    ["train-00000-of-00002.parquet", "train-00000-of-00003-1a2b.parquet", "train-original-00000-of-00003.parquet"],
)
def test_files_of_two_sets_in_one_folder_are_refused(data: Path, other: str) -> None:
    """Images that were distributed anew in another number of files would be there twice."""
    first = "train-00000-of-00003.parquet"
    (data / "data" / other).write_bytes((data / "data" / first).read_bytes())
    with pytest.raises(DataError, match=r"there are several sets of Parquet files: .*: keep one of them") as caught:
        open_shardable(data / "train")
    assert {first, other} == {Path(name).name for name in str(caught.value).split(": ")[1].split("; ")[0].split(", ")}
    assert main(["data", "shard", str(data), str(data / "out")]) == 2


def test_without_pyarrow_one_message_says_what_to_install(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(
        DataError, match=r'read with pyarrow, .*hub/train: install it with pip install "zoo-lean\[parquet\]"'
    ):
        open_shardable(data / "train")


def _synonyms() -> list[str]:
    """Return the names of ImageNet as WordNet and Hugging Face have them, as far as they differ from torchvision's."""
    names = [f"{name}, another name of it" for name in imagenet_names()]
    names[134], names[517], names[639] = "crane", "crane2", "maillot, tank suit"
    return names


def test_classes_of_imagenet_are_wnids(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    pq.write_table(_table([{"bytes": b"x"}], [999], names=_synonyms()), tmp_path / "train" / "0.parquet")
    assert open_shardable(tmp_path / "train", allow_empty_classes=True).classes == list(imagenet_wnids())


def test_names_of_imagenet_in_another_order_are_refused() -> None:
    names = _synonyms()
    assert as_imagenet_wnids(names) == imagenet_wnids()
    swapped = [[*names[:here], names[here + 1], names[here], *names[here + 2 :]] for here in (0, 134, 516, 638, 639)]
    for changed in (names[1:] + names[:1], sorted(names), *swapped):
        with pytest.raises(DataError, match="are not in the order of their wnids"):
            as_imagenet_wnids(changed)
    others = [f"class {number}" for number in range(1000)]
    assert as_imagenet_wnids(others) == others
    assert as_imagenet_wnids(names[:999]) == names[:999]


def test_training_names_the_command_that_makes_shards_of_parquet_files(data: Path, tmp_path: Path) -> None:
    make = r"Parquet files are not read directly; .*\.parquet: convert them to shards with zoo data shard DATA OUT"
    (tmp_path / "hub2" / "train").mkdir(parents=True)
    pq.write_table(_table([{"bytes": b"x"}], [0]), tmp_path / "hub2" / "train" / "0.parquet")
    for root in (data / "train", data / "val", tmp_path / "hub2" / "train"):
        with pytest.raises(DataError, match=make):
            open_source(root)
    assert main(["data", "index", str(tmp_path / "hub2")]) == 2
