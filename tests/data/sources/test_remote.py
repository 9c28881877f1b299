"""Shards on a server are read like shards in a folder, through a cache, with every fault of a server."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

from tests.data.sample_images import make_splits, small_experiment
from tests.local_server import LocalServer
from tests.refusals import refused
from zoo.cli import main
from zoo.config.segmentation_section import Segmentation
from zoo.data.dataset import ImageFolder, open_source
from zoo.data.loader import LoaderOptions, build_train_loader, build_val_loader
from zoo.data.segmentation.loader import build_segmentation_train_loader
from zoo.data.sources import remote
from zoo.data.sources.index import parse_index, write_index
from zoo.data.sources.location import parse_data_path
from zoo.data.sources.remote import Unreachable
from zoo.data.sources.shards import Shards
from zoo.data.transforms.classification import ValTransform
from zoo.errors import DataError

CPU = torch.device("cpu")
TRANSFORM = ValTransform(12, 8, [0.5] * 3, [0.5] * 3)
Answer = Callable[["Handler"], None]


class Handler(SimpleHTTPRequestHandler):
    """Gives the files of a folder; Range is ignored, as by the server that Python has on the command line."""

    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        script = self.server.script.get(self.path, [])
        if script:
            script.pop(0)(self)
        else:
            super().do_GET()

    def log_message(self, *args: Any) -> None:
        pass


class Server(LocalServer):
    def __init__(self, folder: Path) -> None:
        super().__init__(partial(Handler, directory=str(folder)))
        self.asked: list[str] = []
        self.script: dict[str, list[Answer]] = {}


def _sends(content: bytes, length: int | None = None) -> Answer:
    def answer(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content) if length is None else length))
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def _fails(status: int) -> Answer:
    return lambda handler: handler.send_error(status)


def _stalls(handler: Handler) -> None:
    handler.server.is_over.wait(20)


@pytest.fixture(scope="module")
def local_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("data")
    assert main(["data", "shard", str(make_splits(base / "folder")), str(base / "shards"), "--per-shard", "4"]) == 0
    return base / "shards"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.delenv("ZOO_OFFLINE", raising=False)
    monkeypatch.setattr(remote, "TIMEOUTS_S", (1.0, 0.3))
    monkeypatch.setattr("zoo.files.sleep", lambda seconds: None)
    return tmp_path / "cache" / "shards"


@pytest.fixture
def server(local_shards: Path) -> Iterator[Server]:
    with Server(local_shards) as server:
        yield server


@pytest.fixture
def memory(local_shards: Path) -> Iterator[str]:
    system = fsspec.filesystem("memory")
    for path in local_shards.glob("**/*.*"):
        system.pipe_file(f"/bucket/shards/{path.relative_to(local_shards)}", path.read_bytes())
    yield "memory://bucket/shards"
    system.store.clear()


def _copies(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("*/*.tar*"))


@pytest.mark.parametrize("protocol", ["http", "memory"])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_bit_identical_to_batches_of_folder(
    local_shards: Path, server: Server, memory: str, protocol: str, workers: int
) -> None:
    data = parse_data_path(server.url if protocol == "http" else memory)
    config = small_experiment(shuffle_shards=2, color_jitter_train=True)
    pairs = [
        (
            build_train_loader(place, config, LoaderOptions(workers=workers)),
            build_val_loader(place, TRANSFORM, 2, LoaderOptions(workers=workers)),
        )
        for place in (local_shards, data)
    ]
    for ours, theirs in zip(*pairs, strict=True):
        assert ours.dataset.names_digest() == theirs.dataset.names_digest()
        for expected, batch in zip(ours, theirs, strict=True):
            assert torch.equal(batch.on(CPU), expected.on(CPU))
            assert torch.equal(batch.targets, expected.targets)
            names = [os.path.relpath(path, local_shards) for path in expected.paths]
            assert list(batch.paths) == [f"{data}/{name}" for name in names]
    if protocol == "http":  # every shard once, with any number of workers
        assert sorted(path for path in server.asked if path.endswith(".tar")) == sorted(
            f"/{split}/{number:06}.tar" for split in ("train", "val") for number in range(6)
        )


def test_epoch_resumes_in_the_middle_on_any_number_of_processes(server: Server) -> None:
    config, data = small_experiment(shuffle_shards=2), parse_data_path(server.url)
    alone = [list(batch.paths) for batch in build_train_loader(data, config)]
    for rank in range(2):
        loader = build_train_loader(data, config, LoaderOptions(rank=rank, world_size=2))
        loader.batch_sampler.skip_to(2)
        assert [list(batch.paths) for batch in loader] == [paths[rank::2] for paths in alone[2:]]
    seen = [
        path
        for rank in range(3)
        for batch in build_val_loader(data, TRANSFORM, 2, LoaderOptions(rank, 3))
        for path in batch.paths
    ]
    assert len(seen) == len(set(seen)) == 21


def test_other_shards_at_address_use_another_cache(server: Server, local_shards: Path) -> None:
    root = parse_data_path(server.url) / "train"
    source = open_source(root)
    index = (local_shards / "val.index").read_bytes()
    server.script["/train.index"] = [_sends(index)]
    val = open_source(root)
    assert val.names.tolist() == Shards(local_shards / "val").names.tolist()
    assert val._folder != source._folder


def test_benchmark_on_url_asks_for_local_folder(server: Server, tmp_path: Path, capsys: Any) -> None:
    assert main(["data", "shard", server.url, str(tmp_path / "out")]) == 2
    assert "only shards of classification data are read from a server" in capsys.readouterr().err
    config = small_experiment().model_copy(update={"segmentation": Segmentation()})
    refused(DataError, lambda: build_segmentation_train_loader(parse_data_path(server.url), config), server.url)


def _refusal(root: Any, read: int | None = None) -> str:
    message = refused(
        Unreachable, lambda: open_source(root) if read is None else open_source(root).read(read), str(root.parent)
    )
    assert message.isprintable()
    return message


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (_fails(404), "train.index: .*404"),
        (_fails(403), "train.index: .*403"),
        (_fails(500), "train.index: .*500"),
        (_stalls, "train.index: .*timed out"),
        (_sends(b"<html>"), "train.index: "),
        (_sends(bytes(100)), "train.index: "),
        (_sends(b"x" * 10, 100), "train.index: .*IncompleteRead"),
    ],
)
def test_unavailable_index_raises(server: Server, cache: Path, answer: Answer, message: str) -> None:
    server.script["/train.index"] = [answer] * 10
    assert re.search(message, _refusal(parse_data_path(server.url) / "train"))
    assert not cache.exists()


def _damaged(content: bytes, place: int) -> Answer:
    damaged = bytearray(content)
    damaged[place] ^= 1
    return _sends(bytes(damaged))


@pytest.mark.parametrize("times", [1, 9])
@pytest.mark.parametrize("fault", ["image", "short", "long", "cut"])
def test_damaged_shard_is_fetched_again(
    server: Server, local_shards: Path, cache: Path, fault: str, times: int
) -> None:
    content, size = (local_shards / "train" / "000000.tar").read_bytes(), 10240
    assert len(content) == size
    arrays = parse_index((local_shards / "train.index").read_bytes(), "").arrays
    offset = int(arrays["offsets"][0])
    answer, message = {
        "image": (_damaged(content, offset + 20), "the shard is damaged, or has changed since it was indexed"),
        "short": (_sends(content[:5000]), "the shard has 5,000 bytes, and its index says 10,240"),
        "long": (_sends(content + b"more"), "the shard has 10,244 bytes, and its index says 10,240"),
        "cut": (_sends(content[:5000], size), "the file cannot be fetched: .*IncompleteRead"),
    }[fault]
    server.script["/train/000000.tar"] = [answer] * times
    root = parse_data_path(server.url) / "train"
    if times == 1:
        assert open_source(root).read(0) == Shards(local_shards / "train").read(0)
    else:
        assert re.search(message, _refusal(root, 0))
        assert _copies(cache) == []


def test_unreachable_server_ends_run_with_its_address(server: Server) -> None:
    loader = build_train_loader(parse_data_path(server.url), small_experiment(shuffle_shards=2))
    server.script = {f"/train/{number:06}.tar": [_fails(404)] * 9 for number in range(6)}
    refused(DataError, lambda: list(loader), server.url, ".tar: ", "404")


def test_copy_damaged_later_is_fetched_again(server: Server, cache: Path) -> None:
    source = open_source(parse_data_path(server.url) / "train")
    expected = source.read(0)
    (copy,) = cache.glob("*/000000.tar")
    copy.write_bytes(b"short")
    assert source.read(0) == expected
    assert copy.stat().st_size == 10240


def _index_with(path: Path, change: Callable[[dict[str, Any], dict[str, np.ndarray]], None]) -> None:
    header, arrays = parse_index(path.read_bytes(), path)
    change(header, arrays)
    write_index(path, header, arrays)


@pytest.mark.parametrize(
    "change",
    [
        lambda header, arrays: header["shards"].__setitem__(0, ["../../../evil.tar", 10240]),
        lambda header, arrays: header["shards"].__setitem__(0, ["/etc/evil.tar", 10240]),
        lambda header, arrays: header["shards"].__setitem__(0, ["evil", 10240]),
        lambda header, arrays: header["shards"].__setitem__(0, ["000000.tar", -1]),
        lambda header, arrays: header["shards"].__setitem__(0, ["000000.tar", 10**30]),
        lambda header, arrays: header["shards"].__setitem__(0, "000000.tar"),
        lambda header, arrays: header.__setitem__("shards", 3),
        lambda header, arrays: header.__setitem__("classes", [["ant"]]),
        lambda header, arrays: arrays.pop("lengths"),
        lambda header, arrays: arrays.__setitem__("lengths", arrays["lengths"][1:]),
        lambda header, arrays: arrays.__setitem__("names", arrays["targets"]),
        lambda header, arrays: arrays["shards"].__setitem__(0, 6),
        lambda header, arrays: arrays["shards"].__setitem__(0, -1),
        lambda header, arrays: arrays["targets"].__setitem__(0, 3),
        lambda header, arrays: arrays["offsets"].__setitem__(0, 2**62),
        lambda header, arrays: arrays["offsets"].__setitem__(0, -5),
        lambda header, arrays: arrays["lengths"].__setitem__(0, 2**30 + 1),
    ],
)
def test_index_of_impossible_names_and_numbers_raises(local_shards: Path, tmp_path: Path, change: Any) -> None:
    for name in ("train.index", "train"):
        (tmp_path / name).symlink_to(local_shards / name)
    index = (local_shards / "train.index").read_bytes()
    (tmp_path / "train.index").unlink()
    (tmp_path / "train.index").write_bytes(index)
    _index_with(tmp_path / "train.index", change)
    system = fsspec.filesystem("memory")
    system.pipe_file("/hostile/train.index", (tmp_path / "train.index").read_bytes())
    assert re.search("memory://hostile/train.index: ", _refusal(parse_data_path("memory://hostile/train")))
    refused(DataError, lambda: open_source(tmp_path / "train"), "train.index")


def test_full_disk_and_unwritable_cache_raise(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    root = parse_data_path(server.url) / "train"
    source = open_source(root)
    with monkeypatch.context() as full:
        full.setattr(remote.shutil, "copyfileobj", _raises(OSError(28, "No space left on device")))
        refused(Unreachable, lambda: source.read(0), "No space left on device", "ZOO_CACHE")
    monkeypatch.setenv("ZOO_CACHE", str(Path(__file__) / "x"))
    refused(Unreachable, lambda: open_source(root), "Not a directory", "ZOO_CACHE")


def test_nothing_is_fetched_offline(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    assert "ZOO_OFFLINE is set" in _refusal(parse_data_path(server.url) / "train")
    assert server.asked == []


def test_password_is_sent_and_not_shown(server: Server) -> None:
    address = server.url.replace("://", "://me:secret@")
    source = open_source(parse_data_path(address) / "train")
    assert source.read(0)
    server.script["/val.index"] = [_fails(404)]
    assert "secret" not in _refusal(parse_data_path(address) / "val")


QUERY = "?sv=1&sig=SECRET%2Fa/b%3D"  # a signature may contain slashes


def test_query_of_signed_address_follows_every_file(
    server: Server, cache: Path, local_shards: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for ending in ("", "/"):
        data = parse_data_path(f"{server.url}{ending}{QUERY}")
        assert open_source(data / "train").read(0) == Shards(local_shards / "train").read(0)
    assert server.asked == [f"/train.index{QUERY}", f"/train/000000.tar{QUERY}", f"/train.index{QUERY}"]
    other = open_source(parse_data_path(f"{server.url}?sig=RENEWED") / "train")
    assert other.read(0)
    assert server.asked[-1] == "/train.index?sig=RENEWED"  # the shard is in the cache
    assert ImageFolder(data / "train", TRANSFORM).file_name(0) == f"{server.url}/train/000000.tar/000000000"
    assert not re.search("SECRET|RENEWED", f"{caplog.text}{data}{data!r}{list(cache.iterdir())}")


@pytest.mark.parametrize("answer", ["404", "503", "cut", "refused", "redirect"])
def test_query_of_signed_address_is_not_shown(
    server: Server, answer: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def redirects(handler: Handler) -> None:
        handler.send_response(302)
        handler.send_header("Location", f"http://127.0.0.1:1/elsewhere{QUERY}")
        handler.end_headers()

    faults = {"404": _fails(404), "503": _fails(503), "cut": _sends(b"x", 99), "redirect": redirects}
    server.script[f"/train.index{QUERY}"] = [faults.get(answer, _stalls)] * 9
    url = "http://127.0.0.1:1" if answer == "refused" else server.url
    (tmp_path / "a.json").write_text('{"network": {"arch": "resnet18", "classes": 3}}')
    assert main(["train", str(tmp_path / "a.json"), url + QUERY, "--log-dir", str(tmp_path / "log"), "-j", "0"]) == 2
    printed = capsys.readouterr()
    assert f"{url}/train.index: the file cannot be fetched" in printed.err
    assert "SECRET" not in printed.err + printed.out + caplog.text


def test_question_mark_belongs_to_name_of_other_protocols() -> None:
    assert parse_data_path("s3://bucket/a?b").parent.url == "s3://bucket"
    assert (parse_data_path("s3://bucket/a?b") / "train").url == "s3://bucket/a?b/train"


def test_other_protocols_raise(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert "Install s3fs" in _refusal(parse_data_path("s3://a/b/train"))
    assert "Connection refused" in _refusal(parse_data_path("ftp://127.0.0.1:1/b/train"))
    assert "Protocol not known" in _refusal(parse_data_path("nothing://a/b/train"))
    assert "memory://nobody/train.index: " in _refusal(parse_data_path("memory://nobody/train"))
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "_open", _raises(PermissionError("denied")))
    assert "the file cannot be fetched: denied" in _refusal(parse_data_path(memory) / "train")


def _raises(error: Exception) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        raise error

    return function
