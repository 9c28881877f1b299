"""Shards behave like the folders that they were made from, and errors name damaged files."""

from __future__ import annotations

import codecs
import errno
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.sample_images import CLASSES, make_splits, small_experiment
from tests.refusals import refused
from zoo.cli import main
from zoo.data.dataset import ImageFolder, open_source
from zoo.data.loader import LoaderOptions, build_train_loader
from zoo.data.prepare.write_shards import write_shards
from zoo.data.sources.folder import FolderSource
from zoo.data.sources.index import index_path
from zoo.data.sources.shards import Shards
from zoo.data.transforms.classification import TrainTransform
from zoo.errors import DataError
from zoo.files import file_lock

CPU = torch.device("cpu")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_splits(tmp_path / "folder")


@pytest.fixture
def shards(data: Path, tmp_path: Path) -> Path:
    assert main(["data", "shard", str(data), str(tmp_path / "shards"), "--per-shard", "4"]) == 0
    return tmp_path / "shards"


def test_shards_hold_files_of_folder_in_another_order(data: Path, shards: Path) -> None:
    folder = FolderSource(data / "train")
    expected = sorted((folder.read(index), int(folder.targets[index])) for index in range(21))
    source = open_source(shards / "train")
    assert type(source) is Shards
    assert source.classes == folder.classes == ["ant", "bee", "cat"]
    found = [(source.read(index), int(source.targets[index])) for index in range(21)]
    assert sorted(found) == expected
    assert found != expected
    assert sorted(path.name for path in (shards / "train").iterdir()) == [
        *(f"{number:06}.tar" for number in range(6)),
        "classes.txt",
    ]
    val, val_folder = open_source(shards / "val"), FolderSource(data / "val")
    assert [val.read(index) for index in range(21)] == [val_folder.read(index) for index in range(21)]


def test_same_images_give_bit_identical_shards(data: Path, shards: Path, tmp_path: Path) -> None:
    for seed, is_same in (("0", True), ("1", False)):
        out = tmp_path / seed
        assert main(["data", "shard", str(data), str(out), "--per-shard", "4", "--seed", seed]) == 0
        same = [path.read_bytes() == (out / "train" / path.name).read_bytes() for path in (shards / "train").iterdir()]
        assert all(same) is is_same


def test_shards_are_written_completely_or_not_at_all(
    data: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "shard", str(data), str(shards)]) == 2
    assert "OUT exists and is not overwritten" in capsys.readouterr().err
    assert len(list((shards / "train").glob("*.tar"))) == 6
    read = FolderSource.read
    monkeypatch.setattr(FolderSource, "read", lambda self, index: read(self, index) if index != 7 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_shards(FolderSource(data / "train"), tmp_path / "new", per_shard=4, seed=None)
    assert not list(tmp_path.glob("new*"))


def test_tarfile_can_read_shards(data: Path, shards: Path) -> None:
    source = open_source(shards / "train")
    with tarfile.open(shards / "train" / "000001.tar") as tar:
        assert tar.getnames() == [f"{number:09}.{kind}" for number in range(4, 8) for kind in ("png", "cls")]
        for number in range(4, 8):
            assert tar.extractfile(f"{number:09}.png").read() == source.read(number)
            assert int(tar.extractfile(f"{number:09}.cls").read()) == source.targets[number]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_order_does_not_depend_on_num_readers(shards: Path, workers: int, world: int) -> None:
    config = small_experiment(shuffle_shards=2, color_jitter_train=True)
    alone = [(batch.on(CPU), batch.targets, list(batch.paths)) for batch in build_train_loader(shards, config)]
    assert sorted(path for _, _, paths in alone for path in paths) == sorted(
        str(shards / "train" / os.fsdecode(name)) for name in open_source(shards / "train").names
    )
    loaders = [iter(build_train_loader(shards, config, LoaderOptions(rank, world, workers))) for rank in range(world)]
    for images, targets, paths in alone:
        for rank, loader in enumerate(loaders):
            batch = next(loader)
            assert list(batch.paths) == paths[rank::world]
            assert torch.equal(batch.on(CPU), images[rank::world])
            assert torch.equal(batch.targets, targets[rank::world])


def test_window_shuffles_shards_and_images_of_few_of_them(shards: Path) -> None:
    source = open_source(shards / "train")
    shard_of = np.array([int(name[:6]) for name in source.names])
    seen = set()
    for seed in range(20):
        order = source.order(torch.Generator().manual_seed(seed), 2).numpy()
        assert sorted(order) == list(range(21))
        numbers = shard_of[order]
        windows = [set(numbers[:8]), set(numbers[8:16]), set(numbers[16:])]
        if 5 in windows[2] and len(windows[0] | windows[1]) == 4:  # the short last shard is in the last window
            assert [len(window) for window in windows] == [2, 2, 2]
        changes = int((np.diff(numbers) != 0).sum())
        assert changes > 5  # the images of a window are mixed
        seen.add(tuple(order))
    assert len(seen) == 20
    assert torch.equal(
        source.order(torch.Generator().manual_seed(1), None),
        torch.randperm(21, generator=torch.Generator().manual_seed(1)),
    )


def test_zoo_trains_and_validates_on_shards_as_on_folder(
    data: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The order of the images differs, but not the score of the same weights, which know the names of the classes."""
    content = {
        "network": {"arch": "resnet18", "classes": 3},
        "input": {"crop_train": 8, "scale_val": 12, "crop_val": 8},
        "optimizer": {"batch_size": 7, "schedule": {"epochs": 1}},
    }
    config = tmp_path / "a.json"
    config.write_text(json.dumps(content))
    log = tmp_path / "log"
    assert main(["train", str(config), str(shards), "--log-dir", str(log), "-j", "0"]) == 0
    scores = []
    for place in (data, shards):
        out = tmp_path / f"{place.name}.json"
        words = ["--weights", str(log / "checkpoint.pth.tar"), "-j", "0", "--json", str(out)]
        assert main(["validate", str(config), str(place), *words]) == 0
        result = json.loads(out.read_text())
        scores.append([result[key] for key in ("top1", "top5", "loss", "count")])
    assert scores[0] == scores[1]
    assert main(["data", "check", str(config), str(shards)]) == 0
    capsys.readouterr()
    checkpoint = str(log / "checkpoint.pth.tar")
    assert main(["predict", checkpoint, str(data / "val" / "ant" / "000.png"), "--top", "3"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in CLASSES)


def _write_tar(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def test_external_shards_are_indexed_on_first_use(data: Path, tmp_path: Path) -> None:
    image = (data / "train" / "ant" / "000.png").read_bytes()
    root = tmp_path / "others" / "train"
    _write_tar(
        root / "a-0.tar", {"x/1.PNG": image, "x/1.txt": b"an ant", "x/1.cls": b"2", "2.cls": b"0", "2.png": image}
    )
    _write_tar(root / "a-1.tar", {"3.json": b'{"label": 1, "url": "?"}', "3.png": image})
    source = open_source(root)
    assert source.classes == ["0", "1", "2"]
    assert source.targets.tolist() == [2, 0, 1]
    assert source.names.tolist() == [b"a-0.tar/x/1", b"a-0.tar/2", b"a-1.tar/3"]
    assert [source.read(index) for index in range(3)] == [image] * 3
    assert index_path(root).is_file()
    (root / "classes.txt").write_text("ant\nbee\ncat\ndog\n")
    index_path(root).unlink()
    assert open_source(root, allow_empty_classes=True).classes == ["ant", "bee", "cat", "dog"]


def test_hidden_files_of_other_systems_are_skipped_and_counted(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    image = (data / "train" / "ant" / "000.png").read_bytes()
    root = tmp_path / "train"
    hidden = {"x/._1.png": b"", "x/.DS_Store": b"", "__MACOSX/x/1.png": b"", "._1.cls": b""}
    _write_tar(root / "0.tar", {"x/1.png": image, **hidden, "x/1.cls": b"1"})
    source = open_source(root, allow_empty_classes=True)
    assert source.names.tolist() == [b"0.tar/x/1"]
    assert f"skipped 4 files, the first is x/._1.png; {root / '0.tar'}" in caplog.messages


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfant\nbee\ncat\n",
        b"ant\r\nbee\r\ncat\r\n",
        b"ant \n\tbee\ncat\n\n\n",
        "ant\r\nbee\r\ncat".encode("utf-16"),
        codecs.BOM_UTF16_BE + "ant\nbee\ncat\n".encode("utf-16-be"),
    ],
)
def test_class_names_are_the_same_from_every_editor(shards: Path, content: bytes) -> None:
    (shards / "train" / "classes.txt").write_bytes(content)
    index_path(shards / "train").unlink()
    assert open_source(shards / "train").classes == ["ant", "bee", "cat"]


@pytest.mark.parametrize(
    ("content", "name"), [("ant\nbee\ncat\n".encode("utf-16-le"), "UTF-8"), (b"ant\n \ncat\n", "line 2")]
)
def test_unreadable_class_names_raise(shards: Path, content: bytes, name: str) -> None:
    (shards / "train" / "classes.txt").write_bytes(content)
    index_path(shards / "train").unlink()
    refused(DataError, lambda: open_source(shards / "train"), "classes.txt: ", name)


@contextmanager
def _tar_of(path: Path) -> Iterator[tarfile.TarFile]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        yield tar


def _link(tar: tarfile.TarFile) -> None:
    member = tarfile.TarInfo("1.png")
    member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
    tar.addfile(member)


def _device(tar: tarfile.TarFile) -> None:
    member = tarfile.TarInfo("1.png")
    member.type = tarfile.CHRTYPE
    tar.addfile(member)


@pytest.mark.parametrize(
    ("members", "names"),
    [
        (_link, ["1.png", "link"]),
        (_device, ["1.png", "device"]),
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
    ],
)
def test_unreadable_shards_are_named(
    tmp_path: Path, members: dict[str, bytes] | Callable[[tarfile.TarFile], None], names: list[str]
) -> None:
    path = tmp_path / "train" / "0.tar"
    if callable(members):
        with _tar_of(path) as tar:
            members(tar)
    else:
        _write_tar(path, members)
    refused(DataError, lambda: open_source(tmp_path / "train"), "train/0.tar: ", *names)
    assert not index_path(tmp_path / "train").exists()


def test_index_of_other_shards_raises(shards: Path) -> None:
    (shards / "train" / "000005.tar").unlink()
    refused(DataError, lambda: open_source(shards / "train"), "train.index")


def test_changed_bytes_of_shard_are_named(shards: Path) -> None:
    source = open_source(shards / "train")
    path, image = shards / "train" / "000000.tar", source.read(0)
    content = bytearray(path.read_bytes())
    content[content.index(image) + len(image) // 2] ^= 1
    path.write_bytes(content)
    refused(DataError, lambda: open_source(shards / "train").read(0), "train/000000.tar/000000000")
    assert open_source(shards / "train").read(1) == source.read(1)


def test_damaged_index_raises(shards: Path) -> None:
    path = index_path(shards / "train")
    whole = path.read_bytes()
    for cut in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        refused(DataError, lambda: Shards(shards / "train"), "train.index: ")


def _without_index(shards: Path) -> Path:
    index_path(shards / "train").unlink()
    return shards / "train" / "000001.tar"


@pytest.mark.parametrize("damage", ["a byte of a header", "zeros over a header", "cut at a header", "cut in a header"])
def test_truncated_shard_raises(shards: Path, damage: str) -> None:
    path = _without_index(shards)
    content = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        start = tar.getmembers()[4].offset
    if damage == "a byte of a header":
        content[start + 150] ^= 1
    elif damage == "zeros over a header":
        content[start : start + 512] = bytes(512)
    else:
        del content[start + (100 if "in" in damage else 0) :]
    path.write_bytes(content)
    refused(DataError, lambda: Shards(shards / "train"), f"{path}: ", f"byte {start:,}")


@pytest.mark.parametrize("names", [["bug", "bee", "cat"], ["bee", "ant", "cat"], ["ant", "bee", "cat", "dog"], None])
def test_class_names_other_than_in_index_raise(shards: Path, names: list[str] | None) -> None:
    """None: the file was removed, and the classes are called by their numbers."""
    path = shards / "train" / "classes.txt"
    path.unlink() if names is None else path.write_text("\n".join(names))
    refused(DataError, lambda: Shards(shards / "train"), "classes.txt", "ant, bee, cat")
    index_path(shards / "train").unlink()
    assert Shards(shards / "train", allow_empty_classes=True).classes == (names or ["0", "1", "2"])


LABELS = {
    "cls": {"1.png": b"", "1.cls": b"1", "2.png": b"", "2.cls": b"0"},
    "cls before image": {"1.cls": b"1\n", "1.png": b"", "2.cls": b"0\n", "2.png": b""},
    "json": {"1.png": b"", "1.json": b'{"label": 1}', "2.json": b'{"label": 0}', "2.png": b""},
    "text beside label": {"1.png": b"", "1.json": b'{"label": 1, "by": "a"}', "2.cls": b"0", "2.png": b""},
}


@pytest.mark.parametrize("kind", LABELS)
def test_label_corrected_after_indexing_raises(tmp_path: Path, kind: str) -> None:
    """The size of the shard stays, as tar files consist of blocks."""
    shard = tmp_path / "train" / "0.tar"
    members = {name: content or os.urandom(40) for name, content in LABELS[kind].items()}
    _write_tar(shard, members)
    before, image = open_source(shard.parent), members["1.png"]
    assert before.targets.tolist() == [1, 0]
    size, label = shard.stat().st_size, next(name for name in members if name in ("1.cls", "1.json"))
    _write_tar(shard, {**members, label: members[label].replace(b"1", b"0")})
    assert shard.stat().st_size == size
    source = open_source(shard.parent, allow_empty_classes=True)
    refused(DataError, lambda: source.read(0), "0.tar/1: ")
    assert source.read(1) == members["2.png"]
    images = ImageFolder(shard.parent, TrainTransform(small_experiment().input), allow_empty_classes=True)
    refused(DataError, lambda: images[0, 0], "0.tar/1: ", "index")
    index_path(shard.parent).unlink()
    corrected = open_source(shard.parent, allow_empty_classes=True)
    assert (corrected.read(0), corrected.targets.tolist()) == (image, [0, 0])


def test_label_too_large_for_index_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.data.sources.shards.MAX_IMAGE_BYTES", 30)
    _write_tar(tmp_path / "train" / "0.tar", {"1.png": b"x", "1.json": b'{"label": 1}' + b" " * 30})
    refused(DataError, lambda: open_source(tmp_path / "train"), "sample 1 ", "42 bytes", "30")


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
    expected = Shards(read_only.parent / "val")
    source = Shards(read_only)
    assert sorted(map(source.read, range(21))) == sorted(map(expected.read, range(21)))
    assert not index_path(read_only).exists()
    (index,) = (tmp_path / "cache" / "shard-index").glob("*.index")
    written = index.stat().st_mtime_ns
    Shards(read_only)
    assert index.stat().st_mtime_ns == written


@pytest.mark.parametrize("number", [errno.EROFS])
@pytest.mark.parametrize("change", ["label", "names", "no names", "shard"])
def test_index_in_cache_follows_changes(read_only: Path, tmp_path: Path, change: str) -> None:
    before, names = Shards(read_only), read_only / "classes.txt"
    if change == "shard":
        (read_only / "000005.tar").unlink()
    elif change == "label":
        with tarfile.open(read_only / "000000.tar") as tar:
            members = {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]
        members["000000000.cls"] = b"%d" % ((int(before.targets[0]) + 1) % 3)
        _write_tar(read_only / "000000.tar", members)
    elif change == "names":
        names.write_text("bug\nbee\ncat\n")
    else:
        names.unlink()
    after = Shards(read_only)
    assert len(list((tmp_path / "cache" / "shard-index").glob("*.index"))) == 2
    found = {"shard": len(after.names), "label": int(after.targets[0]), "names": after.classes[0]}
    expected = {"shard": 20, "label": (int(before.targets[0]) + 1) % 3, "names": "bug"}
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


def test_digest_of_shards_depends_on_content_of_their_images(data: Path, tmp_path: Path) -> None:
    digests = set()
    for seed in ("0", "1"):
        assert main(["data", "shard", str(data), str(tmp_path / seed), "--seed", seed]) == 0
        digests.add(build_train_loader(tmp_path / seed, small_experiment()).dataset.names_digest())
    assert len(digests) == 2
