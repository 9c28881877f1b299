"""Published weights come from the cache or into it: once, verified, from where the user said, by one process."""

from __future__ import annotations

import hashlib
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import zoo
from tests.weights.conftest import CONTENT, MD5, NAME
from tests.weights.server import Server, redirects, sends, stalls, truncates
from zoo.data.prepare.sample import unpack_sample
from zoo.errors import ConfigError, WeightsError
from zoo.weights import cache, fetch_weights
from zoo.weights.cache import weights_path
from zoo.weights.download import read_form
from zoo.weights.published import REPLACED_MD5, entry_of, published
from zoo.weights.read import read_published

# What Drive sends instead of a file that it has not looked through for viruses.
CONFIRM = b"""<!DOCTYPE html><html><head><title>Google Drive - Virus scan warning</title></head><body>
<form action="/search"><input type="hidden" name="q" value="no"></form>
<form id="download-form" action="/download?export=no&amp;at=1" method="get"><input type="submit" value="Go"/>
<input type="hidden" name="id" value="the-id"><input type="hidden" name="export" value="download">
<input type="hidden" name="confirm" value="t"><input type="hidden" name="uuid" value="a-b&amp;c">
</form></body></html>"""
CONFIRMED = "/download?export=download&at=1&id=the-id&confirm=t&uuid=a-b%26c"
HTML = "text/html; charset=utf-8"

# A process of its own that fetches NAME.
FETCH = f"""
import sys
from zoo.weights import fetch_weights
from zoo.weights.published import published
published()[{NAME!r}].md5 = {MD5!r}
print("ready", flush=True)
sys.stdin.readline()
print(fetch_weights({NAME!r}), flush=True)
"""


def in_cache(content: bytes = CONTENT) -> Path:
    path = weights_path(NAME)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.fixture
def drive_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server in the place of Google Drive."""
    monkeypatch.delenv("ZOO_WEIGHTS_URL")
    monkeypatch.setattr(cache, "DRIVE_URL", f"{server.url}/uc")
    return server


def test_a_file_in_the_cache_is_not_downloaded_again(server: Server) -> None:
    assert fetch_weights(NAME) == fetch_weights(NAME) == weights_path(NAME)
    assert len(server.requests) == 1


def test_a_mirror_may_have_a_path_and_a_slash_at_its_end(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_WEIGHTS_URL", f"{server.url}/models/v1/")
    fetch_weights(NAME)
    assert server.requests == [(f"/models/v1/{NAME}.pth.tar", None)]


@pytest.mark.parametrize(
    "address", ["example.org/weights", "ftp://example.org", "file:///tmp", "https://", "http:///x"]
)
def test_a_mirror_that_is_no_web_address_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_WEIGHTS_URL", address)
    with pytest.raises(ConfigError, match=f"ZOO_WEIGHTS_URL must be an address .* got '{address}'"):
        fetch_weights(NAME)


def test_drive_is_asked_for_the_files_id(drive_server: Server) -> None:
    assert fetch_weights(NAME).read_bytes() == CONTENT
    assert drive_server.requests == [(f"/uc?export=download&id={published()[NAME].weights.drive_id}", None)]


def test_drives_page_before_large_files_is_confirmed_with_the_fields_of_its_form(drive_server: Server) -> None:
    drive_server.script = [redirects("/warning"), sends(CONFIRM, HTML)]
    assert fetch_weights(NAME).read_bytes() == CONTENT
    assert drive_server.requests[-1] == (CONFIRMED, None)


def test_a_confirmed_download_is_resumed_with_another_confirmation(drive_server: Server) -> None:
    drive_server.script = [sends(CONFIRM, HTML), truncates(100_000), sends(CONFIRM, HTML)]
    assert fetch_weights(NAME, sleep=lambda pause_s: None).read_bytes() == CONTENT
    assert drive_server.requests[-1] == (CONFIRMED, "bytes=100000-")


def test_a_page_after_the_confirmation_is_an_error(drive_server: Server) -> None:
    drive_server.script = [sends(CONFIRM, HTML)] * 2
    with pytest.raises(WeightsError, match=r"a web page came in place of the file \('Google Drive - Virus scan"):
        fetch_weights(NAME)
    assert len(drive_server.requests) == 2


def test_forms_that_lead_elsewhere_are_not_followed() -> None:
    assert read_form('<form action="/x"><input type="hidden" name="q"></form>', "https://a.org/").link is None
    assert read_form('<form id="download" action="javascript:run()"></form>', "https://a.org/").link is None
    assert read_form('<input type="hidden" name="confirm" value="t"></form>', "https://a.org/").link is None
    assert read_form('<form id="download" action="b?c=1"></form>', "https://a.org/d/e").link == "https://a.org/d/b?c=1"


def test_offline_takes_what_is_in_the_cache_and_asks_nobody(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    with pytest.raises(WeightsError, match="not in the cache and ZOO_OFFLINE is set") as caught:
        fetch_weights(NAME)
    for part in (NAME, MD5, entry_of(NAME).page, str(weights_path(NAME))):
        assert part in str(caught.value)
    in_cache()
    assert fetch_weights(NAME).read_bytes() == CONTENT
    assert server.requests == []
    assert not list(weights_path(NAME).parent.glob("*.lock"))


@pytest.mark.parametrize("value", ["", "0", "false"])
def test_offline_can_be_switched_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_OFFLINE", value)
    assert fetch_weights(NAME).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet34_ipabn_lr_512", "no published weights are called 'resnet34_ipabn_lr_512'; the nearest are resnet34_"),
        ("resnext101", "is an architecture; name its published weights: resnext101_stdbn_lr_256, resnext101_ipabn"),
        ("../resnet34", "no published weights are called"),
    ],
)
def test_unknown_names_are_refused_with_those_there_are(name: str, message: str, server: Server) -> None:
    with pytest.raises(ConfigError, match=message):
        fetch_weights(name)
    assert server.requests == []


def test_a_damaged_file_in_the_cache_is_an_error_and_stays(server: Server) -> None:
    damaged = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    path = in_cache(damaged)
    found = hashlib.md5(damaged).hexdigest()
    for _ in range(2):
        with pytest.raises(WeightsError, match=f"the md5 is {found}, not {MD5}; remove it and run zoo fetch") as caught:
            fetch_weights(NAME)
        assert str(caught.value).startswith(f"{path}: ")
    assert path.read_bytes() == damaged
    assert server.requests == []


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are hashed from now on."""
    names: list[str] = []
    digests_of_open = cache._digests_of_open
    monkeypatch.setattr(
        cache,
        "_digests_of_open",
        lambda file, path, *kinds: names.append(path.name) or digests_of_open(file, path, *kinds),
    )
    return names


def test_a_download_is_hashed_once_and_a_file_in_the_cache_each_time(hashed: list[str]) -> None:
    path = fetch_weights(NAME)
    assert hashed == [f"{path.name}.part"]
    for _ in range(2):
        fetch_weights(NAME)
    assert hashed[1:] == [path.name] * 2


def publish(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, torch.Tensor]:
    """Let the server give real weights of NAME, and return them."""
    state_dict = zoo.get(NAME).state_dict()
    torch.save({"state_dict": {f"module.{key}": value for key, value in state_dict.items()}}, tmp_path / "w")
    server.content = (tmp_path / "w").read_bytes()
    monkeypatch.setattr(published()[NAME], "md5", hashlib.md5(server.content).hexdigest())
    return state_dict


def test_weights_that_are_downloaded_and_loaded_are_hashed_once_in_all(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hashed: list[str]
) -> None:
    publish(server, monkeypatch, tmp_path)
    zoo.get(NAME, pretrained=True)
    assert hashed == [f"{NAME}.pth.tar.part"]
    zoo.get("resnet34", weights=NAME)
    assert hashed[1:] == [f"{NAME}.pth.tar"]


def test_pretrained_weights_are_verified_before_a_network_is_built(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.registry._build", lambda *args, **kwargs: pytest.fail("a network was built"))
    server.usual = sends(b"something else")
    with pytest.raises(WeightsError, match="14 bytes were received, but the md5 is"):
        zoo.get(NAME, pretrained=True)
    in_cache(b"something else")
    with pytest.raises(WeightsError, match=r"the md5 is .* remove it and run zoo fetch"):
        zoo.get(NAME, pretrained=True)


def test_of_a_download_too_what_is_read_is_what_was_verified(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another file that takes the name between the download and the reading is not read."""
    state_dict = publish(server, monkeypatch, tmp_path)
    with cache.open_published(NAME) as file:
        torch.save({"other": torch.ones(1)}, other := tmp_path / "other.pth")
        other.replace(weights_path(NAME))
        assert file.read() == server.content
    with pytest.raises(WeightsError, match="the md5 is"):
        read_published(NAME)
    weights_path(NAME).unlink()
    assert read_published(NAME)["state_dict"].keys() == {f"module.{key}" for key in state_dict}


def test_a_change_that_leaves_size_and_time_is_noticed() -> None:
    path = fetch_weights(NAME)
    before = path.stat()
    path.write_bytes(bytes(len(CONTENT)))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(WeightsError, match="the md5 is"):
        fetch_weights(NAME)


@pytest.mark.parametrize("suffix", [".part", ".lock"])
def test_nothing_is_written_through_a_link_in_the_cache(suffix: str, server: Server, tmp_path: Path) -> None:
    """In a cache that others can write to, a link could lead to any file of this user."""
    victim = tmp_path / "victim.txt"
    victim.write_text("precious")
    path = weights_path(NAME)
    path.parent.mkdir(parents=True)
    path.with_name(path.name + suffix).symlink_to(victim)
    with pytest.raises(
        WeightsError, match=rf"{suffix}: it is a symbolic link, which is not written through: remove it"
    ):
        fetch_weights(NAME)
    assert victim.read_text() == "precious"
    assert not path.exists()


def test_a_link_to_nowhere_in_the_place_of_the_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    path = weights_path(NAME)
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "elsewhere")
    assert fetch_weights(NAME).read_bytes() == CONTENT
    assert not path.is_symlink()
    assert not (tmp_path / "elsewhere").exists()


def test_a_pipe_in_the_place_of_the_part_does_not_block() -> None:
    path = weights_path(NAME)
    path.parent.mkdir(parents=True)
    os.mkfifo(path.with_name(f"{path.name}.part"))
    with pytest.raises(WeightsError, match="cannot be written"):
        fetch_weights(NAME)


def test_linked_weights_and_a_linked_cache_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On shared machines people link to files that are there once; their md5 decides."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "file").write_bytes(CONTENT)
    path = weights_path(NAME)
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "shared" / "file")
    assert fetch_weights(NAME) == path
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "link"))
    assert fetch_weights(NAME).read_bytes() == CONTENT


def test_a_new_cache_is_its_owners_and_an_old_one_keeps_its_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, fill in ("cache", lambda: fetch_weights(NAME)), ("other", unpack_sample):
        monkeypatch.setenv("ZOO_CACHE", str(tmp_path / folder))
        fill()
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700
    (tmp_path / "shared").mkdir(mode=0o755)
    (tmp_path / "shared").chmod(0o755)
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "shared"))
    fetch_weights(NAME)
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o755


def test_a_file_of_before_july_2018_is_recognised(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    old = b"PK\x03\x04 with a .bn level"
    monkeypatch.setitem(REPLACED_MD5, NAME, hashlib.md5(old).hexdigest())
    server.usual = sends(old)
    with pytest.raises(WeightsError, match=r"21 bytes were .* published before July 2018, which were replaced;"):
        fetch_weights(NAME)
    path = in_cache(old)
    with pytest.raises(WeightsError, match="before July 2018") as caught:
        fetch_weights(NAME)
    assert f"load it as it is: zoo.get({NAME!r}, weights={str(path)!r})" in str(caught.value)


def test_the_replaced_files_are_those_of_2017_and_2018() -> None:
    assert list(REPLACED_MD5) == list(published())[:6]
    assert not set(REPLACED_MD5.values()) & {entry.md5 for entry in published().values()}


@pytest.mark.parametrize("in_the_way", ["cache", "cache/weights", f"cache/weights/{NAME}.pth.tar.lock/x"])
def test_a_cache_that_cannot_be_written_is_one_error(in_the_way: str, tmp_path: Path) -> None:
    (tmp_path / in_the_way).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / in_the_way).write_text("")
    with pytest.raises(WeightsError, match=f"{NAME}: the weights cannot be written .* set ZOO_CACHE"):
        fetch_weights(NAME)


def test_a_folder_in_the_place_of_the_file_is_an_error() -> None:
    weights_path(NAME).mkdir(parents=True)
    with pytest.raises(WeightsError, match="Is a directory"):
        fetch_weights(NAME)


def test_without_locks_each_process_has_a_part_of_its_own(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    monkeypatch.setattr("zoo.files.fcntl", None)
    path = weights_path(NAME)
    path.parent.mkdir(parents=True)
    path.with_name(f"{path.name}.part").write_bytes(b"of another process")
    assert fetch_weights(NAME).read_bytes() == CONTENT
    assert server.requests[0][1] is None
    assert [file.read_bytes() for file in path.parent.glob("*.part")] == [b"of another process"]


def start() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", FETCH], stdin=-1, stdout=-1, stderr=-1, text=True)


def wait_until_ready(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"


def go(*processes: subprocess.Popen[str]) -> None:
    """Let the processes begin to fetch, at the same time."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def wait_for(path: Path, size: int) -> None:
    """Wait until the file exists and has ``size`` bytes."""
    deadline = time.monotonic() + 30
    while not path.exists() or path.stat().st_size < size:
        assert time.monotonic() < deadline, f"{path} does not grow to {size} bytes"
        time.sleep(0.01)


def test_of_processes_that_fetch_at_once_one_downloads_and_when_it_is_killed_another_continues(server: Server) -> None:
    server.script = [stalls(2**17)]
    path = weights_path(NAME)
    part = path.with_name(f"{path.name}.part")
    killed, *heirs = start(), start(), start()
    with killed, heirs[0], heirs[1]:
        wait_until_ready(killed, *heirs)
        go(killed)
        wait_for(part, 2**16)
        go(*heirs)
        time.sleep(0.2)
        assert len(server.requests) == 1  # they wait
        os.kill(killed.pid, signal.SIGKILL)
        outputs = [heir.communicate(timeout=30) for heir in heirs]
    assert [output for output, _ in outputs] == [f"{path}\n"] * 2, outputs
    assert path.read_bytes() == CONTENT
    assert not part.exists()
    first, second = (ranges for _, ranges in server.requests)
    assert first is None
    assert second is not None


def test_get_pretrained_downloads_verifies_and_loads(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state_dict = publish(server, monkeypatch, tmp_path)
    for name in (NAME, "resnet34"):
        model = zoo.get(name, pretrained=True)
        assert all(torch.equal(value, state_dict[key]) for key, value in model.state_dict().items())
    assert len(server.requests) == 1
    weights_path(NAME).write_bytes(server.content[:-1] + b"x")
    with pytest.raises(WeightsError, match="the md5 is"):
        zoo.get(NAME, pretrained=True)


def test_a_published_name_works_wherever_a_weights_file_does(server: Server) -> None:
    with pytest.raises(WeightsError, match=f"{NAME}.pth.tar: "):  # fetched, and found to be no weights after all
        zoo.get("resnet34", weights=NAME)
