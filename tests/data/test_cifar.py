"""CIFAR becomes class folders that zoo trains on, whatever form it comes in, and nothing in its pickles is called."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.distributed import cifar_batch, md5_of, python2_pickle, write_tar
from zoo.data import cifar
from zoo.data.cifar import CIFAR, CifarRelease, unpack_cifar
from zoo.data.scan import scan_folder
from zoo.errors import DataError

BATCHES = {"first": [1, 0], "second": [0, 2, 1, 2], "test": [2, 1, 0]}
NAMES = ["bird", "cat", "tall_ship"]


def no_progress(split: str, total: int) -> Any:
    return nullcontext(SimpleNamespace(advance=lambda count: None))


def files_of(labels_key: bytes = b"labels", names_key: bytes = b"label_names") -> dict[str, bytes]:
    """Return the files of a small data set: three classes, two training images and one other of each."""
    batches = {name: cifar_batch(labels, seed, labels_key) for seed, (name, labels) in enumerate(BATCHES.items(), 1)}
    names = {names_key: [name.encode() for name in NAMES], b"num_vis": 3072}
    return {name: python2_pickle(content) for name, content in {**batches, "meta": names}.items()}


def release_of(files: dict[str, bytes], archive_md5: str = "") -> CifarRelease:
    """Return the release that consists of ``files``."""

    def md5s(*names: str) -> dict[str, str]:
        return {name: md5_of(files[name]) for name in names}

    return CifarRelease(
        "small.tar.gz", archive_md5, "small-py", md5s("first", "second"), md5s("test"), md5s("meta"),
        b"label_names", b"labels", 3, (2, 1),
    )  # fmt: skip


def write_folder(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_images_keep_their_pixels_their_classes_and_their_numbers(tmp_path: Path) -> None:
    files = files_of()
    md5s = unpack_cifar(release_of(files), write_folder(tmp_path / "small-py", files), tmp_path / "out", no_progress)
    assert md5s == {name: md5_of(content) for name, content in files.items()}
    scan = scan_folder(tmp_path / "out" / "train")
    assert scan.classes == NAMES
    wanted = {b"cat/00000.png", b"bird/00001.png", b"bird/00002.png", b"tall_ship/00003.png", b"cat/00004.png"}
    assert set(scan.names) == wanted | {b"tall_ship/00005.png"}
    pixels: np.ndarray = cifar_batch(BATCHES["second"], 2)[b"data"]
    red, green, blue = pixels[1].reshape(3, 32, 32)  # the second of the second file: number 3
    image = Image.open(tmp_path / "out" / "train" / "tall_ship" / "00003.png")
    assert np.array_equal(np.asarray(image), np.stack([red, green, blue], axis=-1))
    assert set(scan_folder(tmp_path / "out" / "val").names) == {
        b"tall_ship/00000.png",
        b"cat/00001.png",
        b"bird/00002.png",
    }


def test_archive_unpacked_folder_and_the_folders_around_them_give_the_same(tmp_path: Path) -> None:
    files = files_of()
    archive = tmp_path / "a" / "small.tar.gz"
    archive.parent.mkdir()
    release = release_of(files, write_tar(archive, {f"small-py/{name}": files[name] for name in files}))
    write_folder(tmp_path / "b" / "small-py", files)
    sources = {"a/small.tar.gz", "a", "b", "b/small-py"}
    for number, source in enumerate(sources):
        unpack_cifar(release, tmp_path / source, tmp_path / f"out{number}", no_progress)
    found = [{path.relative_to(out): path.read_bytes() for path in out.rglob("*.png")} for out in tmp_path.glob("out*")]
    assert len(found) == 4
    assert len(found[0]) == 9
    assert all(each == found[0] for each in found)


def test_the_finer_classes_of_cifar100_are_those_that_count() -> None:
    assert (CIFAR["cifar100"].labels_key, CIFAR["cifar100"].names_key) == (b"fine_labels", b"fine_label_names")
    assert [each.num_classes * sum(each.per_class) for each in CIFAR.values()] == [60_000, 60_000]


def test_a_wrong_digest_is_refused_for_each_file_and_for_the_archive(tmp_path: Path) -> None:
    files = files_of()
    release = release_of(files, "0" * 32)
    for name in files:
        folder = write_folder(tmp_path / f"of-{name}", {**files, name: files[name] + b" "})
        with pytest.raises(
            DataError, match=rf"md5 is {md5_of(files[name] + b' ')} and not {md5_of(files[name])}.*{name}"
        ):
            unpack_cifar(release, folder, tmp_path / "out", no_progress)
    write_tar(tmp_path / "small.tar.gz", {f"small-py/{name}": files[name] for name in files})
    with pytest.raises(DataError, match=rf"and not {'0' * 32}; .*small.tar.gz: download it again"):
        unpack_cifar(release, tmp_path / "small.tar.gz", tmp_path / "out", no_progress)
    assert not (tmp_path / "out").exists()


def test_a_source_without_the_files_says_what_is_looked_for(tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "missing.tar.gz"):
        with pytest.raises(DataError, match=r"neither small.tar.gz nor small-py/"):
            unpack_cifar(release_of(files_of()), source, tmp_path / "out", no_progress)


def test_what_is_there_already_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "out" / "train").mkdir(parents=True)
    with pytest.raises(DataError, match="something already"):
        unpack_cifar(release_of(files_of()), tmp_path / "nowhere", tmp_path / "out", no_progress)


class Evil:
    """A pickle that makes a folder when it is read."""

    def __init__(self, call: Callable[..., object], *args: object) -> None:
        self.reduced = call, args

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_calls_something_is_refused_and_calls_nothing(tmp_path: Path, protocol: int) -> None:
    evil = pickle.dumps({"labels": Evil(os.mkdir, str(tmp_path / "made"))}, protocol)
    assert pickle.loads(evil)
    (tmp_path / "made").rmdir()
    files = {**files_of(), "test": evil}
    with pytest.raises(DataError, match=r"test cannot be read: it would call (posix|nt)\.mkdir"):
        unpack_cifar(release_of(files), write_folder(tmp_path / "in", files), tmp_path / "out", no_progress)
    assert not (tmp_path / "made").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


@pytest.mark.parametrize("known", ["numpy.core.multiarray _reconstruct", "numpy ndarray", "numpy dtype"])
def test_not_even_numpy_is_called(known: str) -> None:
    """Its functions would trust the sizes and formats that a pickle gives them."""
    module, name = known.split()
    unpickler = cifar._DataUnpickler(io.BytesIO())
    with pytest.raises(pickle.UnpicklingError):
        unpickler.find_class(module, f"{name}x")
    stand_in = unpickler.find_class(module, name)
    assert stand_in(1, "b").args == (1, "b")
    assert stand_in.__module__ == "zoo.data.cifar"


@pytest.mark.parametrize(
    "name",
    ["../../outside", "/absolute", "a/b", "..", "", "bird"],
    ids=["up", "root", "nested", "dots", "none", "twice"],
)
def test_the_name_of_a_class_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    names = {b"label_names": [b"bird", name.encode(), b"cat"]}
    files = {**files_of(), "meta": python2_pickle(names)}
    with pytest.raises(DataError, match=r"meta cannot be read: .* are not names of 3 classes"):
        unpack_cifar(release_of(files), write_folder(tmp_path / "in", files), tmp_path / "out", no_progress)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("second", cifar_batch([0, 2, 1, 1]), "train has not 2 images of each class"),
        ("test", cifar_batch([0, 1]), "val has not 1 images of each class"),
        ("test", cifar_batch([0, 1, 3]), "of other classes"),
        ("test", {**cifar_batch([0, 1, 2]), b"labels": [0, 1]}, "cannot reshape"),
        ("test", {b"labels": [0, 1, 2]}, "test cannot be read: b'data'"),
        ("test", {**cifar_batch([0]), b"data": np.zeros((1, 3071), np.uint8)}, "cannot reshape"),
    ],
    ids=["another class", "too few", "no such class", "labels missing", "no images", "another size"],
)  # fmt: skip
def test_images_that_are_not_those_of_the_data_set_are_refused(
    tmp_path: Path, name: str, content: dict[bytes, Any], message: str
) -> None:
    files = {**files_of(), name: python2_pickle(content)}
    with pytest.raises(DataError, match=message):
        unpack_cifar(release_of(files), write_folder(tmp_path / "in", files), tmp_path / "out", no_progress)
    assert not (tmp_path / "out").exists()


def test_damaged_pickles_are_one_error(tmp_path: Path) -> None:
    files = files_of()
    for number, damaged in enumerate((b"", files["test"][:50], b"\x80\2N.", b"garbage")):
        broken = {**files, "test": damaged}
        with pytest.raises(DataError, match=r"test cannot be read: .*: download the data again"):
            unpack_cifar(
                release_of(broken), write_folder(tmp_path / str(number), broken), tmp_path / "out", no_progress
            )


def test_other_keys_are_read_for_cifar100(tmp_path: Path) -> None:
    files = files_of(b"fine_labels", b"fine_label_names")
    release = replace(release_of(files), names_key=b"fine_label_names", labels_key=b"fine_labels")
    unpack_cifar(release, write_folder(tmp_path / "in", files), tmp_path / "out", no_progress)
    assert len(list((tmp_path / "out").rglob("*.png"))) == 9
