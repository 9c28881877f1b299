"""The bundled sample: 5,000 images of Fashion-MNIST as an ImageFolder tree, unpacked on first use.

The images are the first 400 of each of the ten classes in the original training file (train-images-idx3-ubyte.gz) and
the first 100 in the original test file (t10k-images-idx3-ubyte.gz), in the order of the files, unchanged.
fashion_mnist_sample.npz, written by numpy.savez_compressed, has the arrays ``train`` (10, 400, 28, 28) and ``val`` (10,
100, 28, 28), uint8, in the order of ``CLASSES``, which are the original labels 0 to 9.

Fashion-MNIST is by Zalando SE (https://github.com/zalandoresearch/fashion-mnist), under the MIT license beside
the archive.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from zoo.data.prepare.output import cached_folder

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


def unpack_sample() -> Path:
    """Return the folder with train/ and val/, unpacked into the cache on first use, see `cached_folder`.

    The images are 28x28 grayscale PNG files. Raises DataError if the folder cannot be written.
    """
    return cached_folder(SAMPLE_NAME, _build, ARCHIVE.read_bytes())


def _build(tree: Path) -> None:
    with np.load(ARCHIVE, allow_pickle=False) as archive:
        for split in SPLITS:
            for name, images in zip(CLASSES, archive[split], strict=True):
                folder = tree / split / name
                folder.mkdir(parents=True)
                for index, pixels in enumerate(images):
                    Image.fromarray(pixels).save(folder / f"{index:03}.png")
    shutil.copyfile(LICENSE, tree / LICENSE.name)
