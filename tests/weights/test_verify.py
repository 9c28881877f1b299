"""``zoo fetch`` and ``zoo verify`` list the files of the cache and check them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.weights.conftest import CONTENT, MD5, NAME
from tests.weights.server import Server, fails
from zoo.cli import main
from zoo.weights.cache import audit_cache, weights_path
from zoo.weights.published import published

OTHER = "resnet50_ipabn-sync_lr_512"
ROOT = Path(__file__).parents[2]


def states(cache: Path) -> dict[str, str]:
    return {str(entry.path.relative_to(cache)): entry.status for entry in audit_cache()}


def put(cache: Path, **files: bytes) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (cache / name).write_bytes(content)


def test_fetch_prints_where_the_files_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", NAME]) == 0
    assert capsys.readouterr().out == f"{weights_path(NAME)}\n"


def test_fetch_without_names_lists_all_and_downloads_nothing(
    server: Server, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(cache, **{f"{NAME}.pth.tar": CONTENT})
    assert main(["fetch"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 10 + 1
    yes = [line for line in lines if "| yes " in line]
    assert len(yes) == 1
    assert all(word in yes[0] for word in (NAME, "0.30", MD5, "ImageNet terms of access"))
    assert server.requests == []


def test_a_download_that_fails_exits_with_2(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.usual = fails(404)
    assert main(["fetch", NAME]) == 2
    assert f"zoo fetch: {NAME}: the server answered 404 Not Found" in capsys.readouterr().err


def test_a_download_that_fails_does_not_keep_the_others_from_being_fetched(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(published()[OTHER], "md5", MD5)
    server.script = [fails(404)]
    assert main(["fetch", NAME, OTHER]) == 2
    printed = capsys.readouterr()
    assert printed.out == f"{weights_path(OTHER)}\n"
    assert f"{NAME}: the server answered 404 Not Found" in printed.err
    assert f"1 of 2 files were not fetched: {NAME}; run the same command again" in printed.err


def test_the_audit_tells_good_damaged_partial_and_unknown_files_apart(cache: Path) -> None:
    put(
        cache,
        **{
            f"{NAME}.pth.tar": CONTENT,
            f"{NAME}.pth.tar.lock": b"",
            f"{OTHER}.pth.tar": CONTENT,
            f"{OTHER}.pth.tar.part": CONTENT[:9],
            "mine.pth": b"my own",
            f"{NAME}.pth(1).tar": CONTENT,
        },
    )
    (cache / "folder").mkdir()
    assert states(cache) == {
        "folder": "unknown",
        "mine.pth": "unknown",
        f"{NAME}.pth(1).tar": "unknown",
        f"{NAME}.pth.tar": "ok",
        f"{OTHER}.pth.tar": "damaged",
        f"{OTHER}.pth.tar.part": "partial",
    }
    notes = {entry.path.name: entry.note for entry in audit_cache()}
    assert notes[f"{NAME}.pth(1).tar"] == f"holds {NAME}; rename it to {NAME}.pth.tar"
    assert MD5 in notes[f"{OTHER}.pth.tar"]
    assert notes[f"{OTHER}.pth.tar.part"].startswith("9 bytes; ")


def test_verify_exits_with_3_when_a_file_is_damaged_and_leaves_it(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(cache, **{f"{NAME}.pth.tar": CONTENT, "mine.pth": b"my own"})
    assert main(["verify"]) == 0
    put(cache, **{f"{OTHER}.pth.tar": CONTENT})
    assert main(["verify"]) == 3
    streams = capsys.readouterr()
    assert f"zoo verify: 1 of 3 files differ from the published ones: {OTHER}.pth.tar is damaged" in streams.err
    assert "| ok " in streams.out
    for content in (CONTENT, b"my own"):
        assert hashlib.sha256(content).hexdigest() in streams.out
    assert (cache / f"{OTHER}.pth.tar").read_bytes() == CONTENT
    assert main(["verify", NAME]) == 0


@pytest.mark.parametrize(("files", "state"), [({}, "missing"), ({f"{NAME}.pth.tar.part": b"x"}, "partial")])
def test_verify_exits_with_3_when_a_named_file_is_not_there(
    files: dict[str, bytes], state: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(cache, **files)
    assert main(["verify", NAME]) == 3
    assert f"is {state}" in capsys.readouterr().err
