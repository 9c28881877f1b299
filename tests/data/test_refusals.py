"""Data that cannot be used: each error names the file, the setting and the values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tests.data.sample_images import make_folder, random_image, small_experiment
from tests.data.sample_labels import IGNORE, experiment, label_map, make_labeled, random_classes
from tests.refusals import refused
from zoo import transforms
from zoo.config.experiment import Input
from zoo.data.classes import check_num_classes, check_same_classes, match_classes
from zoo.data.dataset import ImageFolder
from zoo.data.imagenet import imagenet_wnids
from zoo.data.loader import build_train_loader
from zoo.data.named import open_data
from zoo.data.reading import read_image
from zoo.data.sampler import TrainBatches, ValBatches
from zoo.data.segmentation.class_uniform import ClassUniform, load_class_index
from zoo.data.segmentation.label_maps import LAYOUTS, LabeledImages, Split, labeled_images, read_label, read_pair
from zoo.data.segmentation.loader import build_segmentation_train_loader
from zoo.data.segmentation.transforms import scale_to_longest_side
from zoo.data.sources.location import parse_data_path
from zoo.data.sources.scan import scan_folder
from zoo.data.transforms.classification import TrainTransform, ValTransform
from zoo.errors import ConfigError, DataError

HALF = [0.5] * 3
PLAIN = ValTransform(-1, 8, HALF, HALF)
CFG = {"mean": HALF, "std": HALF, "scale": 12, "crop": 8, "interpolation": "bilinear", "source": None}
Call = Callable[[Path], object]
#: Calls with an empty folder, which is also the cache -> names in the message, with DIR for the folder.
Refusals = dict[str, tuple[Call, tuple[str, ...]]]


def _images(folder: Path, *classes: str) -> ImageFolder:
    return ImageFolder(make_folder(folder, dict.fromkeys(classes, 1)), PLAIN)


def _match(num_outputs: int, names: Sequence[str] | None, *folders: str) -> Call:
    kind = ImageFolder.class_kind
    return lambda root: match_classes(SimpleNamespace(root=root, classes=folders, class_kind=kind), num_outputs, names)


def _different_classes(folder: Path) -> None:
    check_same_classes(
        _images(folder / "train", "cat", "dog", "emu", "fox"), _images(folder / "val", "Cat", "dog", "fox")
    )


def _linked(target: str) -> Call:
    def scan(folder: Path) -> None:
        make_folder(folder / "train", {"a": 2, "b": 1})
        for name in ("link", "other"):
            (folder / "train" / "a" / name).symlink_to(target, target_is_directory=True)
        scan_folder(folder / "train")

    return scan


def _scan(counts: dict[str, int], *, allow_empty: bool = False) -> Call:
    return lambda folder: scan_folder(make_folder(folder, counts), allow_empty)


def _undefined_white(dtype: type) -> Call:
    def read(folder: Path) -> None:
        Image.fromarray(np.full((4, 4), 70000, dtype)).save(folder / "a.tif")
        read_image(folder / "a.tif")

    return read


_ZZ = [f"zz{index:02}" for index in range(12)]
IMAGES: Refusals = {
    "no folder is a class": (_match(3, ["a", "b", "c"], *_ZZ), ("DIR", "12 of 12", "zz00", "zz09 and 2 more")),
    "no folder is a class of ImageNet": (_match(1000, imagenet_wnids(), *_ZZ), ("DIR", "12 of 12", "zz09 and 2 more")),
    "misspelled class": (_match(1000, None, "golden_retriever", "tabby"), ("1 of 2", "golden_retriever")),
    "two folders of one class": (_match(1000, imagenet_wnids(), "n02123045", "tabby"), ("n02123045, tabby",)),
    # As many folders as outputs: in sorted order, hundreds of classes would get their neighbor's output.
    "one of all misnamed": (_match(1000, None, "aaa", *imagenet_wnids()[1:]), ("1 of 1000", ": aaa")),
    "too few folders": (_match(3, None, "x", "y"), ("is 2", "3 outputs")),
    "too many folders": (_match(1, None, "x", "y"), ("is 2", "1 output,")),
    "too many folders to train": (lambda folder: check_num_classes(_images(folder, "x", "y"), 1), ("2 cl", "1 output")),
    "splits of different classes": (_different_classes, ("DIR", "train/: cat, emu", "val/: Cat")),
    "class without images": (
        lambda folder: build_train_loader(make_folder(folder / "train", {"a": 1, "b": 0}).parent, small_experiment()),
        ("1 of 2", "(b)"),
    ),
    "no folder of this name": (
        lambda folder: scan_folder(make_folder(folder / "training", {"a": 1}).parent / "train"),
        ("DIR", "no folder train/ (but training)", "train/ and val/"),
    ),
    "no folder": (lambda folder: scan_folder(folder / "nowhere" / "train"), ("nowhere:", "train/ and val/")),
    "no images": (_scan({"a": 0, "b": 0}), ("2 class folders",)),
    "no images to validate": (_scan({"a": 0, "b": 0}, allow_empty=True), ("2 class folders",)),
    "empty classes": (_scan({"a": 1, **dict.fromkeys(_ZZ, 0)}), ("12 of 13", "(zz00, zz01", "zz09 and 2 more")),
    **{f"link to {target}": (_linked(target), ("train/", "same folder as")) for target in ("..", "../..", "../b", ".")},
    "float without white": (_undefined_white(np.float32), ("a.tif", "16 bits")),
    "int without white": (_undefined_white(np.int32), ("a.tif", "16 bits")),
    "too small for the crop": (
        lambda folder: ImageFolder(make_folder(folder, {"a": 1}), ValTransform(-1, 11, HALF, HALF))[0, 0],
        ("DIR/a/000.png", "11 px", "12 x 10 px", "scale -1"),
    ),
    "too small for ten crops": (
        lambda _: ValTransform(-1, 11, HALF, HALF, True)(random_image(0, 40, 10)),
        ("11 px", "40 x 10 px", "scale -1"),
    ),
    "too small for the padded crop": (
        lambda _: TrainTransform(Input(crop_train=13, pad_train=1))(random_image(0, 20, 10)),
        ("20 x 10 px", "13 px", "1 px"),
    ),
    "too small to be reflected": (
        lambda _: TrainTransform(Input(crop_train=8, pad_train=10, pad_mode_train="reflect"))(random_image(0, 20, 10)),
        ("20 x 10 px", "10 px", "reflect"),
    ),
    "too few for a step": (
        lambda _: TrainBatches(7, 16, world_size=2, accumulate_steps=2),
        ("2 processes", "accumulate_steps 2", "7 images", "at least 8"),
    ),
    "too few for replicas": (lambda _: TrainBatches(7, 16, replicas=4), ("optimizer.replicas 4", "7 im", "at least 8")),
    "batch before the first": (lambda _: TrainBatches(97, 12).skip_to(-1), ("batch -1", "8 batches")),
    "batch after the last": (lambda _: TrainBatches(97, 12).skip_to(9), ("batch 9", "8 batches")),
}
# Data sets by name.
IMAGES |= {
    name: (lambda _, name=name: open_data(parse_data_path(f"torchvision:{name}")), (f"torchvision:{name}: ", *words))
    for name, words in {
        "Cifar10": ("CIFAR10",),
        "FakeData": (),
        "CIFAR10": ("DIR/torchvision",),
        "EMNIST": ("'balanced'", "'letters'", "zoo.train"),
        "PhotoTour": ("arguments: name", "zoo.train"),
        "UCF101": ("arguments: annotation_path, frames_per_clip", "zoo.train"),
        "Caltech101": ("zoo.train",),
        "Places365": ("categories_places365.txt",),
    }.items()
}


def _find(data: Path, split: Split = "train", layout: str = "folders", num_classes: int = 3) -> LabeledImages:
    return labeled_images(data, split, layout, num_classes, IGNORE)


def _labeled(change: Callable[[Path], object], num_classes: int = 3) -> Call:
    """Return a call that changes the folder of a data set and lists its files."""

    def find(folder: Path) -> None:
        make_labeled(folder)
        change(folder)
        _find(folder, num_classes=num_classes)

    return find


def _without_counterparts(folder: Path) -> None:
    (folder / "train" / "labels" / "002.png").unlink()
    (folder / "train" / "images" / "sub" / "003.png").unlink()


def _with_names(folder: Path) -> Path:
    (folder / "classes.txt").write_text("a\nb\nc\n")
    return folder


def _class_file(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "classes.txt").write_bytes(content)


def _read(write: Callable[[Path], object], layout: str = "folders") -> Call:
    """Return a call that reads a label map x.png of three classes."""

    def read(folder: Path) -> None:
        table = _find(make_labeled(folder / "data", 1, 1)).table
        write(folder / "x.png")
        read_label(folder / "x.png", table)

    return read


def _cut(path: Path) -> None:
    label_map(random_classes(0, 3, 60, 60)).save(path)
    path.write_bytes(path.read_bytes()[:-40])


def _pair(folder: Path) -> None:
    random_image(0).save(folder / "a.jpg")
    label_map(random_classes(0, 3, 10, 12)).save(folder / "a.png")
    read_pair(folder / "a.jpg", folder / "a.png", _find(make_labeled(folder / "data", 1, 1)).table)


def _index(change: Callable[[Path], object]) -> Call:
    """Return a call that changes a label map and builds the index of classes."""

    def index(folder: Path) -> None:
        found = _find(make_labeled(folder / "data"))
        change(found.root / found.labels[1])
        load_class_index(found)

    return index


def _unwritable_cache(folder: Path) -> None:
    found = _find(make_labeled(folder / "data"))
    (folder / "class-index").write_text("a file where a folder should be")
    load_class_index(found)


def _empty_folders(folder: Path) -> None:
    for name in ("images", "labels"):
        (folder / "train" / name).mkdir(parents=True)
    _find(folder)


LABELS: Refusals = {
    "num_classes beside names": (
        _labeled(_class_file(b"ground\ncat\ndog\n"), 4),
        ("network.num_classes = 4", "3 classes (ground, cat, dog)"),
    ),
    "num_classes of an experiment": (
        lambda folder: build_segmentation_train_loader(
            _with_names(make_labeled(folder / "data", 1, 1)), experiment(num_classes=4)
        ),
        ("network.num_classes = 4",),
    ),
    "names are not UTF-8": (_labeled(_class_file(b"\xff\n")), ("classes.txt", "UTF-8")),
    "files without counterpart": (
        _labeled(_without_counterparts),
        ("train/images", "train/labels", "002.png has no label map 002.png, sub/003.png has no image"),
    ),
    "no files": (_empty_folders, ("train/images", "layout folders", ".jpg")),
    **{
        f"no folder of {layout}": (
            lambda folder, layout=layout: _find(folder, layout=layout),
            ("DIR", f"segmentation.layout {layout}"),
        )
        for layout in LAYOUTS
    },
    **{
        f"label map in {mode}": (
            _read(lambda path, mode=mode: random_image(0).convert(mode).save(path)),
            ("DIR/x.png", "colors", f"mode {mode}"),
        )
        for mode in ("RGB", "RGBA", "LA")
    },
    "labels out of range": (
        _read(lambda path: label_map([[0, 3, 3, 254], [1, 2, 255, 3]]).save(path)),
        ("DIR/x.png", "3 (3 px), 254 (1 px)"),
    ),
    "labels of 16 bits": (_read(lambda path: label_map([[2999]], "I;16").save(path)), ("x.png", "2999 (1 px)")),
    "label map cut off": (_read(_cut), ("x.png", "a label map cannot be read: ")),
    "empty label map": (_read(lambda path: path.write_bytes(b"")), ("x.png", "a label map cannot be read: ")),
    "label map of another format": (_read(lambda path: path.write_bytes(b"P5 2 1 255\n\0\1")), ("x.png", "a label ")),
    "no label map": (_read(lambda path: None), ("DIR/x.png", "No such file")),
    "label map of another size": (_pair, ("a.jpg and DIR/a.png", "12 x 10 px", "10 x 12")),
    "index of an unreadable label map": (_index(lambda path: path.write_bytes(b"")), ("labels/", "a label map")),
    "index without a label map": (_index(Path.unlink), ("labels/", "index of classes", "No such file")),
    "index in an unwritable cache": (_unwritable_cache, ("DIR/class-index", "File exists")),
    "index of void label maps": (
        lambda folder: ClassUniform(_find(make_labeled(folder)), np.zeros((5, 3), dtype=bool)),
        ("class_uniform",),
    ),
    "scaled to no pixel": (
        lambda _: scale_to_longest_side(Image.new("RGB", (50, 1)), 20),
        ("segmentation.longest_side_val = 20", "50 x 1 px", "20 x 0 px"),
    ),
    "scaled to too many pixels": (
        lambda _: scale_to_longest_side(Image.new("RGB", (2, 2)), 9900),
        ("segmentation.longest_side_val = 9900", "9900 x 9900 px"),
    ),
}


@pytest.mark.parametrize(("call", "names"), [*IMAGES.values(), *LABELS.values()], ids=[*IMAGES, *LABELS])
def test_unusable_data_raises(
    call: Call, names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path))
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    message = refused(
        (DataError, ConfigError), lambda: call(tmp_path), *(name.replace("DIR", str(tmp_path)) for name in names)
    )
    assert "\n" not in message


@pytest.mark.parametrize("limit", [0, -3])
def test_limit_below_one_raises(limit: int) -> None:
    refused(ConfigError, lambda: ValBatches(10, 2, limit=limit), "--limit", str(limit))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("image", "names"),
    [
        (torch.rand(3, 20, 30) * 255, ("values from 0.", "between 0 and 1")),
        (torch.full((3, 20, 30), torch.nan), ("from nan to nan",)),
        (torch.zeros(3, 20, 30, dtype=torch.int64), ("torch.int64",)),
        (torch.zeros(20, 30), ("shape (20, 30)",)),
        (torch.zeros(0, 3, 20, 30), ("shape (0, 3, 20, 30)",)),
        (np.zeros((3, 20, 30), np.uint8), ("array of shape (3, 20, 30)",)),
        (np.zeros((20, 30, 3)), ("float64",)),
        (np.zeros((0, 30, 3), np.uint8), ("array of shape (0, 30, 3)",)),
        ("cat.jpg", ("a str;", "PIL.Image.open")),
        (Path("cat.jpg"), ("Path;", "PIL.Image.open")),
        (None, ("NoneType",)),
        (Image.new("F", (30, 20)), ("16 bits",)),
        (Image.new("RGB", (0, 20)), ("0 x 20 px",)),
    ],
)
def test_unsupported_image_raises(training: bool, image: object, names: tuple[str, ...]) -> None:
    refused(DataError, lambda: transforms(CFG, training=training)(image), *names)


@pytest.mark.parametrize(
    ("source", "options", "names"),
    [
        (CFG, {"crop": 20}, ("crop_val = 20", "scale_val", "12")),
        (CFG, {"crop": 0}, ("crop_val = 0",)),
        (CFG, {"scale": 2**40, "crop": 2**40}, ("1099511627776",)),
        (CFG, {"training": True, "crop": -1}, ("crop_train = -1",)),
        (CFG, {"training": True, "scale": 20}, ("scale=20",)),
        ({"mean": HALF, "input_size": (3, 224, 224)}, {}, ("std, scale, crop, interpolation",)),
        (CFG, {"training": True, "ten_crops": True}, ("ten crops",)),
        (CFG | {"interpolation": "lanczos"}, {}, ("interpolation", "lanczos")),
        (nn.Identity(), {}, ("Identity", "pretrained_cfg")),
        ("rensett18", {}, ("rensett18",)),
    ],
)
def test_unusable_preprocessing_raises(source: object, options: dict[str, Any], names: tuple[str, ...]) -> None:
    refused(ConfigError, lambda: transforms(source, **options), *names)
