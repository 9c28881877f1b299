"""A stand-in for the ImageNet validation set: its names, but two classes of three images."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

NUM_IMAGES = 6


def shrink_imagenet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let six images in two classes count as all of ImageNet."""
    for module in ("imagenet", "inplace_abn_scores"):
        monkeypatch.setattr(f"zoo.reproduce.{module}.NUM_VAL_IMAGES", NUM_IMAGES)
    monkeypatch.setattr("zoo.reproduce.imagenet.NUM_CLASSES", 2)


def make_imagenet(data: Path, side_px: int = 8) -> Path:
    """Write the six images below ``data``/val: dark images in the first class, bright images in the second."""
    for number in range(1, NUM_IMAGES + 1):
        target = number % 2
        folder = data / "val" / ("n01440764", "n01443537")[target]
        folder.mkdir(parents=True, exist_ok=True)
        image = Image.new("RGB", (side_px, side_px), ("black", "white")[target])
        image.save(folder / f"ILSVRC2012_val_{number:08}.JPEG")
    return data
