"""Shards hold the images of the folders that they were made from, and errors name damaged files."""

from __future__ import annotations

import codecs
import errno
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.sample_images import small_experiment
from tests.refusals import refused
from zoo.cli import main
from zoo.data.dataset import ImageFolder, open_source
from zoo.data.loader import build_train_loader
from zoo.data.prepare.write_shards import write_shards
from zoo.data.sources.folder import FolderSource
from zoo.data.sources.index import index_path
from zoo.data.sources.shards import Shards
from zoo.data.transforms.classification import TrainTransform
from zoo.errors import DataError
from zoo.files import file_lock


def test_shards_hold_files_of_folder_in_another_order(originals: Path) -> None:
    folder, source = FolderSource(originals / "folder/train"), open_source(originals / "shards/train")
    assert type(source) is Shards
    assert source.classes == folder.classes == ["ant", "bee", "cat"]
    expected, found = ([(each.read(i), int(each.targets[i])) for i in range(21)] for each in (folder, source))
    assert found != expected
    assert sorted(found) == sorted(expected)
    names = [*(f"{number:06}.tar" for number in range(6)), "classes.txt"]
    assert sorted(path.name for path in (originals / "shards/train").iterdir()) == names
    with tarfile.open(originals / "shards/train/000001.tar") as tar:
        assert tar.getnames() == [f"{number:09}.{kind}" for number in range(4, 8) for kind in ("png", "cls")]
        for number in range(4, 8):
            assert tar.extractfile(f"{number:09}.png").read() == source.read(number)
            assert int(tar.extractfile(f"{number:09}.cls").read()) == source.targets[number]
    val, val_folder = open_source(originals / "shards/val"), FolderSource(originals / "folder/val")
    assert [val.read(index) for index in range(21)] == [val_folder.read(index) for index in range(21)]


def test_command_writes_bits_of_seed_with_another_digest(originals: Path, tmp_path: Path) -> None:
    digests = set()
    for seed in ("0", "1"):
        out = tmp_path / seed
        assert main(["data", "shard", str(originals / "folder"), str(out), "--per-shard", "4", "--seed", seed]) == 0
        files = (originals / "shards/train").iterdir()
        assert all(path.read_bytes() == (out / "train" / path.name).read_bytes() for path in files) is (seed == "0")
        digests.add(build_train_loader(out, small_experiment()).dataset.names_digest())
    assert len(digests) == 2


def test_shards_are_written_completely_or_not_at_all(
    originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "shard", str(originals / "folder"), str(originals / "shards")]) == 2
    assert "OUT exists and is not overwritten" in capsys.readouterr().err
    assert len(list((originals / "shards/train").glob("*.tar"))) == 6
    read = FolderSource.read
    monkeypatch.setattr(FolderSource, "read", lambda self, index: read(self, index) if index != 7 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_shards(FolderSource(originals / "folder/train"), tmp_path / "new", per_shard=4, seed=None)
    assert not list(tmp_path.glob("new*"))


def test_window_shuffles_shards_and_images_of_few_of_them(originals: Path) -> None:
    source = open_source(originals / "shards/train")
    shard_of = np.array([int(name[:6]) for name in source.names])
    seen = set()
    for seed in range(20):
        order = source.order(torch.Generator().manual_seed(seed), 2).numpy()
        assert sorted(order) == list(range(21))
        numbers = shard_of[order]
        windows = [set(numbers[:8]), set(numbers[8:16]), set(numbers[16:])]
        if 5 in windows[2] and len(windows[0] | windows[1]) == 4:  # the short last shard is in the last window
            assert [len(window) for window in windows] == [2, 2, 2]
        assert int((np.diff(numbers) != 0).sum()) > 5  # the images of a window are mixed
        seen.add(tuple(order))
    assert len(seen) == 20
    whole, generator = source.order(torch.Generator().manual_seed(1), None), torch.Generator().manual_seed(1)
    assert torch.equal(whole, torch.randperm(21, generator=generator))


def _write_tar(path: Path, members: dict[str, bytes | tarfile.TarInfo]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
                continue
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def _special(kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo("1.png")
    member.type, member.linkname = kind, "/etc/passwd"
    return member


def test_external_shards_are_indexed_on_first_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, image = tmp_path / "others/train", b"any bytes"
    members = {"x/1.PNG": image, "x/1.txt": b"an ant", "x/1.cls": b"2", "2.cls": b"0", "2.png": image}
    hidden = {"x/._1.png": b"", "x/.DS_Store": b"", "__MACOSX/x/1.png": b"", "._1.cls": b""}
    _write_tar(root / "a-0.tar", {**hidden, **members})
    _write_tar(root / "a-1.tar", {"3.json": b'{"label": 1, "url": "?"}', "3.png": image})
    source = open_source(root)
    assert source.classes == ["0", "1", "2"]
    assert source.targets.tolist() == [2, 0, 1]
    assert source.names.tolist() == [b"a-0.tar/x/1", b"a-0.tar/2", b"a-1.tar/3"]
    assert [source.read(index) for index in range(3)] == [image] * 3
    assert f"skipped 4 files, the first is x/._1.png; {root / 'a-0.tar'}" in caplog.messages
    assert index_path(root).is_file()
    (root / "classes.txt").write_text("ant\nbee\ncat\ndog\n")
    index_path(root).unlink()
    assert open_source(root, allow_empty_classes=True).classes == ["ant", "bee", "cat", "dog"]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"\xef\xbb\xbfant\nbee\ncat\n", None),
        (b"ant\r\nbee\r\ncat\r\n", None),
        (b"ant \n\tbee\ncat\n\n\n", None),
        ("ant\r\nbee\r\ncat".encode("utf-16"), None),
        (codecs.BOM_UTF16_BE + "ant\nbee\ncat\n".encode("utf-16-be"), None),
        ("ant\nbee\ncat\n".encode("utf-16-le"), "UTF-8"),
        (b"ant\n \ncat\n", "line 2"),
    ],
)
def test_class_names_are_the_same_from_every_editor(shards: Path, content: bytes, fault: str | None) -> None:
    (shards / "train/classes.txt").write_bytes(content)
    index_path(shards / "train").unlink()
    if fault is None:
        assert open_source(shards / "train").classes == ["ant", "bee", "cat"]
    else:
        refused(DataError, lambda: open_source(shards / "train"), "classes.txt: ", fault)


@pytest.mark.parametrize("names", [["bug", "bee", "cat"], ["bee", "ant", "cat"], ["ant", "bee", "cat", "dog"], None])
def test_class_names_other_than_in_index_raise(shards: Path, names: list[str] | None) -> None:
    """None: the file was removed, and the classes are called by their numbers."""
    path = shards / "train/classes.txt"
    path.unlink() if names is None else path.write_text("\n".join(names))
    refused(DataError, lambda: Shards(shards / "train"), "classes.txt", "ant, bee, cat")
    index_path(shards / "train").unlink()
    assert Shards(shards / "train", allow_empty_classes=True).classes == (names or ["0", "1", "2"])


@pytest.mark.parametrize(
    ("members", "names"),
    [
        ({"1.png": _special(tarfile.SYMTYPE)}, ["1.png", "link"]),
        ({"1.png": _special(tarfile.CHRTYPE)}, ["1.png", "device"]),
        ({"1.png": b"x"}, ["sample 1 ", "1.cls", ".json"]),
        ({"1.cls": b"1"}, ["sample 1 ", "0 images"]),
        ({"cat.v2.png": b"x", "cat.v2.cls": b"1"}, ["sample cat ", "0 images", "cat.v2.png, cat.v2.cls", "first dot"]),
        ({"n01_1.JPEG": b"x", "n01_2.JPEG": b"x"}, ["sample n01_1 ", "archive of one class"]),
        ({"1.png": b"x", "1.jpg": b"x", "1.cls": b"1"}, ["sample 1 ", "2 images"]),
        ({"1.png": b"x", "1.PNG": b"x", "1.cls": b"1"}, ["1.PNG"]),
        ({"1.png": b"x", "1.cls": b"one"}, ["sample 1 ", ".cls"]),
        ({"1.png": b"x", "1.cls": b"-1"}, [".cls", "0 to 99,999"]),
        ({"1.png": b"x", "1.cls": b"9" * 5000}, [".cls"]),
        ({"1.png": b"x", "1.json": b'{"label": true}'}, ["label", ".json"]),
        ({"1.png": b"x", "1.json": b"[" * 100_000}, ["label", ".json"]),
        ({"1.png": b"x", "1.json": b'{"label": 1}' + b" " * 200_000}, ["sample 1 ", "200,012 bytes", "200,000"]),
    ],
)
def test_unreadable_shards_are_named(
    tmp_path: Path, members: dict[str, Any], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.data.sources.shards.MAX_IMAGE_BYTES", 200_000)
    _write_tar(tmp_path / "train/0.tar", members)
    refused(DataError, lambda: open_source(tmp_path / "train"), "train/0.tar: ", *names)
    assert not index_path(tmp_path / "train").exists()


def test_index_that_does_not_fit_raises(shards: Path) -> None:
    path = index_path(shards / "train")
    whole = path.read_bytes()
    for content in (b"", whole[:5], whole[: len(whole) // 2], whole[:-1]):
        path.write_bytes(content)
        refused(DataError, lambda: Shards(shards / "train"), "train.index: ")
    path.write_bytes(whole)
    (shards / "train/000005.tar").unlink()
    refused(DataError, lambda: Shards(shards / "train"), "train.index: ")


@pytest.mark.parametrize(
    "damage",
    [
        lambda content, start: content[: start + 150] + bytes([content[start + 150] ^ 1]) + content[start + 151 :],
        lambda content, start: content[:start] + bytes(512) + content[start + 512 :],
        lambda content, start: content[:start],
        lambda content, start: content[: start + 100],
    ],
    ids=["bit of header", "zeros over header", "cut at header", "cut in header"],
)
def test_damaged_header_is_located(shards: Path, damage: Callable[[bytes, int], bytes]) -> None:
    index_path(shards / "train").unlink()
    path = shards / "train/000001.tar"
    with tarfile.open(path) as tar:
        start = tar.getmembers()[4].offset
    path.write_bytes(damage(path.read_bytes(), start))
    refused(DataError, lambda: Shards(shards / "train"), f"{path}: ", f"byte {start:,}")


LABELS = {
    "cls": {"1.png": b"", "1.cls": b"1", "2.png": b"", "2.cls": b"0"},
    "cls before image": {"1.cls": b"1\n", "1.png": b"", "2.cls": b"0\n", "2.png": b""},
    "json": {"1.png": b"", "1.json": b'{"label": 1}', "2.json": b'{"label": 0}', "2.png": b""},
    "text beside label": {"1.png": b"", "1.json": b'{"label": 1, "by": "a"}', "2.cls": b"0", "2.png": b""},
}


@pytest.mark.parametrize("kind", LABELS)
def test_label_corrected_after_indexing_raises(tmp_path: Path, kind: str) -> None:
    """The size of the shard stays, as tar files consist of blocks."""
    shard = tmp_path / "train/0.tar"
    members: dict[str, Any] = {name: content or os.urandom(40) for name, content in LABELS[kind].items()}
    _write_tar(shard, members)
    assert open_source(shard.parent).targets.tolist() == [1, 0]
    size, label = shard.stat().st_size, next(name for name in members if name in ("1.cls", "1.json"))
    _write_tar(shard, {**members, label: members[label].replace(b"1", b"0")})
    assert shard.stat().st_size == size
    images = ImageFolder(shard.parent, TrainTransform(small_experiment().input), allow_empty_classes=True)
    refused(DataError, lambda: images[0, 0], "0.tar/1: ", "index")
    assert images.source.read(1) == members["2.png"]
    index_path(shard.parent).unlink()
    corrected = open_source(shard.parent, allow_empty_classes=True)
    assert (corrected.read(0), corrected.targets.tolist()) == (members["1.png"], [0, 0])


@pytest.fixture
def read_only(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> Path:
    """Shards without an index, beside which nothing can be written."""
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    index_path(shards / "train").unlink()

    def lock(path: Path) -> Any:
        if path.parent == shards:
            raise OSError(number, os.strerror(number), str(path))
        return file_lock(path)

    monkeypatch.setattr("zoo.data.sources.shards.file_lock", lock)
    return shards / "train"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_index_of_read_only_shards_is_in_cache(read_only: Path, tmp_path: Path) -> None:
    expected, source = Shards(read_only.parent / "val"), Shards(read_only)
    assert sorted(map(source.read, range(21))) == sorted(map(expected.read, range(21)))
    assert not index_path(read_only).exists()
    (index,) = (tmp_path / "cache/shard-index").glob("*.index")
    written = index.stat().st_mtime_ns
    Shards(read_only)
    assert index.stat().st_mtime_ns == written


@pytest.mark.parametrize("number", [errno.EROFS])
@pytest.mark.parametrize("change", ["label", "names", "no names", "shard"])
def test_index_in_cache_follows_changes(read_only: Path, tmp_path: Path, change: str) -> None:
    before, names = Shards(read_only), read_only / "classes.txt"
    target = (int(before.targets[0]) + 1) % 3
    if change == "shard":
        (read_only / "000005.tar").unlink()
    elif change == "label":
        with tarfile.open(read_only / "000000.tar") as tar:
            members: dict[str, Any] = {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]
        _write_tar(read_only / "000000.tar", {**members, "000000000.cls": b"%d" % target})
    elif change == "names":
        names.write_text("bug\nbee\ncat\n")
    else:
        names.unlink()
    after = Shards(read_only)
    assert len(list((tmp_path / "cache/shard-index").glob("*.index"))) == 2
    found = {"shard": len(after.names), "label": int(after.targets[0]), "names": after.classes[0]}
    expected = {"shard": 20, "label": target, "names": "bug"}
    assert found.get(change, after.classes) == expected.get(change, ["0", "1", "2"])


@pytest.mark.parametrize("number", [errno.EROFS])
def test_index_without_writable_place_raises(read_only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(Path(__file__) / "x"))
    refused(DataError, lambda: Shards(read_only), "Not a directory", "ZOO_CACHE")


@pytest.mark.dist
def test_shards_of_read_only_mount_are_read(shards: Path, tmp_path: Path) -> None:
    index_path(shards / "train").unlink()
    imports = "import sys; from pathlib import Path; from zoo.data.sources.shards import Shards"
    code = f"{imports}; print(len(Shards(Path(sys.argv[1])).names))"
    mount = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mount, str(shards), sys.executable, "-c", code, str(shards / "train")]
    environment = {**os.environ, "ZOO_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("mounting needs privileges")
    assert done.stdout == "21\n"
