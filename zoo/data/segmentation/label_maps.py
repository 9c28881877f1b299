"""Images with label maps: the layouts of known data sets, and reading a label map as classes.

A label map is a PNG file of the image's size whose values are ids: the indices of a palette image, or the values of a
gray image of 1 to 16 bits. No color conversion is applied. The layout maps ids to classes:

- `folders`: DATA/{train,val}/{images,labels}, an image and its label map with the same name and sub-folder. The ids are
  the classes. DATA/classes.txt names them, one per line; without it, their names are their numbers.
- `cityscapes`: DATA/leftImg8bit/{train,val}/CITY/NAME_leftImg8bit.png with
  DATA/gtFine/{train,val}/CITY/NAME_gtFine_labelIds.png. The ids are the ids of the data set's own labels
  (https://github.com/mcordts/cityscapesScripts), 0 to 33: 19 are classes of the benchmark, the others are void.
- `coco_stuff`: DATA/images/{train,val}2017/NAME.jpg with DATA/annotations/{train,val}2017/NAME.png, the
  "stuffthingmaps" of https://github.com/nightrome/cocostuff. They store the number of a stuff class, 92 to 182, minus
  one, so the values 91 to 181 are classes 0 to 90. Things (0 to 90) and unlabeled pixels (255) are void. The
  "stuff_pixelmaps" of COCO's own page store the number itself and 183 for things; a file with 182 or 183 is refused.
- `vistas`: DATA/{training,validation}/images/NAME.jpg with labels/NAME.png beside images/ (version 1.0 and 1.1, with
  DATA/config.json), or in v1.2/ (DATA/config_v1.2.json). The classes are the entries of "labels" in that file with
  "evaluate"; the others are void.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image, ImageFile

from zoo.data.reading import EXTENSIONS, read_as, read_image, read_names, read_text
from zoo.data.sources.scan import find_names, log_skipped
from zoo.errors import ConfigError, DataError, escape, join_names

Split = Literal["train", "val"]

NUM_IDS = 2**16
ALLOWED = "correct the file, network.num_classes or segmentation.ignore_label"
NO_CLASS = -1  # table entry of an invalid id

# Ids and names of the classes of the Cityscapes benchmark, in class order.
CITYSCAPES = {
    7: "road", 8: "sidewalk", 11: "building", 12: "wall", 13: "fence", 17: "pole", 19: "traffic light",
    20: "traffic sign", 21: "vegetation", 22: "terrain", 23: "sky", 24: "person", 25: "rider", 26: "car", 27: "truck",
    28: "bus", 31: "train", 32: "motorcycle", 33: "bicycle",
}  # fmt: skip
NUM_CITYSCAPES_IDS = 34

# Names of the stuff classes 92 to 182 of COCO-Stuff.
COCO_STUFF = (
    "banner", "blanket", "branch", "bridge", "building-other", "bush", "cabinet", "cage", "cardboard", "carpet",
    "ceiling-other", "ceiling-tile", "cloth", "clothes", "clouds", "counter", "cupboard", "curtain", "desk-stuff",
    "dirt", "door-stuff", "fence", "floor-marble", "floor-other", "floor-stone", "floor-tile", "floor-wood", "flower",
    "fog", "food-other", "fruit", "furniture-other", "grass", "gravel", "ground-other", "hill", "house", "leaves",
    "light", "mat", "metal", "mirror-stuff", "moss", "mountain", "mud", "napkin", "net", "paper", "pavement", "pillow",
    "plant-other", "plastic", "platform", "playingfield", "railing", "railroad", "river", "road", "rock", "roof", "rug",
    "salad", "sand", "sea", "shelf", "sky-other", "skyscraper", "snow", "solid-other", "stairs", "stone", "straw",
    "structural-other", "table", "tent", "textile-other", "towel", "tree", "vegetable", "wall-brick", "wall-concrete",
    "wall-other", "wall-panel", "wall-stone", "wall-tile", "wall-wood", "water-other", "waterdrops", "window-blind",
    "window-other", "wood",
)  # fmt: skip
FIRST_STUFF = 91  # value of the first stuff class in a stuffthingmap, one less than its number
COCO_UNLABELED = 255


@dataclass(frozen=True)
class LabeledImages:
    """The images of one split and their label maps.

    Args:
    - `root`: the data folder.
    - `classes`: names of the classes, in the order of their numbers.
    - `images`: files of the images, relative to ``root``, sorted by name.
    - `labels`: the label map of each image, relative to ``root``.
    - `table`: maps the ids 0 to 65535 to classes, int32; `NO_CLASS` for an invalid id.
    """

    root: Path
    classes: list[str]
    images: list[str]
    labels: list[str]
    table: np.ndarray


class _Layout(NamedTuple):
    """Folders and file names of a data set.

    Args:
    - `splits`: names of the training and the validation set.
    - `images`: folder of the images; {split} stands for the name of the split.
    - `labels`: candidate folders of the label maps; the first that exists is used.
    - `image_endings`: endings of image files after the stem; an image and its label map share the stem.
    - `label_ending`: ending of label maps, after the same stem.
    - `classes`: (DATA, folder of the label maps, number of classes, ignore label) -> names and table of the classes.
    """

    splits: Mapping[Split, str]
    images: str
    labels: Sequence[str]
    image_endings: Sequence[str]
    label_ending: str
    classes: Callable[[Path, str, int, int], tuple[list[str], np.ndarray]]


def labeled_images(data: Path, split: Split, layout: str, num_classes: int, ignore_label: int) -> LabeledImages:
    """Return the pairs of images and label maps of ``split``.

    Reads only file names and class names. Raises DataError if a folder is missing or has no image, or if files have no
    counterpart. Raises ConfigError unless the data set has ``num_classes`` classes.

    Args:
    - `layout`: a key of `LAYOUTS`.
    - `ignore_label`: the target of void pixels.
    """
    rules, where = LAYOUTS[layout], f"{data}, layout {layout}"
    name = rules.splits[split]
    image_folder = rules.images.format(split=name)
    candidates = [folder.format(split=name) for folder in rules.labels]
    label_folder = next((folder for folder in candidates if (data / folder).is_dir()), candidates[-1])
    for folder in (image_folder, label_folder):
        if not (data / folder).is_dir():
            raise DataError("there is no such folder", data / folder, f"segmentation.layout {layout} needs it")
    classes, table = rules.classes(data, label_folder, num_classes, ignore_label)
    if len(classes) != num_classes:
        what = f"network.num_classes = {num_classes}: the data have {len(classes)} classes ({join_names(classes, 3)})"
        raise ConfigError(what, where, f"set network.num_classes to {len(classes)}")
    images, skipped = _by_key(data / image_folder, rules.image_endings)
    labels, _ = _by_key(data / label_folder, (rules.label_ending,))
    if not images:
        remedy = f"images of layout {layout} end in {' '.join(rules.image_endings)}"
        raise DataError("there is no image in the folder", data / image_folder, remedy)
    log_skipped(data / image_folder, skipped)
    faults = [
        *(
            f"{escape(images[key])} has no label map {escape(key)}{rules.label_ending}"
            for key in images.keys() - labels
        ),
        *(f"{escape(labels[key])} has no image" for key in labels.keys() - images),
    ]
    if faults:
        folders = f"{data / image_folder} and {data / label_folder}"
        raise DataError(join_names(sorted(faults)), folders, "add the missing files or remove these")
    return LabeledImages(
        root=data,
        classes=classes,
        images=[os.path.join(image_folder, name) for name in images.values()],
        labels=[os.path.join(label_folder, labels[key]) for key in images],
        table=table,
    )


def read_pair(image: str | Path, label: str | Path, table: np.ndarray) -> tuple[Image.Image, np.ndarray]:
    """Return an image as 8-bit RGB and the classes of its pixels, (H, W) int32; see `read_label`.

    Ignores the EXIF orientation of both. Raises DataError if a file cannot be read, or if their sizes differ.
    """
    pixels, classes = read_image(image), read_label(label, table)
    height, width = classes.shape
    if pixels.size != (width, height):
        what = f"an image has {pixels.width} x {pixels.height} px but its label map {width} x {height}"
        raise DataError(what, f"{image} and {label}")
    return pixels, classes


def read_label(path: str | Path, table: np.ndarray) -> np.ndarray:
    """Return the classes (H, W), int32, of the label map in ``path``, looked up in ``table``.

    Raises DataError if the file cannot be read, is not a PNG file of ids, or has an invalid id.
    """
    ids = read_as(path, _ids, "a label map")
    classes: np.ndarray = table[ids]
    if classes.min() == NO_CLASS:
        wrong, counts = np.unique(ids[classes == NO_CLASS], return_counts=True)
        values = join_names(f"{value} ({count:,} px)" for value, count in zip(wrong, counts, strict=True))
        raise DataError(f"a label map has values that are no class: {values}", path, ALLOWED)
    return classes


def _ids(image: ImageFile.ImageFile) -> np.ndarray:
    """Return the ids of an opened label map. Raises ValueError, before decoding, unless it is a PNG file of ids."""
    if image.format != "PNG":
        raise ValueError(f"it is a {image.format} file, and label maps are PNG files")
    if image.mode in ("RGB", "RGBA", "LA"):
        raise ValueError(
            f"it has colors (mode {image.mode}) where ids are needed: write the ids as a palette image or as gray "
            "values of 8 or 16 bits"
        )
    # PIL scales gray values of two and four bits to 0..255, but not palette indices.
    spread = {"L;2": 85, "L;4": 17}.get(str(image.tile[0][3]), 1)
    ids = np.asarray(image)
    if ids.dtype.kind not in "bui" or ids.ndim != 2 or ids.min() < 0 or ids.max() >= NUM_IDS:
        raise ValueError(f"it holds no ids between 0 and {NUM_IDS - 1} (mode {image.mode})")
    # A boolean array would index as a mask.
    return ids.astype(np.uint8) if ids.dtype.kind == "b" else ids // spread if spread > 1 else ids


def _by_key(root: Path, endings: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the files below ``root`` with one of the ``endings``, by their stems, sorted, and the other files.

    If files differ only in their ending, returns the last of them.
    """
    names, skipped = find_names(root, endings)
    found: dict[str, str] = {}
    for name in names:
        ending = next(ending for ending in endings if name.lower().endswith(ending.lower()))
        key = name[: -len(ending)]
        if key in found:
            skipped.append(found[key])
        found[key] = name
    return found, skipped


def _folder_classes(data: Path, labels: str, num_classes: int, ignore_label: int) -> tuple[list[str], np.ndarray]:
    """Return the names in DATA/classes.txt, otherwise numbers, and a table of the classes and the ignore label."""
    file = data / "classes.txt"
    names = [str(number) for number in range(num_classes)]
    if file.exists():
        names = read_names(file)
    return names, _table({**{number: number for number in range(len(names))}, ignore_label: ignore_label})


def _cityscapes_classes(data: Path, labels: str, num_classes: int, ignore_label: int) -> tuple[list[str], np.ndarray]:
    numbers = dict.fromkeys(range(NUM_CITYSCAPES_IDS), ignore_label)
    return list(CITYSCAPES.values()), _table({**numbers, **{number: i for i, number in enumerate(CITYSCAPES)}})


def _coco_stuff_classes(data: Path, labels: str, num_classes: int, ignore_label: int) -> tuple[list[str], np.ndarray]:
    void = dict.fromkeys((*range(FIRST_STUFF), COCO_UNLABELED), ignore_label)
    return list(COCO_STUFF), _table({**void, **{FIRST_STUFF + i: i for i in range(len(COCO_STUFF))}})


def _vistas_classes(data: Path, labels: str, num_classes: int, ignore_label: int) -> tuple[list[str], np.ndarray]:
    file = data / ("config_v1.2.json" if "v1.2" in Path(labels).parts else "config.json")
    text = read_text(file, "the class names")
    try:
        entries = [(str(entry["readable"]), bool(entry["evaluate"])) for entry in json.loads(text)["labels"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        what = 'the file has no list "labels" of entries with "readable" and "evaluate"'
        remedy = "take it from the data set's archive"
        raise DataError(f"{what} ({type(error).__name__}: {error})", file, remedy) from error
    names: list[str] = []
    numbers: dict[int, int] = {}
    for number, (name, is_class) in enumerate(entries):
        numbers[number] = len(names) if is_class else ignore_label
        names += [name] * is_class
    return names, _table(numbers)


def _table(classes: Mapping[int, int]) -> np.ndarray:
    """Return the table from ids to ``classes``, with `NO_CLASS` elsewhere."""
    table = np.full(NUM_IDS, NO_CLASS, dtype=np.int32)
    table[list(classes)] = list(classes.values())
    return table


SAME_NAMES: Mapping[Split, str] = {"train": "train", "val": "val"}
LAYOUTS: Mapping[str, _Layout] = {
    "folders": _Layout(SAME_NAMES, "{split}/images", ("{split}/labels",), EXTENSIONS, ".png", _folder_classes),
    "cityscapes": _Layout(
        SAME_NAMES, "leftImg8bit/{split}", ("gtFine/{split}",), ("_leftImg8bit.png",), "_gtFine_labelIds.png",
        _cityscapes_classes,
    ),
    "coco_stuff": _Layout(
        {"train": "train2017", "val": "val2017"}, "images/{split}", ("annotations/{split}",), (".jpg",), ".png",
        _coco_stuff_classes,
    ),
    "vistas": _Layout(
        {"train": "training", "val": "validation"}, "{split}/images", ("{split}/v1.2/labels", "{split}/labels"),
        (".jpg",), ".png", _vistas_classes,
    ),
}  # fmt: skip
