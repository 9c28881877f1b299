"""Settings, records, images, shards and indices with any content: success or one message.

`make faults` takes ten thousand cases for each.
"""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from PIL import Image

from tests.cli.conftest import SETTINGS
from tests.data.sample_images import make_folder
from tests.faults.fuzz import EXAMPLES, JSON, damaged_tree, fuzz, mutated
from zoo.config.parse import experiments_dir, load_experiment, parse_experiment
from zoo.data.dataset import Source, open_source
from zoo.data.prepare.write_shards import write_shards
from zoo.data.reading import decode_as, load_rgb
from zoo.data.sources.folder import FolderSource
from zoo.data.sources.index import index_path
from zoo.data.sources.shards import write_shard_index
from zoo.data.transforms.pixels import Box, open_pixels
from zoo.weights._description import parse_description

# Each of the following functions returns the inputs of a reader, and a function that reads one.
Reader = tuple[st.SearchStrategy[Any], Callable[[Any], object]]


def _settings(folder: Path) -> Reader:
    full = load_experiment("cityscapes_wider_resnet38_ipabn-sync_872_class_uniform").model_dump(mode="json")
    return damaged_tree(SETTINGS) | damaged_tree(full) | JSON, lambda content: parse_experiment(content, "test")


def _experiment_file(folder: Path) -> Reader:
    path = folder / "tiny.json"
    originals = [file.read_bytes() for file in sorted(experiments_dir().glob("res*.json"))[:5]]

    def read(content: bytes) -> None:
        path.write_bytes(content)
        load_experiment(path)

    return mutated(originals) | st.binary(max_size=200), read


def _record(folder: Path) -> Reader:
    record = parse_experiment(SETTINGS, "test").record(("a", "b")).content()
    keys = st.sampled_from(("network", "config", "class_names", "state_dict"))
    cases = damaged_tree({"network": record, "state_dict": {}}) | st.dictionaries(keys, JSON)
    return cases, lambda content: parse_description(content, "weights.pth")


def _image(folder: Path) -> Reader:
    noise = np.random.default_rng(0).integers(0, 256, (16, 12, 3), dtype=np.uint8)
    encoded = []
    for name in ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP"):
        for mode in ("RGB", "L", "1", "P", "I;16"):
            image = Image.fromarray(noise).convert("L" if mode == "I;16" else mode)
            image = Image.fromarray(np.asarray(image).astype(np.uint16) * 200) if mode == "I;16" else image
            try:
                image.save(file := io.BytesIO(), name)
            except (OSError, KeyError):
                continue  # the format does not have the mode
            encoded.append(file.getvalue())
    return mutated(encoded), lambda content: decode_as(content, "a.jpg", load_rgb, "an image")


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


def _part_of_jpeg(folder: Path) -> Reader:
    sizes = st.integers(0, 65535) | st.sampled_from([0, 1, 19, 26, 65500, 65535])
    claimed = st.builds(_with_size, st.sampled_from(_jpegs()), sizes, sizes)

    def read(encoded: bytes) -> None:
        pixels = open_pixels(encoded, "a.jpg")
        height, width = pixels.height, pixels.width
        part = pixels.part(Box(0, 0, max(1, height // 2), max(1, width // 2)))
        assert part.resized(8, 8).tensor().shape == (3, 8, 8)

    return mutated(_jpegs()) | claimed, read


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


def _shards(folder: Path) -> Path:
    """Return a folder of images in shards, and its index."""
    make_folder(folder / "folder", {"ant": 2, "bee": 3})
    write_shards(FolderSource(folder / "folder"), folder / "train", per_shard=2, seed=0)
    return folder / "train"


def _shard_index(folder: Path) -> Reader:
    root = _shards(folder)

    def read(content: bytes) -> None:
        index_path(root).write_bytes(content)
        _use(open_source(root))

    return mutated([index_path(root).read_bytes()]), read


def _changed_shard(folder: Path) -> Reader:
    """The bits of images are noticed that differ from the index."""
    root = _shards(folder)
    expected = [open_source(root).read(index) for index in range(5)]

    def read(content: bytes) -> None:
        (root / "000000.tar").write_bytes(content)
        source = open_source(root)
        assert [source.read(index) for index in range(5)] == expected

    return mutated([(root / "000000.tar").read_bytes()]), read


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


def _foreign_shard(folder: Path) -> Reader:
    originals = [_tar(tar_format) for tar_format in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)]

    def read(content: bytes) -> None:
        (folder / "0.tar").write_bytes(content)
        write_shard_index(folder, index_path(folder))
        _use(open_source(folder, allow_empty_classes=True))

    return mutated(originals) | st.binary(max_size=1100), read


READERS = (
    _settings, _experiment_file, _record, _image, _part_of_jpeg, _shard_index, _changed_shard, _foreign_shard,
)  # fmt: skip


@EXAMPLES
@pytest.mark.filterwarnings("ignore")  # PIL warns of metadata that it cannot read
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__[1:])
def test_any_input_is_read_or_refused(reader: Callable[[Path], Reader], examples: int, tmp_path: Path) -> None:
    cases, read = reader(tmp_path)
    fuzz(read, examples, cases, tmp_path)
