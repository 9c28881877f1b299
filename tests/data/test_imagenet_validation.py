"""The validation images of ImageNet are sorted by the owners' own table, byte for byte as they are."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.data.distributed import write_tar
from zoo.data.imagenet import ilsvrc2012_wnids, imagenet_wnids
from zoo.data.prepare.imagenet_validation import GROUND_TRUTH, ImageNetRelease, unpack_imagenet_val
from zoo.errors import DataError

WNID_OF = dict(enumerate(ilsvrc2012_wnids(), start=1))
TRUTHS = [number * 3 % 1000 + 1 for number in range(1000)]


def name_of(number: int) -> str:
    return f"ILSVRC2012_val_{number:08d}.JPEG"


IMAGES = {name_of(number): f"image {number}".encode() for number in range(1, 1001)}


def no_progress(split: str, total: int) -> Any:
    return nullcontext(SimpleNamespace(advance=lambda count: None))


def write_release(
    folder: Path, images: Mapping[str, bytes] = IMAGES, truths: list[int] = TRUTHS, **options: Any
) -> ImageNetRelease:
    """Write both archives with one image of each class, and return the release that they are."""
    folder.mkdir(exist_ok=True)
    devkit = {GROUND_TRUTH: "".join(f"{number}\n" for number in truths).encode()}
    devkit_md5 = write_tar(folder / "ILSVRC2012_devkit_t12.tar.gz", devkit)
    images_md5 = write_tar(folder / "ILSVRC2012_img_val.tar", images, "w", **options)
    return ImageNetRelease(images_md5=images_md5, devkit_md5=devkit_md5, per_class=1)


def test_every_file_lies_unchanged_in_the_folder_of_its_wnid(tmp_path: Path) -> None:
    release = write_release(tmp_path / "in")
    md5s = unpack_imagenet_val(release, tmp_path / "in", tmp_path / "out", no_progress)
    assert md5s == {release.images: release.images_md5, release.devkit: release.devkit_md5}
    for number, truth in enumerate(TRUTHS, 1):
        file = tmp_path / "out" / "val" / WNID_OF[truth] / name_of(number)
        assert file.read_bytes() == IMAGES[name_of(number)]
    assert len(list((tmp_path / "out").rglob("*.JPEG"))) == 1000


def test_the_archive_with_the_devkit_beside_it_is_enough_and_train_is_left_alone(tmp_path: Path) -> None:
    release = write_release(tmp_path / "in")
    (tmp_path / "out" / "train").mkdir(parents=True)
    unpack_imagenet_val(release, tmp_path / "in" / release.images, tmp_path / "out", no_progress)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["train", "val"]


def test_wrong_digests_are_refused_with_both_values(tmp_path: Path) -> None:
    release = write_release(tmp_path / "in")
    for wrong in (replace(release, images_md5="0" * 32), replace(release, devkit_md5="0" * 32)):
        with pytest.raises(DataError, match=f"its md5 is [0-9a-f]{{32}}, not {'0' * 32}"):
            unpack_imagenet_val(wrong, tmp_path / "in", tmp_path / "out", no_progress)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("missing", ["ILSVRC2012_devkit_t12.tar.gz", "ILSVRC2012_img_val.tar"])
def test_a_missing_archive_is_named(tmp_path: Path, missing: str) -> None:
    release = write_release(tmp_path / "in")
    (tmp_path / "in" / missing).unlink()
    with pytest.raises(DataError, match=f"there is no {missing}"):
        unpack_imagenet_val(release, tmp_path / "in", tmp_path / "out", no_progress)


@pytest.mark.parametrize(
    "name", ["../../../evil.JPEG", "/tmp/evil.JPEG", "val/" + name_of(1), name_of(0), name_of(1001)]
)
def test_a_name_in_the_archive_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    release = write_release(tmp_path / "in", {name: b"evil", **IMAGES})
    with pytest.raises(DataError, match="is not one of the validation images"):
        unpack_imagenet_val(release, tmp_path / "in", tmp_path / "out", no_progress)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file() and "ILSVRC2012" not in path.name] == []
    assert list((tmp_path / "out").iterdir()) == []


def test_an_image_that_is_missing_or_only_a_link_is_noticed(tmp_path: Path) -> None:
    some = {name_of(1): b"image 1", name_of(2): b"image 2"}
    release = write_release(tmp_path / "in", some, links={name_of(3): "/etc/passwd"})
    with pytest.raises(DataError, match="the archive has 2 of 1,000 images"):
        unpack_imagenet_val(release, tmp_path / "in", tmp_path / "out", no_progress)


@pytest.mark.parametrize(
    "truths",
    [TRUTHS[:-1], [1, *TRUTHS[1:-1], 1], [1001, *TRUTHS[1:]], [2000, *TRUTHS[1:]]],
    ids=["too few", "twice", "a group", "unknown"],
)
def test_a_table_of_other_classes_is_refused(tmp_path: Path, truths: list[int]) -> None:
    release = write_release(tmp_path / "in", truths=truths)
    with pytest.raises(DataError, match=r"does not list 1 images of each class; .*: download it again"):
        unpack_imagenet_val(release, tmp_path / "in", tmp_path / "out", no_progress)


def test_the_organizers_numbers_are_those_of_the_first_validation_images() -> None:
    """The ground truth of images 1 to 10 in the development kit, and their synsets as published with the images."""
    numbers = [490, 361, 171, 822, 297, 482, 13, 704, 599, 164]
    wnids = ["n01751748", "n09193705", "n02105855", "n04263257", "n03125729"]
    wnids += ["n01735189", "n02346627", "n02776631", "n03794056", "n02328150"]
    assert [ilsvrc2012_wnids()[number - 1] for number in numbers] == wnids
    assert sorted(ilsvrc2012_wnids()) == list(imagenet_wnids())
