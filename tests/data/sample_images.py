"""Small images on disk for the tests of the data package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from zoo.config.experiment import Experiment
from zoo.config.parse import parse_experiment

CLASSES = {"ant": 7, "bee": 5, "cat": 9}  # the numbers of their images, 21 in all


def random_image(seed: int, width: int = 12, height: int = 10, mode: str = "RGB") -> Image.Image:
    """Return an image with random pixels for each seed."""
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def make_folder(root: Path, counts: dict[str, int], width: int = 12, height: int = 10) -> Path:
    """Write ``counts[name]`` different PNG images into root/name for each class, and return ``root``."""
    seed = 0
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for index in range(count):
            random_image(seed, width, height).save(root / name / f"{index:03}.png")
            seed += 1
    return root


def make_splits(data: Path) -> Path:
    """Write the same images of `CLASSES` into data/train and data/val, and return ``data``."""
    for split in ("train", "val"):
        make_folder(data / split, CLASSES)
    return data


def small_experiment(**settings: object) -> Experiment:
    """Return an experiment for `CLASSES`; ``settings`` go into its input section."""
    content = {"network": {"classes": 3}, "optimizer": {"batch_size": 4}, "input": {"crop_train": 8, **settings}}
    return parse_experiment(content, "x")
