"""The bundled scenes: garments of Fashion-MNIST on a textured background, with label maps.

A scene has 96 x 96 px and shows one to five garments of one class on a dark ground, each scaled, tinted, and placed at
random where it occludes little. Class 0 is the ground; 1 to 10 are the garments in the order of
`zoo.data.prepare.sample.CLASSES`, equally frequent. Scenes of train/ use only training images of the sample, scenes of
val/ only its validation images. Colors are independent of classes. The scenes are easy, so that a small network learns
them within the minutes of a quickstart: garments are whole, pale and of similar size, and several in a scene
disambiguate a shirt from a coat. The folder garments/ has each garment alone, to pretrain a body.

All numbers are integers computed from a hash function, so the pixels are the same on every machine and with every
version of the libraries; their digest is `PIXELS_SHA256`.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from zoo.data.prepare.output import cached_folder
from zoo.data.prepare.sample import ARCHIVE, CLASSES, LICENSE
from zoo.errors import VerificationError

SCENES_NAME = "fashion-scenes"
SCENE_CLASSES = ("ground", *CLASSES)
NUM_SCENES = {"train": 1200, "val": 200}
NUM_GARMENTS = {"train": 400, "val": 100}  # per class: all images of the sample
SIDE_PX = 96
GARMENT_PX = (38, 48)
MAX_GARMENTS = 5
GARMENTS_DIR = "garments"  # folder of the images of single garments
GARMENT_SIDE_PX = 48
NUM_POSITIONS = 4  # random positions per garment, of which the one that occludes least is used
PIXELS_SHA256 = "c2f96f9b014cbf21d298cba3055777499c69d31cd5e744dc23b867650ff4e952"

MAX_GROUND_VALUE = 110  # largest value of the ground
SILHOUETTE_THRESHOLD = 24  # gray values above it belong to the garment, those below to its soft edges
MIN_GARMENT_VALUE = 80  # value of black parts of a garment, so that they keep its color
MIN_COLOR_VALUE = 160  # smallest value of a color, so that textures are visible in all channels

# Colors of the classes in the label maps, which are palette images.
PALETTE = (
    (0, 0, 0), (230, 25, 75), (60, 180, 75), (255, 225, 25), (0, 130, 200), (245, 130, 48), (145, 30, 180),
    (70, 240, 240), (240, 50, 230), (210, 245, 60), (170, 110, 40),
)  # fmt: skip


class Scene(NamedTuple):
    """An image (96, 96, 3) uint8 and the classes of its pixels (96, 96) uint8."""

    image: np.ndarray
    classes: np.ndarray


def unpack_scenes(cache: Path | None = None) -> Path:
    """Return the folder with train/ and val/, each with images/ and labels/, created in ``cache`` on first use.

    The layout is "folders" of `zoo.data.label_maps`, with classes.txt. Its folder garments/ has class folders in train/
    and val/, with images of 48 x 48 px of one garment each. Raises DataError if the folder cannot be written.
    """
    return cached_folder(SCENES_NAME, _build, f"{PIXELS_SHA256} of {NUM_SCENES} and {NUM_GARMENTS}".encode(), cache)


def scenes(split: str) -> Iterator[Scene]:
    """Yield the scenes of ``split`` ("train" or "val") in order."""
    with np.load(ARCHIVE, allow_pickle=False) as archive:
        garments = archive[split]
    silhouettes: dict[tuple[int, int], np.ndarray] = {}
    for index in range(NUM_SCENES[split]):
        yield _compose(garments, index % len(garments), silhouettes, _HashRng(f"{split} {index}"))


def single_garments(split: str) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the class, from 0, and an image (48, 48, 3) uint8 of each garment of ``split``, in order."""
    with np.load(ARCHIVE, allow_pickle=False) as archive:
        garments = archive[split]
    for number, of_class in enumerate(garments):
        for index, garment in enumerate(of_class[: NUM_GARMENTS[split]]):
            rng = _HashRng(f"{split} {number} {index} alone")
            image = _ground(rng, GARMENT_SIDE_PX)
            classes = np.zeros((GARMENT_SIDE_PX, GARMENT_SIDE_PX), dtype=np.uint8)
            side = rng.between(GARMENT_PX[0], GARMENT_SIDE_PX)
            place = rng.between(0, GARMENT_SIDE_PX - side), rng.between(0, GARMENT_SIDE_PX - side)
            _paint(image, classes, garment, _silhouette(garment), number + 1, side, *place, _color(rng))
            yield number, image.astype(np.uint8)


def _build(tree: Path) -> None:
    digest = hashlib.sha256()
    for split in NUM_SCENES:
        for kind in ("images", "labels"):
            (tree / split / kind).mkdir(parents=True)
        for index, (image, classes) in enumerate(scenes(split)):
            digest.update(image.tobytes() + classes.tobytes())
            Image.fromarray(image).save(tree / split / "images" / f"{index:04}.png")
            label_map = Image.fromarray(classes)
            label_map.putpalette([value for color in PALETTE for value in color])
            label_map.save(tree / split / "labels" / f"{index:04}.png")
        for name in CLASSES:
            (tree / GARMENTS_DIR / split / name).mkdir(parents=True)
        for position, (number, image) in enumerate(single_garments(split)):
            digest.update(image.tobytes())
            file = f"{position % NUM_GARMENTS[split]:03}.png"  # sorted by class, equally many of each
            Image.fromarray(image).save(tree / GARMENTS_DIR / split / CLASSES[number] / file)
    if digest.hexdigest() != PIXELS_SHA256:
        what = f"the pixels of the scenes are wrong: sha256 {digest.hexdigest()}, expected {PIXELS_SHA256}"
        raise VerificationError(what, "zoo/data/prepare/scenes.py", "reinstall zoo")
    (tree / "classes.txt").write_text("\n".join(SCENE_CLASSES) + "\n", encoding="utf-8")
    shutil.copyfile(LICENSE, tree / LICENSE.name)


class _HashRng:
    """A generator of random integers, seeded by a text."""

    def __init__(self, text: str) -> None:
        self._hash = hashlib.shake_128(text.encode())
        self._bytes = b""
        self._used = 0

    def below(self, end: int) -> int:
        """Return a number from 0 to ``end`` - 1."""
        return int.from_bytes(self._take(4), "little") % end

    def between(self, low: int, high: int) -> int:
        """Return a number from ``low`` to ``high``, both included."""
        return low + self.below(high - low + 1)

    def array(self, *shape: int) -> np.ndarray:
        """Return numbers from 0 to 255, int64."""
        content = np.frombuffer(self._take(int(np.prod(shape))), dtype=np.uint8)
        return content.reshape(shape).astype(np.int64)

    def _take(self, count: int) -> bytes:
        self._used += count
        if self._used > len(self._bytes):
            self._bytes = self._hash.digest(2 * self._used + 4096)
        return self._bytes[self._used - count : self._used]


def _compose(garments: np.ndarray, number: int, silhouettes: dict[tuple[int, int], np.ndarray], rng: _HashRng) -> Scene:
    """Return a random scene of the ``garments`` (class, image, 28, 28) of class ``number``."""
    image, classes = _ground(rng, SIDE_PX), np.zeros((SIDE_PX, SIDE_PX), dtype=np.uint8)
    for _ in range(max(rng.between(1, MAX_GARMENTS), rng.between(1, MAX_GARMENTS))):
        key = number, rng.below(garments.shape[1])
        if key not in silhouettes:
            silhouettes[key] = _silhouette(garments[key])
        side = rng.between(*GARMENT_PX)
        places = [(rng.between(0, SIDE_PX - side), rng.between(0, SIDE_PX - side)) for _ in range(NUM_POSITIONS)]
        top, left = min(
            places, key=lambda place: np.count_nonzero(classes[place[0] : place[0] + side, place[1] : place[1] + side])
        )
        _paint(image, classes, garments[key], silhouettes[key], key[0] + 1, side, top, left, _color(rng))
    return Scene(image.astype(np.uint8), classes)


def _color(rng: _HashRng) -> np.ndarray:
    """Return a random pale color: three numbers from `MIN_COLOR_VALUE` to 255."""
    return MIN_COLOR_VALUE + rng.array(3) * (255 - MIN_COLOR_VALUE) // 255


def _ground(rng: _HashRng, side: int) -> np.ndarray:
    """Return a ground (side, side, 3), int64, of soft patches in two dark colors, with per-pixel noise."""
    first, second = rng.array(2, 3)
    patches = _scaled(rng.array(*[rng.between(3, 12)] * 2), side)[..., None]
    noise = rng.array(side, side, 1) * rng.between(0, 48) // 255
    return np.clip((first * patches + second * (255 - patches)) // 255 + noise - 16, 0, 255) * MAX_GROUND_VALUE // 255


def _paint(
    image: np.ndarray,
    classes: np.ndarray,
    garment: np.ndarray,
    silhouette: np.ndarray,
    number: int,
    side: int,
    top: int,
    left: int,
    color: np.ndarray,
) -> None:
    """Draw a garment onto ``image`` and ``classes``, which are mutated; it is clipped at the border."""
    part = tuple(slice(max(0, -start), min(side, len(image) - start)) for start in (top, left))
    place = tuple(slice(max(0, start), min(len(image), start + side)) for start in (top, left))
    covered = _scaled(silhouette * 255, side)[part] >= 128
    shade = MIN_GARMENT_VALUE + _scaled(garment.astype(np.int64), side)[part] * (255 - MIN_GARMENT_VALUE) // 255
    image[place][covered] = (shade[..., None] * color // 255)[covered]
    classes[place][covered] = number


def _silhouette(garment: np.ndarray) -> np.ndarray:
    """Return the mask of a garment (28, 28), 0 or 1: all pixels not connected to the border by dark pixels."""
    dark = np.pad(garment <= SILHOUETTE_THRESHOLD, 1, constant_values=True)
    outside = np.zeros_like(dark)
    outside[0, 0] = True
    while True:
        grown = outside.copy()
        grown[1:] |= outside[:-1]
        grown[:-1] |= outside[1:]
        grown[:, 1:] |= outside[:, :-1]
        grown[:, :-1] |= outside[:, 1:]
        grown &= dark
        if (grown == outside).all():
            return (~outside[1:-1, 1:-1]).astype(np.int64)
        outside = grown


def _scaled(image: np.ndarray, side: int) -> np.ndarray:
    """Return a square integer image resized to ``side`` px by bilinear interpolation in integers.

    The center of pixel i of the result is at (i + 1/2) * n / side - 1/2 in the image of n px, a fraction with
    denominator 2 * side.
    """
    size, whole = len(image), 2 * side
    places = np.clip((2 * np.arange(side) + 1) * size - side, 0, (size - 1) * whole)
    first = np.minimum(places // whole, size - 2)
    weight = places - first * whole
    rows = image[first] * (whole - weight)[:, None] + image[first + 1] * weight[:, None]
    both = rows[:, first] * (whole - weight) + rows[:, first + 1] * weight
    scaled: np.ndarray = both // whole**2
    return scaled
