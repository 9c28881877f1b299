"""``zoo data check`` prints the contents of a folder and all its faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.data.sample_labels import label_map, make_labeled
from tests.engine.tiny import make_images

ABSENT = "warning: {} of {} classes have no pixel: {}"
OF_MASKS = "; 255 is void: write 1 in place of 255 in masks of 0 and 255"


def _fill(split: str, values: list[int], data: Path) -> None:
    """Write label maps with these values, row by row, for all images of a split."""
    rows = [[values[row % len(values)]] * 12 for row in range(10)]
    for path in (data / split / "labels").rglob("*.png"):
        label_map(rows).save(path)


def _break(data: Path) -> None:
    label_map([[9] * 12] * 10).save(data / "train" / "labels" / "000.png")
    (data / "val" / "labels" / "000.png").write_bytes(b"")


def _void(split: str, data: Path) -> None:
    label_map([[255] * 12] * 10).save(data / split / "labels" / "000.png")


#: What changes a data set of 3 + 2 label maps, the number of classes, the lines printed for train and val, and the
#: exit code.
CHECKS: dict[str, tuple[Callable[[Path], object], int, list[str], list[str], int]] = {
    "sound": (lambda data: None, 3, ["3 images, 0 faults"], ["2 images, 0 faults"], 0),
    "masks of 0 and 255": (
        partial(_fill, "train", [0, 255]), 2,
        ["3 images, 0 faults", ABSENT.format(1, 2, "road") + OF_MASKS], ["2 images, 0 faults"], 0,
    ),
    "absent in train": (
        partial(_fill, "train", [1, 255]), 3,
        ["3 images, 0 faults", ABSENT.format(2, 3, "sky, car")], ["2 images, 0 faults"], 0,
    ),
    "absent in val": (
        partial(_fill, "val", [1, 255]), 3,
        ["3 images, 0 faults"], ["2 images, 0 faults", ABSENT.format(2, 3, "sky, car")], 0,
    ),
    "void label map": (partial(_void, "train"), 3, ["3 images, 0 faults"], ["2 images, 0 faults"], 0),
    "void train": (
        partial(_fill, "train", [255]), 3,
        ["3 images, 1 fault", "fault: {}: no pixel has a class; 3 of 3 classes have no pixel: sky, road, car"],
        ["2 images, 0 faults"], 2,
    ),
    "void val": (
        partial(_fill, "val", [255]), 3, ["3 images, 0 faults"],
        ["2 images, 1 fault", "fault: {}: no pixel has a class; 3 of 3 classes have no pixel: sky, road, car"], 2,
    ),
    "broken": (
        _break, 3, ["3 images, 1 fault", "fault: {}/train/labels/000.png"],
        ["2 images, 1 fault", "fault: {}/val/labels/000.png"], 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "num_classes", "train", "val", "code"), CHECKS.values(), ids=CHECKS)
def test_images_and_faults_of_both_splits_are_printed(
    change: Callable[[Path], object], num_classes: int, train: list[str], val: list[str], code: int, cli: Cli,
    tmp_path: Path,
) -> None:  # fmt: skip
    network = {"arch": "deeplab_resnet18", "activation": "leaky_relu", "classes": num_classes}
    (tmp_path / "x.json").write_text(json.dumps({"network": network, "segmentation": {"layout": "folders"}}))
    data = make_labeled(tmp_path / "data", 3, 2)
    _fill("train", [0, 1, num_classes - 1], data)
    _fill("val", [0, 1, num_classes - 1], data)
    (data / "classes.txt").write_text("".join(f"{name}\n" for name in ["sky", "road", "car"][:num_classes]))
    change(data)
    printed = cli("data", "check", tmp_path / "x.json", data, "-j", 2, code=code)
    expected = [f"train: {train[0]}", *train[1:], f"val: {val[0]}", *val[1:]]
    expected = [line.format(data) for line in expected]
    lines = printed.out.splitlines()
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected
    faults = printed.out.count("fault: ")
    assert (f": {faults} fault{'s' * (faults > 1)}, listed above;" in printed.err) == (code == 2)


@pytest.mark.parametrize("name", ["resnet18", "torchvision:resnet18", "resnet18.json", "cifar10_resnet18_ipabn"])
def test_check_accepts_data_of_train(name: str, cli: Cli, tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", num_train=4, num_val=2)
    if name.endswith(".json"):
        (tmp_path / name).write_text('{"network": {"arch": "resnet18"}}')
        name = str(tmp_path / name)
    (data / "train" / "class0" / "bad.png").write_bytes(b"")
    printed = cli("data", "check", name, data, "-j", 0, code=2)
    assert "train: 5 images, 1 fault\n" in printed.out
    assert "bad.png" in printed.out
    assert ": 1 fault, listed above;" in printed.err


def test_shards_hold_the_images_of_both_splits(cli: Cli, tmp_path: Path) -> None:
    data, out = make_images(tmp_path / "data", num_train=4, num_val=2), tmp_path / "out"
    assert cli("data", "shard", data, out, "--per-shard", 3).out.splitlines() == [
        f"4 images in 2 shards; {out / 'train'}",
        f"2 images in 1 shard; {out / 'val'}",
    ]
    assert "neither train/ nor val/" in cli("data", "shard", data / "val", out, code=2).err
