"""Small images with label maps on disk, for the tests of segmentation's data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from tests.data.sample_images import random_image
from zoo.config.experiment import Experiment
from zoo.config.parse import parse_experiment

IGNORE = 255


def label_map(classes: np.ndarray | Sequence[Sequence[int]], mode: str = "L") -> Image.Image:
    """Return classes (H, W) as a palette image ("P"), or a gray one of 8 ("L") or 16 bits ("I;16")."""
    pixels = np.asarray(classes, dtype=np.uint16 if mode == "I;16" else np.uint8)
    image = Image.fromarray(pixels)
    if mode == "P":
        image.putpalette(bytes(range(255, -1, -1)) * 3)
    return image


def random_classes(seed: int, num_classes: int, width: int = 12, height: int = 10, void: bool = True) -> np.ndarray:
    """Return random classes (height, width), uint8, for each seed; some pixels are void unless ``void`` is False."""
    generator = np.random.default_rng(seed)
    classes = generator.integers(0, num_classes, (height, width), dtype=np.uint8)
    return np.where(generator.random((height, width)) < 0.1, np.uint8(IGNORE), classes) if void else classes


def make_pair(image: Path, label: Path, seed: int, num_classes: int, width: int = 12, height: int = 10) -> None:
    """Write an image and its label map; create the folders."""
    for path in (image, label):
        path.parent.mkdir(parents=True, exist_ok=True)
    random_image(seed, width, height).save(image)
    label_map(random_classes(seed, num_classes, width, height), "P").save(label)


def make_labeled(data: Path, num_train: int = 5, num_val: int = 3, num_classes: int = 3) -> Path:
    """Write a data set of layout "folders" with images of 12 x 10 px and return ``data``."""
    for split, count in (("train", num_train), ("val", num_val)):
        for index in range(count):
            name, seed = f"sub/{index:03}.png" if index % 2 else f"{index:03}.png", index + 100 * (split == "val")
            make_pair(data / split / "images" / name, data / split / "labels" / name, seed, num_classes)
    return data


def experiment(num_classes: int = 3, crop: int = 8, batch: int = 2, seed: int = 0, **settings: object) -> Experiment:
    """Return an experiment of a segmentation network; ``settings`` go into its section."""
    return parse_experiment(
        {
            "network": {"arch": "deeplab_resnet18", "activation": "leaky_relu", "classes": num_classes},
            "optimizer": {"batch_size": batch},
            "input": {"crop_train": crop, "color_jitter_train": True, "lighting_train": True},
            "segmentation": settings,
            "seed": seed,
        },
        "test",
    )
