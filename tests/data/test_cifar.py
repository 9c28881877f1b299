"""CIFAR becomes class folders that zoo trains on, whatever form it comes in, and only the owners' pickles are read."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import CIFAR10

from tests.data.distributed import cifar_batch, md5_of, python2_pickle, write_tar
from zoo.data.prepare.cifar import unpack_cifar
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


def release_of(files: dict[str, bytes], archive_md5: str = "", key: str = "label_names") -> type[CIFAR10]:
    """Return torchvision's data set, made of ``files``."""

    class Small(CIFAR10):
        filename, tgz_md5, base_folder = "small.tar.gz", archive_md5, "small-py"
        train_list = [[name, md5_of(files[name])] for name in ("first", "second")]  # noqa: RUF012
        test_list = [["test", md5_of(files["test"])]]  # noqa: RUF012
        meta = {"filename": "meta", "key": key, "md5": md5_of(files["meta"])}  # noqa: RUF012

    return Small


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
    for number, source in enumerate(["a/small.tar.gz", "a", "b", "b/small-py"]):
        unpack_cifar(release, tmp_path / source, tmp_path / f"out{number}", no_progress)
    found = [{path.relative_to(out): path.read_bytes() for path in out.rglob("*.png")} for out in tmp_path.glob("out*")]
    assert len(found) == 4
    assert len(found[0]) == 9
    assert all(each == found[0] for each in found)


def test_a_wrong_digest_is_refused_for_each_file_and_for_the_archive(tmp_path: Path) -> None:
    files = files_of()
    release = release_of(files, "0" * 32)
    for name in files:
        folder = write_folder(tmp_path / f"of-{name}", {**files, name: files[name] + b" "})
        with pytest.raises(DataError, match=rf"md5 is {md5_of(files[name] + b' ')}, not {md5_of(files[name])}.*{name}"):
            unpack_cifar(release, folder, tmp_path / "out", no_progress)
    write_tar(tmp_path / "small.tar.gz", {f"small-py/{name}": files[name] for name in files})
    with pytest.raises(DataError, match=rf", not {'0' * 32}; .*small.tar.gz: download it again"):
        unpack_cifar(release, tmp_path / "small.tar.gz", tmp_path / "out", no_progress)
    assert not (tmp_path / "out").exists()


def test_a_source_without_the_files_says_what_is_looked_for(tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "missing.tar.gz"):
        with pytest.raises(DataError, match=r"neither small.tar.gz nor small-py/"):
            unpack_cifar(release_of(files_of()), source, tmp_path / "out", no_progress)


class Evil:
    """A pickle that makes a folder when it is read."""

    def __init__(self, call: Callable[..., object], *args: object) -> None:
        self.reduced = call, args

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize("is_archive", [False, True])
def test_a_file_that_changes_after_its_md5_was_compared_is_not_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_archive: bool
) -> None:
    evil = pickle.dumps({"labels": Evil(os.mkdir, str(tmp_path / "made"))})
    files = files_of()
    monkeypatch.setattr("zoo.data.prepare.cifar.check_md5", lambda file, md5: None)
    changed = {**files, "test": evil}
    source = tmp_path / "small.tar.gz"
    if is_archive:
        write_tar(source, {f"small-py/{name}": changed[name] for name in changed})
    else:
        source = write_folder(tmp_path / "small-py", changed)
    with pytest.raises(DataError, match="are not the original ones; download the data set again"):
        unpack_cifar(release_of(files), source, tmp_path / "out", no_progress)
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / "out").exists()
