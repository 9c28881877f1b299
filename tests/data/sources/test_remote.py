"""Shards on a server are read through a cache, with every fault of a server."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from tests.data.sample_images import small_experiment
from tests.refusals import refused
from tests.weights.server import Answer, Server, fails, redirects, sends, stalls, truncates
from zoo.cli import main
from zoo.config.segmentation_section import Segmentation
from zoo.data.dataset import ImageFolder, open_source
from zoo.data.loader import LoaderOptions, build_train_loader
from zoo.data.segmentation.loader import build_segmentation_train_loader
from zoo.data.sources.index import index_path, parse_index, write_index
from zoo.data.sources.location import parse_data_path
from zoo.data.sources.remote import Unreachable
from zoo.data.sources.shards import Shards
from zoo.data.transforms.classification import ValTransform
from zoo.errors import DataError

SHARD_BYTES = 10240


@pytest.fixture
def local(originals: Path) -> Shards:
    return Shards(originals / "shards/train")


def _refusal(root: Any, read: int | None = None, *names: str) -> str:
    def call() -> object:
        return open_source(root) if read is None else open_source(root).read(read)

    message = refused(Unreachable, call, str(root.parent), *names)
    assert message.isprintable()
    return message


def test_shard_is_fetched_once_by_all_workers(server: Server) -> None:
    data, config = parse_data_path(server.url), small_experiment(shuffle_shards=2)
    for workers in (2, 0):
        assert len(list(build_train_loader(data, config, LoaderOptions(workers=workers)))) == 5
    fetched = sorted(path for path in server.requests if path.endswith(".tar"))
    assert fetched == [f"/train/{number:06}.tar" for number in range(6)]


def test_other_shards_at_address_use_another_cache(server: Server, originals: Path) -> None:
    root = parse_data_path(server.url) / "train"
    source = open_source(root)
    server.script["/train.index"] = [sends((originals / "shards/val.index").read_bytes())]
    val = open_source(root)
    assert val.names.tolist() == Shards(originals / "shards/val").names.tolist()
    assert val._folder != source._folder


def test_commands_and_networks_that_need_folder_raise(server: Server, tmp_path: Path, capsys: Any) -> None:
    assert main(["data", "shard", server.url, str(tmp_path / "out")]) == 2
    assert "only shards of classification data are read from a server" in capsys.readouterr().err
    config = small_experiment().model_copy(update={"segmentation": Segmentation()})
    refused(DataError, lambda: build_segmentation_train_loader(parse_data_path(server.url), config), server.url)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (fails(404), "404"),
        (fails(403), "403"),
        (fails(500), "500"),
        (stalls(0), "timed out"),
        (sends(b"<html>"), ""),
        (sends(bytes(100)), ""),
        (truncates(10), "IncompleteRead"),
    ],
)
def test_unavailable_index_raises(server: Server, cache: Path, answer: Answer, reason: str) -> None:
    server.script["/train.index"] = [answer] * 10
    _refusal(parse_data_path(server.url) / "train", None, "train.index: ", reason)
    assert not cache.exists()


def _damaged(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize("times", [1, 9])
@pytest.mark.parametrize("fault", ["image", "short", "long", "cut"])
def test_damaged_shard_is_fetched_again(
    server: Server, originals: Path, local: Shards, cache: Path, fault: str, times: int
) -> None:
    content = (originals / "shards/train/000000.tar").read_bytes()
    assert len(content) == SHARD_BYTES
    offset = int(local._index.arrays["offsets"][0])
    answer, names = {
        "image": (sends(_damaged(content, offset + 20)), ["the shard is damaged"]),
        "short": (sends(content[:5000]), ["5,000 bytes", "10,240"]),
        "long": (sends(content + b"more"), ["10,244 bytes", "10,240"]),
        "cut": (truncates(5000), ["the file cannot be fetched: ", "IncompleteRead"]),
    }[fault]
    server.script["/train/000000.tar"] = [answer] * times
    root = parse_data_path(server.url) / "train"
    if times == 1:
        assert open_source(root).read(0) == local.read(0)
    else:
        _refusal(root, 0, *names)
        assert not list(cache.glob("*/*.tar*"))


def test_unreachable_server_ends_run_with_its_address(server: Server) -> None:
    loader = build_train_loader(parse_data_path(server.url), small_experiment(shuffle_shards=2))
    server.usual = fails(404)
    refused(DataError, lambda: list(loader), server.url, ".tar: ", "404")


def test_copy_damaged_later_is_fetched_again(server: Server, cache: Path) -> None:
    source = open_source(parse_data_path(server.url) / "train")
    expected = source.read(0)
    (copy,) = cache.glob("*/000000.tar")
    copy.write_bytes(b"short")
    assert source.read(0) == expected
    assert copy.stat().st_size == SHARD_BYTES


HOSTILE: dict[str, Callable[[dict[str, Any], dict[str, np.ndarray]], object]] = {
    "parent folder": lambda header, arrays: header["shards"].__setitem__(0, ["../../../evil.tar", 10240]),
    "absolute path": lambda header, arrays: header["shards"].__setitem__(0, ["/etc/evil.tar", 10240]),
    "no tar file": lambda header, arrays: header["shards"].__setitem__(0, ["evil", 10240]),
    "negative size": lambda header, arrays: header["shards"].__setitem__(0, ["000000.tar", -1]),
    "huge size": lambda header, arrays: header["shards"].__setitem__(0, ["000000.tar", 10**30]),
    "shard without size": lambda header, arrays: header["shards"].__setitem__(0, "000000.tar"),
    "shards are a number": lambda header, arrays: header.__setitem__("shards", 3),
    "class is a list": lambda header, arrays: header.__setitem__("classes", [["ant"]]),
    "no lengths": lambda header, arrays: arrays.pop("lengths"),
    "too few lengths": lambda header, arrays: arrays.__setitem__("lengths", arrays["lengths"][1:]),
    "names are numbers": lambda header, arrays: arrays.__setitem__("names", arrays["targets"]),
    "shard too large": lambda header, arrays: arrays["shards"].__setitem__(0, 6),
    "negative shard": lambda header, arrays: arrays["shards"].__setitem__(0, -1),
    "target too large": lambda header, arrays: arrays["targets"].__setitem__(0, 3),
    "offset too large": lambda header, arrays: arrays["offsets"].__setitem__(0, 2**62),
    "negative offset": lambda header, arrays: arrays["offsets"].__setitem__(0, -5),
    "length too large": lambda header, arrays: arrays["lengths"].__setitem__(0, 2**30 + 1),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_index_of_impossible_names_and_numbers_raises(shards: Path, memory: str, change: Any) -> None:
    path = index_path(shards / "train")
    header, arrays = parse_index(path.read_bytes(), path)
    change(header, arrays)
    write_index(path, header, arrays)
    refused(DataError, lambda: open_source(shards / "train"), f"{path}: ")
    fsspec.filesystem("memory").pipe_file("/bucket/shards/train.index", path.read_bytes())
    _refusal(parse_data_path(memory) / "train", None, f"{memory}/train.index: ")


def test_full_disk_and_unwritable_cache_raise(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    root = parse_data_path(server.url) / "train"
    source = open_source(root)
    with monkeypatch.context() as full:
        full.setattr(shutil, "copyfileobj", _raises(OSError(28, "No space left on device")))
        refused(Unreachable, lambda: source.read(0), "No space left on device", "ZOO_CACHE")
    monkeypatch.setenv("ZOO_CACHE", str(Path(__file__) / "x"))
    refused(Unreachable, lambda: open_source(root), "Not a directory", "ZOO_CACHE")


def test_nothing_is_fetched_offline(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    _refusal(parse_data_path(server.url) / "train", None, "ZOO_OFFLINE is set")
    assert server.requests == []


def test_password_is_sent_and_not_shown(server: Server) -> None:
    data = parse_data_path(server.url.replace("://", "://me:secret@"))
    assert open_source(data / "train").read(0)
    server.script["/val.index"] = [fails(404)]
    assert "secret" not in _refusal(data / "val")


QUERY = "?sv=1&sig=SECRET%2Fa/b%3D"  # a signature may contain slashes


def test_query_of_signed_address_follows_every_file(
    server: Server, cache: Path, local: Shards, caplog: pytest.LogCaptureFixture
) -> None:
    for ending in ("", "/"):
        data = parse_data_path(f"{server.url}{ending}{QUERY}")
        assert open_source(data / "train").read(0) == local.read(0)
    assert server.requests == [f"/train.index{QUERY}", f"/train/000000.tar{QUERY}", f"/train.index{QUERY}"]
    assert open_source(parse_data_path(f"{server.url}?sig=RENEWED") / "train").read(0)
    assert server.requests[-1] == "/train.index?sig=RENEWED"  # the shard is in the cache
    images = ImageFolder(data / "train", ValTransform(12, 8, [0.5] * 3, [0.5] * 3))
    assert images.file_name(0) == f"{server.url}/train/000000.tar/000000000"
    assert not re.search("SECRET|RENEWED", f"{caplog.text}{data}{data!r}{list(cache.iterdir())}")
    assert parse_data_path("s3://bucket/a?b").parent.url == "s3://bucket"  # not a query in other protocols
    assert (parse_data_path("s3://bucket/a?b") / "train").url == "s3://bucket/a?b/train"


CLOSED = "http://127.0.0.1:1"
FAULTS = {
    "404": fails(404),
    "503": fails(503),
    "cut": truncates(9),
    "redirect": redirects(f"{CLOSED}/elsewhere{QUERY}"),
    "refused": None,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_query_of_signed_address_is_not_shown(
    server: Server, fault: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server.usual = FAULTS[fault] or server.usual
    url = server.url if FAULTS[fault] else CLOSED
    (tmp_path / "a.json").write_text('{"network": {"arch": "resnet18", "classes": 3}}')
    assert main(["train", str(tmp_path / "a.json"), url + QUERY, "--log-dir", str(tmp_path / "log"), "-j", "0"]) == 2
    printed = capsys.readouterr()
    assert f"{url}/train.index: the file cannot be fetched" in printed.err
    assert "SECRET" not in printed.err + printed.out + caplog.text


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("s3://a/b", "Install s3fs"),
        ("ftp://127.0.0.1:1/b", "Connection refused"),
        ("nothing://a/b", "Protocol not known"),
        ("memory://nobody", "memory://nobody/train.index: "),
        ("memory://bucket/shards", "the file cannot be fetched: denied"),
    ],
)
def test_other_protocols_raise(address: str, reason: str, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    if address == memory:
        monkeypatch.setattr(type(fsspec.filesystem("memory")), "_open", _raises(PermissionError("denied")))
    _refusal(parse_data_path(address) / "train", None, reason)


def _raises(error: Exception) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        raise error

    return function
