"""The bundled sample: 5,000 images of Fashion-MNIST as an ImageFolder tree, unpacked on first use.

The images are the first 400 of each of the ten classes in the original training file (train-images-idx3-ubyte.gz) and
the first 100 in the original test file (t10k-images-idx3-ubyte.gz), in the order of the files, unchanged.
fashion_mnist_sample.npz, written by numpy.savez_compressed, holds them as ``train`` (10, 400, 28, 28) and ``val`` (10,
100, 28, 28), uint8, in the order of ``CLASSES``, which are the original labels 0 to 9.

Fashion-MNIST is by Zalando SE (https://github.com/zalandoresearch/fashion-mnist), under the MIT licence beside
the archive.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image

from zoo.errors import DataError
from zoo.files import cache_dir

SAMPLE_NAME = "fashion-mnist"
CLASSES = (
    "t-shirt_top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle_boot",
)
SPLITS = ("train", "val")

ARCHIVE = Path(__file__).with_name("fashion_mnist_sample.npz")
LICENSE = Path(__file__).with_name("LICENSE.fashion-mnist.txt")
MARKER = "contents.sha256"
STALE_S = 3600.0  # unpacking takes seconds


def unpack_sample(cache: Path | None = None) -> Path:
    """Return the folder with train/ and val/, unpacked into ``cache`` unless it is there and as it should be.

    The images are 28x28 grayscale PNG files. ``cache`` is `zoo.files.cache_dir` when not given. The folder appears
    complete or not at all. An outdated or damaged one is mended file by file, so that several processes may do this at
    the same time. Temporary folders of killed processes are removed an hour later. Raises DataError when the folder
    cannot be written.
    """
    tree = (cache or cache_dir()) / SAMPLE_NAME
    _remove_leftovers(tree.parent)
    if not _is_intact(tree):
        try:
            _install(tree)
        except OSError as error:
            raise DataError(
                f"the sample cannot be unpacked: {error}; {tree}: make room there or remove it, or set ZOO_CACHE "
                "to another folder"
            ) from error
    return tree


def _remove_leftovers(cache: Path) -> None:
    """Remove the temporary folders of unpackings that were killed; a young one may be in use by another process."""
    for folder in cache.glob(f".{SAMPLE_NAME}-{'?' * 8}"):  # as tempfile names them
        with suppress(OSError):  # another process removes it, too
            if time.time() - folder.stat().st_mtime > STALE_S:
                shutil.rmtree(folder)


def _install(tree: Path) -> None:
    tree.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{SAMPLE_NAME}-", dir=tree.parent) as temporary:
        built = Path(temporary, SAMPLE_NAME)
        _build(built)
        try:
            built.rename(tree)
        except OSError:  # there is one already: damaged, or another process was faster
            _overwrite(tree, built)


def _build(tree: Path) -> None:
    with np.load(ARCHIVE, allow_pickle=False) as archive:
        for split in SPLITS:
            for name, images in zip(CLASSES, archive[split], strict=True):
                folder = tree / split / name
                folder.mkdir(parents=True)
                for index, pixels in enumerate(images):
                    Image.fromarray(pixels).save(folder / f"{index:03}.png")
    shutil.copyfile(LICENSE, tree / LICENSE.name)
    # The marker is written last. No file is flushed to the disk, as files that a power cut damages no longer fit it.
    (tree / MARKER).write_text(_contents(tree))


def _overwrite(tree: Path, built: Path) -> None:
    """Make ``tree`` equal to ``built`` without a moment in which one of its good files is missing."""
    wanted = {path.relative_to(built) for path in built.rglob("*")}
    for name in sorted(wanted):  # a folder comes before what is in it
        if (built / name).is_dir():
            (tree / name).mkdir(parents=True, exist_ok=True)
        elif not (tree / name).is_file() or not filecmp.cmp(built / name, tree / name, shallow=False):
            os.replace(built / name, tree / name)
    for folder, subfolders, files in os.walk(tree, topdown=False):  # a folder comes after what is in it
        for path in (Path(folder, name) for name in (*files, *subfolders)):
            if path.relative_to(tree) not in wanted:
                with suppress(FileNotFoundError):  # another process does the same
                    path.rmdir() if path.is_dir() else path.unlink()


def _is_intact(tree: Path) -> bool:
    try:
        return (tree / MARKER).read_text() == _contents(tree)
    except (OSError, UnicodeDecodeError):
        return False


def _contents(tree: Path) -> str:
    """Return the digest of the archive and of the names and bytes of all files and folders in train/ and val/."""
    digest = hashlib.sha256(ARCHIVE.read_bytes())
    for split in SPLITS:
        for folder, subfolders, files in os.walk(tree / split):
            subfolders.sort()
            digest.update(f"{Path(folder).relative_to(tree).as_posix()}\n".encode())
            for name in sorted(files):
                digest.update(f"{name}\n".encode())
                path = Path(folder, name)
                digest.update(path.read_bytes() if path.is_file() else b"")  # a pipe would keep the reader waiting
    return digest.hexdigest() + "\n"
