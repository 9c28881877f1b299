"""A folder is taken for the ImageNet validation set only where its names and numbers are those."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.imagenet import make_imagenet, shrink_imagenet
from zoo.data.prepare.validation_set import describe_validation_set

FIRST = Path("val/n01443537/ILSVRC2012_val_00000001.JPEG")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shrink_imagenet(monkeypatch)
    return make_imagenet(tmp_path)


def test_the_right_names_and_numbers_are_imagenet(data: Path) -> None:
    found = describe_validation_set(data)
    assert found.is_imagenet
    assert (found.images, found.classes, found.per_class) == (6, 2, (3, 3))
    assert not found.is_part


def _remove(data: Path) -> None:
    (data / FIRST).unlink()


def _rename_class(data: Path) -> None:
    (data / "val" / "n01443537").rename(data / "val" / "tench")


def _move(data: Path) -> None:
    (data / FIRST).rename(data / "val" / "n01440764" / FIRST.name)


def _rename_image(data: Path) -> None:
    (data / FIRST).rename(data / FIRST.with_name("n01443537_1.JPEG"))


def _number_twice(data: Path) -> None:
    (data / FIRST).rename(data / FIRST.with_name("ILSVRC2012_val_00000003_copy.JPEG"))


@pytest.mark.parametrize(
    ("spoil", "difference"),
    [
        (_remove, "5 images in 2 classes, not 6 in 2"),
        (_rename_class, "not named like n01440764: tench"),
        (_move, "not every class has 3 images"),
        (_rename_image, "not named ILSVRC2012_val_00000001 to"),
        (_number_twice, "not named ILSVRC2012_val_00000001 to"),
    ],
)
def test_anything_else_is_not_and_the_difference_is_named(
    data: Path, spoil: Callable[[Path], None], difference: str
) -> None:
    spoil(data)
    found = describe_validation_set(data)
    assert not found.is_imagenet
    assert difference in str(found.difference)


def test_fewer_of_its_images_are_a_part_of_it_and_other_images_are_not(data: Path) -> None:
    _remove(data)
    found = describe_validation_set(data)
    assert (found.is_part, found.is_imagenet, found.per_class) == (True, False, (2, 3))
    (data / "val" / "n01440764" / "more.JPEG").touch()
    assert not describe_validation_set(data).is_part
    (data / "val" / "n01440764" / "more.JPEG").rename(data / "val" / "n01440764" / "ILSVRC2012_val_00000007.JPEG")
    assert not describe_validation_set(data).is_part, "there is no image of this number"


def test_the_digest_tells_data_sets_apart_but_not_their_places(data: Path, tmp_path: Path) -> None:
    digest = describe_validation_set(data).digest
    assert describe_validation_set(make_imagenet(tmp_path / "copy")).digest == digest
    with (data / FIRST).open("ab") as file:
        file.write(b"more")
    assert describe_validation_set(data).digest != digest
