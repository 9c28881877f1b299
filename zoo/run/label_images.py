"""Output files of a segmentation: class maps as palette or gray PNG, probabilities, overlays."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from zoo.config.experiment import Experiment
from zoo.data.classes import class_names
from zoo.errors import ConfigError
from zoo.files import write_bytes
from zoo.tasks.tta import Segments

PALETTE_SIZE = 256  # colors of a palette PNG
OVERLAY_OPACITY = 0.5

# The 65 classes of Mapillary Vistas' research edition in order, and the colors of its palette.
VISTAS_COLORS = {
    "Bird": "a52a2a", "Ground Animal": "00c000", "Curb": "c4c4c4", "Fence": "be9999", "Guard Rail": "b4a5b4",
    "Barrier": "5a7896", "Wall": "66669c", "Bike Lane": "8040ff", "Crosswalk - Plain": "8c8cc8", "Curb Cut": "aaaaaa",
    "Parking": "faaaa0", "Pedestrian Area": "606060", "Rail Track": "e6968c", "Road": "804080",
    "Service Lane": "6e6e6e", "Sidewalk": "f423e8", "Bridge": "966464", "Building": "464646", "Tunnel": "96785a",
    "Person": "dc143c", "Bicyclist": "ff0000", "Motorcyclist": "ff0064", "Other Rider": "ff00c8",
    "Lane Marking - Crosswalk": "c88080", "Lane Marking - General": "ffffff", "Mountain": "40aa40", "Sand": "e6a032",
    "Sky": "4682b4", "Snow": "beffff", "Terrain": "98fb98", "Vegetation": "6b8e23", "Water": "00aa1e",
    "Banner": "ffff80", "Bench": "fa001e", "Bike Rack": "648cb4", "Billboard": "dcdcdc", "Catch Basin": "dc8080",
    "CCTV Camera": "de2828", "Fire Hydrant": "64aa1e", "Junction Box": "282828", "Mailbox": "212121",
    "Manhole": "6480a0", "Phone Booth": "8e0000", "Pothole": "466496", "Street Light": "d2aa64", "Pole": "999999",
    "Traffic Sign Frame": "808080", "Utility Pole": "000050", "Traffic Light": "faaa1e",
    "Traffic Sign (Back)": "c0c0c0", "Traffic Sign (Front)": "dcdc00", "Trash Can": "8c8c14", "Bicycle": "770b20",
    "Boat": "9600ff", "Bus": "003c64", "Car": "00008e", "Caravan": "00005a", "Motorcycle": "0000e6",
    "On Rails": "005064", "Other Vehicle": "804040", "Trailer": "00006e", "Truck": "000046", "Wheeled Slow": "0000c0",
    "Car Mount": "202020", "Ego Vehicle": "780a0a",
}  # fmt: skip


def colors_of(config: Experiment) -> np.ndarray:
    """Return the color of each class, (C, 3) uint8: the published colors of Vistas, otherwise those of PASCAL VOC.

    In PASCAL VOC's colors, each three bits of a class, from the lowest, become one bit of red, green and blue, from the
    highest. The first 256 colors are distinct.
    """
    if _is_vistas(config):
        return np.array([list(bytes.fromhex(color)) for color in VISTAS_COLORS.values()], dtype=np.uint8)
    numbers = np.arange(config.network.num_classes) % PALETTE_SIZE
    colors = np.zeros((len(numbers), 3), dtype=np.uint8)
    for bit in range(8):
        for channel in range(3):
            colors[:, channel] |= (((numbers >> (3 * bit + channel)) & 1) << (7 - bit)).astype(np.uint8)
    return colors


def names_of(config: Experiment, known: Sequence[str] | None) -> list[str]:
    """Return printable names of the classes: ``known``, the names of Vistas, or numbers."""
    if known is None and _is_vistas(config):
        return list(VISTAS_COLORS)
    return class_names(config.network.num_classes, known)


def _is_vistas(config: Experiment) -> bool:
    layout = None if config.segmentation is None else config.segmentation.layout
    return layout == "vistas" and config.network.num_classes == len(VISTAS_COLORS)


def write_palette(path: Path, _: Image.Image, segments: Segments, colors: np.ndarray) -> None:
    """Write the classes as an indexed PNG with these ``colors``. Raises ConfigError for more than 256 classes."""
    if len(colors) > PALETTE_SIZE:
        what = f"the network has {len(colors):,} classes, but a palette PNG holds at most {PALETTE_SIZE}"
        raise ConfigError(what, "--output", "give ids, prob or overlay")
    image = Image.fromarray(segments.classes.numpy().astype(np.uint8))
    image.putpalette(colors.tobytes())  # red, green and blue of the first color, then of the second
    _write_png(path, image)


def write_ids(path: Path, _: Image.Image, segments: Segments, colors: np.ndarray) -> None:
    """Write the classes as a gray PNG, with 8 bits for up to 256 classes, otherwise with 16 bits."""
    _write_png(path, Image.fromarray(_ids(segments, colors)))


def write_probabilities(path: Path, _: Image.Image, segments: Segments, colors: np.ndarray) -> None:
    """Write a compressed npz file of two arrays (H, W): ``classes``, and their ``probability`` as float16.

    float16 has three decimals near 1, more than the accuracy of probabilities. Probabilities of the other classes are
    omitted: for the 65 classes of Vistas they would take 270 MB per image of two megapixels.
    """
    content = io.BytesIO()
    probability = segments.probabilities.numpy().astype(np.float16)
    np.savez_compressed(content, classes=_ids(segments, colors), probability=probability)
    write_bytes(path, content.getvalue())


def write_gray_probabilities(path: Path, _: Image.Image, segments: Segments, colors: np.ndarray) -> None:
    """Write the probability of the class of each pixel times 255, rounded down, as a gray PNG with 8 bits."""
    _write_png(path, Image.fromarray((segments.probabilities.numpy() * 255).astype(np.uint8)))


def write_overlay(path: Path, image: Image.Image, segments: Segments, colors: np.ndarray) -> None:
    """Write the mean of the image and the colors of its classes as PNG."""
    painted = Image.fromarray(colors[segments.classes.numpy()])
    _write_png(path, Image.blend(image.convert("RGB"), painted, OVERLAY_OPACITY))


def _ids(segments: Segments, colors: np.ndarray) -> np.ndarray:
    return segments.classes.numpy().astype(np.uint8 if len(colors) <= PALETTE_SIZE else np.uint16)


def _write_png(path: Path, image: Image.Image) -> None:
    content = io.BytesIO()
    image.save(content, format="PNG")
    write_bytes(path, content.getvalue())


class FileKind(NamedTuple):
    """A kind of files, one per image: OUT/FOLDER/NAME and ``ending``; ``write`` writes a file atomically."""

    folder: str
    ending: str
    write: Callable[[Path, Image.Image, Segments, np.ndarray], None]


KINDS = {
    "palette": FileKind("palette", ".png", write_palette),
    "ids": FileKind("ids", ".png", write_ids),
    "prob": FileKind("prob", ".npz", write_probabilities),
    "overlay": FileKind("overlay", ".png", write_overlay),
}
# The files of the original project's test script by its output mode, all in the folder OUT itself.
ORIGINAL_KINDS = {
    "palette": (FileKind("", ".png", write_palette),),
    "raw": (FileKind("", ".png", write_ids),),
    "prob": (FileKind("", ".png", write_ids), FileKind("", "_prob.png", write_gray_probabilities)),
}
