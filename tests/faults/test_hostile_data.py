"""Images, shards and indices with any content: success or one message.

As in tests/faults/test_hostile_input.py, each test goes through ten thousand cases in `make faults`.
"""

from __future__ import annotations

import io
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from PIL import Image

from tests.data.sample_images import make_folder
from tests.faults.fuzz import EXAMPLES, fuzz, mutated
from zoo.data.dataset import Source, open_source
from zoo.data.prepare.write_shards import write_shards
from zoo.data.sources.folder import FolderSource
from zoo.data.sources.index import index_path
from zoo.data.sources.shards import write_shard_index
from zoo.data.transforms.pixels import Box, open_pixels


def _use(source: Source) -> None:
    """Read the images like training."""
    targets = torch.from_numpy(np.array(source.targets, dtype=np.int64))
    num_images = len(source.names)
    assert targets.shape == (num_images,)
    assert int(targets.min()) >= 0
    assert int(targets.max()) < len(source.classes)
    for window in (None, 2):
        assert sorted(source.order(torch.Generator().manual_seed(0), window).tolist()) == list(range(num_images))
    for index in range(min(num_images, 8)):
        assert len(source.read(index)) < 2**20


def _make(root: Path) -> None:
    """Make the folder ``root`` with images in shards, and its index."""
    make_folder(root.parent / "folder", {"ant": 2, "bee": 3})
    write_shards(FolderSource(root.parent / "folder"), root, per_shard=2, seed=0)


@EXAMPLES
def test_any_bytes_of_index_give_images_or_error(count: int, tmp_path: Path) -> None:
    root = tmp_path / "train"
    _make(root)
    whole = index_path(root).read_bytes()

    def load(content: bytes) -> None:
        index_path(root).write_bytes(content)
        _use(open_source(root))

    fuzz(load, count, mutated([whole]), tmp_path)


def _tar(tar_format: int) -> bytes:
    with tarfile.open(fileobj=(out := io.BytesIO()), mode="w", format=tar_format) as tar:
        for name, content in {
            "x/1.png": b"image",
            "x/1.cls": b"1",
            "x/1.txt": b"words",
            "2.json": b'{"label": 0}',
            "2.jpg": b"an image" * 100,
            f"{'long' * 20}/{'long' * 10}.jpg": b"3",
            f"{'long' * 20}/{'long' * 10}.cls": b"3",
        }.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


@EXAMPLES
def test_any_bytes_of_shard_give_images_or_error(count: int, tmp_path: Path) -> None:
    root = tmp_path / "train"
    root.mkdir()
    originals = [_tar(tar_format) for tar_format in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)]

    def load(content: bytes) -> None:
        (root / "0.tar").write_bytes(content)
        write_shard_index(root, index_path(root))
        _use(open_source(root, allow_empty_classes=True))

    fuzz(load, count, mutated(originals) | st.binary(max_size=1100), tmp_path)


@EXAMPLES
def test_changed_shard_is_noticed(count: int, tmp_path: Path) -> None:
    root = tmp_path / "train"
    _make(root)
    expected = [open_source(root).read(index) for index in range(5)]
    path = root / "000000.tar"
    whole = path.read_bytes()

    def load(content: bytes) -> None:
        path.write_bytes(content)
        source = open_source(root)
        assert [source.read(index) for index in range(5)] == expected

    fuzz(load, count, mutated([whole]), tmp_path)


def _jpegs() -> list[bytes]:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (19, 26, 3), dtype=np.uint8))
    files = []
    for options in ({}, {"progressive": True}, {"subsampling": 0, "optimize": True}, {"restart_marker_blocks": 1}):
        for mode in ("RGB", "L", "CMYK"):
            noise.convert(mode).save(out := io.BytesIO(), "JPEG", **options)
            files.append(out.getvalue())
    return files


def _with_size(encoded: bytes, height: int, width: int) -> bytes:
    """Return a JPEG file that claims another size."""
    for marker in (b"\xff\xc0", b"\xff\xc2"):
        if (place := encoded.find(marker)) >= 0:
            return encoded[: place + 5] + struct.pack(">HH", height, width) + encoded[place + 9 :]
    return encoded


@EXAMPLES
@pytest.mark.filterwarnings("ignore")  # PIL warns of metadata that it cannot read
def test_any_bytes_of_jpeg_file_give_pixels_or_error(count: int, tmp_path: Path) -> None:
    sizes = st.integers(0, 65535) | st.sampled_from([0, 1, 19, 26, 65500, 65535])
    claimed = st.builds(_with_size, st.sampled_from(_jpegs()), sizes, sizes)

    def load(encoded: bytes) -> None:
        pixels = open_pixels(encoded, "a.jpg")
        height, width = pixels.height, pixels.width
        part = pixels.part(Box(0, 0, max(1, height // 2), max(1, width // 2)))
        assert part.resized(8, 8).tensor().shape == (3, 8, 8)

    fuzz(load, count, mutated(_jpegs()) | claimed, tmp_path)
