"""Fetching published weights: from the cache, a mirror or Google Drive, with every fault of a server."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import zoo
from tests.refusals import refused
from tests.weights.conftest import CONTENT, MD5, NAME
from tests.weights.server import Answer, Handler, Server, fails, redirects, sends, stalls, truncates
from zoo.cli import main
from zoo.config.published import Digest, entry_of, published
from zoo.data.prepare.sample import unpack_sample
from zoo.errors import ConfigError, WeightsError
from zoo.weights import _cache as weights_cache
from zoo.weights import fetch_weights
from zoo.weights._cache import weights_path
from zoo.weights._read import read_published

FILE = f"/{NAME}.pth.tar"
FETCH = f"""
import sys
from zoo.weights import fetch_weights
from zoo.config.published import Digest, published
published()[{NAME!r}].digest = Digest("md5", {MD5!r})
print("ready", flush=True)
sys.stdin.readline()
print(fetch_weights({NAME!r}), flush=True)
"""


def put_in_cache(content: bytes = CONTENT) -> Path:
    path = weights_path(NAME)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "address"),
    [
        (NAME, f"https://drive.google.com/uc?id={entry_of(NAME).weights.drive_id}"),
        (
            "revbifpn_s0_imagenet",
            "https://cerebras-public.s3.us-west-2.amazonaws.com/revbifpn/revbifpn_s0.pth.tar",
        ),
    ],
)
def test_without_mirror_file_comes_from_its_authors(name: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def deliver(url: str, output: str, **options: object) -> None:
        assert url == address
        Path(output).write_bytes(CONTENT)

    monkeypatch.delenv("ZOO_WEIGHTS_URL")
    monkeypatch.setattr("gdown.download", deliver)
    if name != NAME:
        found, expected = hashlib.sha256(CONTENT).hexdigest(), entry_of(name).digest.digits
        refused(WeightsError, lambda: fetch_weights(name), "300,004 bytes", found, expected, entry_of(name).page)
        monkeypatch.setattr(published()[name], "digest", Digest("sha256", found))
    assert fetch_weights(name).read_bytes() == CONTENT


def test_file_in_cache_is_not_downloaded_again(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch_weights(NAME) == fetch_weights(NAME) == weights_path(NAME)
    assert main(["fetch", NAME]) == 0
    assert capsys.readouterr().out == f"{weights_path(NAME)}\n"
    assert len(server.requests) == 1


def test_offline_uses_cache_and_sends_no_request(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    page, path = entry_of(NAME).page, str(weights_path(NAME))
    refused(WeightsError, lambda: fetch_weights(NAME), "ZOO_OFFLINE", NAME, MD5, page, path)
    put_in_cache()
    assert fetch_weights(NAME).read_bytes() == CONTENT
    assert server.requests == []


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("resnet34_ipabn_lr_512", ["'resnet34_ipabn_lr_512'; ", " resnet34_"]),
        ("resnext101", ["architecture", "resnext101_stdbn_lr_256, resnext101_ipabn"]),
        ("../resnet34", ["'../resnet34'"]),
    ],
)
def test_unknown_names_raise_with_the_nearest(name: str, names: list[str], server: Server) -> None:
    refused(ConfigError, lambda: fetch_weights(name), *names)
    assert server.requests == []


# The cache


def test_damaged_file_in_cache_raises_and_stays(server: Server) -> None:
    damaged = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    path, found = put_in_cache(damaged), hashlib.md5(damaged).hexdigest()
    for _ in range(2):
        refused(WeightsError, lambda: fetch_weights(NAME), str(path), found, MD5, f"zoo fetch {NAME}")
    assert path.read_bytes() == damaged
    assert server.requests == []


def test_verified_bytes_are_bytes_read(tmp_path: Path) -> None:
    with weights_cache.open_published(NAME) as file:
        (tmp_path / "other").write_bytes(b"other")
        (tmp_path / "other").replace(weights_path(NAME))
        assert file.read() == CONTENT
    refused(WeightsError, lambda: read_published(NAME), "md5")


@pytest.mark.slow
def test_new_cache_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o755)
    for folder, fill, mode in (
        ("cache", lambda: fetch_weights(NAME), 0o700),
        ("other", unpack_sample, 0o700),
        ("shared", lambda: fetch_weights(NAME), 0o755),
    ):
        monkeypatch.setenv("ZOO_CACHE", str(tmp_path / folder))
        fill()
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == mode


@pytest.mark.parametrize("in_the_way", ["cache", "cache/weights", f"cache/weights/{NAME}.pth.tar.lock/x"])
def test_unwritable_cache_raises(in_the_way: str, tmp_path: Path) -> None:
    (tmp_path / in_the_way).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / in_the_way).write_text("")
    refused(WeightsError, lambda: fetch_weights(NAME), NAME, "cannot be written", "ZOO_CACHE")


def test_full_disk_raises_and_leaves_no_partial_file(cache: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # without root there is no smaller disk
    try:
        with pytest.raises(WeightsError, match="ZOO_CACHE") as caught:
            fetch_weights(NAME)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno in (errno.EFBIG, errno.ENOSPC)
    assert [path.name for path in cache.iterdir()] == [f"{NAME}.pth.tar.lock"]


# What servers do


def test_interrupted_transfer_is_retried(server: Server, cache: Path) -> None:
    server.script = {FILE: [truncates(150_000)]}
    path = fetch_weights(NAME)
    assert path.read_bytes() == CONTENT
    assert len(server.requests) == 2
    assert {file.name for file in cache.iterdir()} == {path.name, f"{path.name}.lock"}


def sends_forever(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while not handler.server.is_over.is_set():
        handler.wfile.write(bytes(2**16))


@pytest.mark.parametrize(
    ("usual", "reason"),
    [
        pytest.param(fails(404), "404 Client Error: Not Found", id="404"),
        pytest.param(redirects("file:///etc/passwd"), "No connection adapters", id="redirected to a file"),
        pytest.param(redirects("http://[::1"), "Invalid IPv6 URL|Failed to parse", id="redirected to a malformed URL"),
        pytest.param(truncates(1000), "Download is incomplete", id="always truncated"),
        pytest.param(sends(CONTENT[::-1]), "300,004 bytes were received, but the md5 is", id="wrong bytes"),
        pytest.param(sends_forever, "1,048,576 bytes", id="endless"),
    ],
)
def test_permanent_faults_raise_and_leave_no_file(
    usual: Answer, reason: str, server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_cache, "MAX_FILE_BYTES", 2**20)
    server.usual = usual
    names = (NAME, MD5, entry_of(NAME).page, "ZOO_WEIGHTS_URL", str(cache / f"{NAME}.pth.tar"))
    found = refused(WeightsError, lambda: fetch_weights(NAME), *names)
    assert re.search(reason, found)
    assert found.isprintable()
    assert [file.name for file in cache.iterdir()] == [f"{NAME}.pth.tar.lock"]


@pytest.mark.parametrize(
    ("mirror", "error", "names"),
    [
        ("example.org/weights", ConfigError, ["ZOO_WEIGHTS_URL", "example.org/weights"]),
        ("file:///tmp", ConfigError, ["ZOO_WEIGHTS_URL", "file:///tmp"]),
        ("https://", ConfigError, ["ZOO_WEIGHTS_URL", "https://"]),
        ("ftp://127.0.0.1/?sig=secret", ConfigError, ["ZOO_WEIGHTS_URL"]),
        ("http://127.0.0.1:9/weights", WeightsError, [NAME, "Connection refused"]),
        ("http://user:secret@127.0.0.1:1/weights/", WeightsError, [NAME, "127.0.0.1", "refused"]),
        ("http://127.0.0.1:1/?sig=secret", WeightsError, [NAME]),
        ("https://nosuch.invalid/weights", WeightsError, [NAME, "Failed to resolve 'nosuch.invalid'"]),
        ("http://user:secret@nosuch.invalid/weights", WeightsError, [NAME, "Failed to resolve 'nosuch.invalid'"]),
    ],
)
def test_unusable_mirror_is_named_without_its_secrets(
    mirror: str, error: type[Exception], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOO_WEIGHTS_URL", mirror)
    message = refused(error, lambda: fetch_weights(NAME), *names)
    for torn in ("Caused by", "HTTPConnection", "HTTPSConnection", "...", "secret"):
        assert torn not in message


def test_query_of_signed_mirror_follows_file_and_is_not_logged(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ZOO_WEIGHTS_URL", f"{server.url}/?sig=SECRET")
    assert fetch_weights(NAME) == weights_path(NAME)
    assert server.requests == [f"{FILE}?sig=SECRET"]
    assert "SECRET" not in caplog.text


# Several processes, and the callers


@pytest.mark.slow
def test_another_process_downloads_if_the_first_is_killed(server: Server) -> None:
    server.script = {FILE: [stalls(2**17 + 1000)]}
    path = weights_path(NAME)
    processes = [
        subprocess.Popen([sys.executable, "-c", FETCH], stdin=-1, stdout=-1, stderr=-1, text=True) for _ in range(3)
    ]
    killed, *heirs = processes
    with killed, heirs[0], heirs[1]:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        start(killed)
        deadline = time.monotonic() + 30
        while not server.requests:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for heir in heirs:
            start(heir)
        time.sleep(0.3)
        assert len(server.requests) == 1  # the others wait for the lock
        os.kill(killed.pid, signal.SIGKILL)
        outputs = [heir.communicate(timeout=30) for heir in heirs]
    assert [output for output, _ in outputs] == [f"{path}\n"] * 2, outputs
    assert path.read_bytes() == CONTENT
    assert len(server.requests) == 2


def start(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.slow
def test_get_pretrained_downloads_verifies_and_loads(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state_dict = zoo.get(NAME).state_dict()
    torch.save({"state_dict": {f"module.{key}": value for key, value in state_dict.items()}}, tmp_path / "w")
    server.content = content = (tmp_path / "w").read_bytes()
    monkeypatch.setattr(published()[NAME], "digest", Digest("md5", hashlib.md5(content).hexdigest()))
    with caplog.at_level(logging.INFO, logger="zoo"):
        for name in (NAME, "resnet34"):
            model = zoo.get(name, pretrained=True)
            assert all(torch.equal(value, state_dict[key]) for key, value in model.state_dict().items())
    assert len(server.requests) == 1
    assert f"{NAME}: downloading {server.url}{FILE}" in caplog.text
    weights_path(NAME).write_bytes(content[:-1] + b"x")
    monkeypatch.setattr("zoo.registry.get._build", lambda *args, **kwargs: pytest.fail("a network was built"))
    for load in (lambda: zoo.get(NAME, pretrained=True), lambda: zoo.get("resnet34", weights=NAME)):
        refused(WeightsError, load, "md5")


def test_failed_download_exits_with_2(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.usual = fails(404)
    assert main(["fetch", NAME]) == 2
    assert f"zoo fetch: {NAME}: 404 Client Error: Not Found" in capsys.readouterr().err
