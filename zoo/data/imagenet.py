"""The classes of ImageNet: their WordNet ids and names, in the order of a network's outputs."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

NUM_CLASSES = 1000
NUM_VAL_IMAGES = 50_000  # images in the validation set


@cache
def imagenet_wnids() -> tuple[str, ...]:
    """Return the WordNet ids of the 1000 classes (the names of class folders) in the order of the outputs."""
    return tuple(files("zoo").joinpath("data", "imagenet_wnids.txt").read_text(encoding="ascii").split())


def imagenet_names() -> list[str]:
    """Return torchvision's names of the 1000 classes in the order of the outputs. Downloads nothing."""
    from torchvision.models import ResNet50_Weights  # imported late: imports all networks of torchvision

    return list(ResNet50_Weights.IMAGENET1K_V1.meta["categories"])
