"""The bundled scenes: garments of Fashion-MNIST on a dark ground, with label maps.

A scene has 2 x 2 cells of 48 px, and a garment in one to four of them, all of one class. Each garment is scaled, tinted
and placed at random in its cell. Class 0 is the ground; 1 to 10 are the garments in the order of
`zoo.data.prepare.sample.CLASSES`, equally frequent. Scenes of train/ use only training images of the sample, scenes of
val/ only its validation images. Colors are independent of classes. The scenes are easy, so that a small network learns
them within the minutes of a quickstart. The folder garments/ has each garment alone, to pretrain a body.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from zoo.data.prepare.output import cached_folder
from zoo.data.prepare.sample import ARCHIVE, CLASSES, LICENSE

SCENES_NAME = "fashion-scenes"
SCENE_CLASSES = ("ground", *CLASSES)
NUM_SCENES = {"train": 1200, "val": 200}
NUM_GARMENTS = {"train": 400, "val": 100}  # per class: all images of the sample
CELL_PX = 48
GARMENT_PX = (38, 48)
GARMENTS_DIR = "garments"  # folder of the images of single garments

MAX_GROUND_VALUE = 110  # largest value of the ground
SILHOUETTE_THRESHOLD = 24  # gray values above it belong to the garment, lower ones to its soft edges
MIN_GARMENT_VALUE = 80  # value of black parts of a garment, so that they keep its color
MIN_COLOR_VALUE = 160  # smallest value of a color, so that textures are visible in all channels


class Scene(NamedTuple):
    """An image (S, S, 3) uint8 and the classes of its pixels (S, S) uint8; S is a multiple of `CELL_PX`."""

    image: np.ndarray
    classes: np.ndarray


def unpack_scenes() -> Path:
    """Return the folder with train/ and val/, each with images/ and labels/. Created in the cache on first use.

    The layout is "folders" of `zoo.data.segmentation.label_maps`, with classes.txt. Its folder garments/ has class
    folders in train/ and val/, with images of 48 x 48 px of one garment each. Raises DataError if the folder cannot be
    written.
    """
    return cached_folder(SCENES_NAME, _build, Path(__file__).read_bytes())


def scenes(split: str) -> Iterator[Scene]:
    """Yield the scenes of ``split`` ("train" or "val") in order."""
    with np.load(ARCHIVE, allow_pickle=False) as archive:
        garments = archive[split]
    for index in range(NUM_SCENES[split]):
        rng, number = Random(f"{split} {index}"), index % len(garments)
        scene = _ground(rng, 2 * CELL_PX)
        for cell in rng.sample(range(4), rng.randint(1, 4)):
            _paint(scene, rng.choice(garments[number]), number + 1, divmod(cell, 2), rng)
        yield scene


def single_garments(split: str) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the class (from 0) and the image (48, 48, 3), uint8, of each garment of ``split``, in order."""
    with np.load(ARCHIVE, allow_pickle=False) as archive:
        garments = archive[split]
    for number, of_class in enumerate(garments):
        for index, garment in enumerate(of_class[: NUM_GARMENTS[split]]):
            rng = Random(f"{split} {number} {index} alone")
            scene = _ground(rng, CELL_PX)
            _paint(scene, garment, number + 1, (0, 0), rng)
            yield number, scene.image


def _build(tree: Path) -> None:
    for split in NUM_SCENES:
        for kind in ("images", "labels"):
            (tree / split / kind).mkdir(parents=True)
        for index, (image, classes) in enumerate(scenes(split)):
            Image.fromarray(image).save(tree / split / "images" / f"{index:04}.png")
            Image.fromarray(classes).save(tree / split / "labels" / f"{index:04}.png")
        for name in CLASSES:
            (tree / GARMENTS_DIR / split / name).mkdir(parents=True)
        for position, (number, image) in enumerate(single_garments(split)):
            file = f"{position % NUM_GARMENTS[split]:03}.png"  # garments are sorted by class, with equal numbers
            Image.fromarray(image).save(tree / GARMENTS_DIR / split / CLASSES[number] / file)
    (tree / "classes.txt").write_text("\n".join(SCENE_CLASSES) + "\n", encoding="utf-8")
    shutil.copyfile(LICENSE, tree / LICENSE.name)


def _ground(rng: Random, side: int) -> Scene:
    """Return a scene without garments: soft patches of dark colors."""
    patches = Image.frombytes("RGB", (5, 5), rng.randbytes(75)).resize((side, side))
    image = np.asarray(patches) / 255 * MAX_GROUND_VALUE
    return Scene(image.astype(np.uint8), np.zeros((side, side), np.uint8))


def _paint(scene: Scene, garment: np.ndarray, number: int, cell: tuple[int, int], rng: Random) -> None:
    """Draw a garment (28, 28) of class ``number`` into a cell (row, column) of the scene. Modifies the scene."""
    side = rng.randint(*GARMENT_PX)
    places = (start * CELL_PX + rng.randint(0, CELL_PX - side) for start in cell)
    place = tuple(slice(start, start + side) for start in places)
    color = np.array([rng.randint(MIN_COLOR_VALUE, 255) for _ in range(3)]) / 255
    gray = np.asarray(Image.fromarray(garment).resize((side, side)))[..., None] / 255
    shade = MIN_GARMENT_VALUE + (255 - MIN_GARMENT_VALUE) * gray
    covered = np.asarray(_silhouette(garment).resize((side, side))) >= 128
    scene.image[place][covered] = (shade * color)[covered]
    scene.classes[place][covered] = number


def _silhouette(garment: np.ndarray) -> Image.Image:
    """Return a mask of the garment, 0 or 255: all pixels that no path of dark pixels connects to the border."""
    bright = Image.fromarray(np.where(garment > SILHOUETTE_THRESHOLD, 255, 0).astype(np.uint8))
    padded = ImageOps.expand(bright, 1)
    ImageDraw.floodfill(padded, (0, 0), 128)
    return ImageOps.crop(padded.point([0 if value == 128 else 255 for value in range(256)]), 1)
