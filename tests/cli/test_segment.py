"""`zoo segment`, from the arguments to the files."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.cli.conftest import Cli, write_segmenter
from tests.data.sample_images import random_image


def _written(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("small_networks")
def test_segment_writes_requested_files_and_names_broken_images(cli: Cli, tmp_path: Path) -> None:
    config, snapshot = write_segmenter(tmp_path)
    images, out = tmp_path / "in", tmp_path / "new" / "out"
    for seed, name in enumerate(("a.png", "sub/b.JPG", "c.webp")):
        (images / name).parent.mkdir(parents=True, exist_ok=True)
        random_image(seed, 40, 60).save(images / name)
    command = ["segment", config, images, out, "--weights", snapshot, "--output", "palette", "prob", "overlay"]
    command += ["--scales", "0.5", "1", "--flip", "--fusion-mode", "max"]
    assert "3 of 3 images segmented" in cli(*command).out
    endings = {"palette": "png", "prob": "npz", "overlay": "png"}
    files = {f"{kind}/{name}.{ending}" for kind, ending in endings.items() for name in ("a", "sub/b", "c")}
    assert _written(out) == files
    with Image.open(out / "palette" / "a.png") as image:
        assert image.size == (40, 60)
        assert image.getpalette("RGB")[:3] == [0xA5, 0x2A, 0x2A]  # the palette of Vistas, the experiment's layout
    (images / "broken.png").write_bytes(b"no image")
    (out / "palette" / "a.png").unlink()
    printed = cli(*command, code=2)
    assert "1 of 2 images segmented, 2 already had files" in printed.out
    assert "broken.png" in printed.err
    assert "1 of 2 images could not be segmented" in printed.err
    assert _written(out) == files
