"""`zoo segment`, from the arguments to the files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from PIL import Image

from tests.cli.conftest import write_segmenter
from tests.data.sample_images import random_image
from zoo.cli import main


class Files(NamedTuple):
    """An experiment, weights for it as a snapshot of body, head and cls, and a folder of images."""

    config: Path
    snapshot: Path
    images: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    root = tmp_path_factory.mktemp("segment")
    config, snapshot = write_segmenter(root)
    for seed, name in enumerate(("a.png", "sub/b.JPG", "c.webp")):
        (root / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        random_image(seed, 40, 60).save(root / "in" / name)
    return Files(config, snapshot, root / "in")


def _run(command: str, *words: object) -> int:
    return main([command, *map(str, words)])


def _segment(files: Files, out: Path, *words: object) -> int:
    return _run("segment", files.config, files.images, out, "--weights", files.snapshot, *words)


def _written(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_segment_writes_requested_files_and_prints_their_number(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--output", "palette", "prob", "overlay", "--scales", "0.5", "1", "--flip", "--fusion-mode", "max")
    assert _segment(files, tmp_path / "new" / "out", *options) == 0
    output = capsys.readouterr()
    assert "3 of 3 images segmented" in output.out
    folders = {"palette": "png", "prob": "npz", "overlay": "png"}
    expected = {f"{kind}/{name}.{end}" for kind, end in folders.items() for name in ("a", "sub/b", "c")}
    assert _written(tmp_path / "new" / "out") == expected
    with Image.open(tmp_path / "new" / "out" / "palette" / "a.png") as image:
        assert image.size == (40, 60)
        assert image.getpalette("RGB")[:3] == [0xA5, 0x2A, 0x2A]  # the palette of Vistas, the experiment's layout
    assert _segment(files, tmp_path / "new" / "out", *options) == 0
    assert "0 of 0 images segmented" in (text := capsys.readouterr().out)
    assert "3 already had files" in text


def test_segment_goes_on_after_broken_image_and_exits_with_code_2(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (images := tmp_path / "in").mkdir()
    random_image(0).save(images / "a.png")
    (images / "broken.png").write_bytes(b"no image")
    assert _run("segment", files.config, images, tmp_path / "out", "--weights", files.snapshot) == 2
    output = capsys.readouterr()
    assert "1 of 2 images segmented" in output.out
    assert "broken.png" in output.err
    assert "1 of 2 images could not be segmented and are listed above" in output.err
    assert _written(tmp_path / "out") == {"palette/a.png"}
