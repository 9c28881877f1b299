"""The validation images of ImageNet (ILSVRC 2012), as their owners distribute them, sorted into class folders."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zoo.data.archives import check_free, check_md5, complete_folder, read_all, read_members
from zoo.data.check import ShowProgress
from zoo.data.classes import imagenet_wnids
from zoo.data.matlab import read_structs
from zoo.errors import DataError, printable

IMAGE_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG")
META = "ILSVRC2012_devkit_t12/data/meta.mat"
TRUTH = "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"


@dataclass(frozen=True)
class ImageNetRelease:
    """The two archives, with the md5 digests that torchvision publishes, and the number of images of each class.

    Args:
    - `images`, `images_md5`: the archive of the images.
    - `devkit`, `devkit_md5`: the archive that tells their classes.
    - `per_class`: number of images of each class.
    """

    images: str = "ILSVRC2012_img_val.tar"
    images_md5: str = "29b22e2961454d5413ddabcf34fc5622"
    devkit: str = "ILSVRC2012_devkit_t12.tar.gz"
    devkit_md5: str = "fa75699e90414af021442c21a62c3abf"
    per_class: int = 50


def unpack_imagenet_val(
    release: ImageNetRelease, source: Path, out: Path, show_progress: ShowProgress
) -> dict[str, str]:
    """Write ``out``/val/WNID/ILSVRC2012_val_*.JPEG, the files as they are; return the md5 of the archives.

    ``source`` is the archive of the images, with the devkit beside it, or the folder that holds both. ``out``/val is
    complete or not there at all. Raises DataError for archives that are missing or not those that the owners
    distribute, and if there is something at ``out``/val already.
    """
    target = out / "val"
    check_free(target)
    images = source / release.images if source.is_dir() else source
    devkit = images.with_name(release.devkit)
    if missing := next((file for file in (images, devkit) if not file.exists()), None):
        raise DataError(
            f"there is no {printable(missing.name)}; {printable(missing.parent)}: SOURCE is a folder that holds "
            f"{release.images} and {release.devkit}, or the former with the latter beside it"
        )
    check_md5(devkit, release.devkit_md5)
    wnids = _wnids_of_images(devkit, release)
    check_md5(images, release.images_md5)
    with complete_folder(target) as folder, show_progress("val", len(wnids)) as bar:
        written = set()
        for name, content in read_members(images, lambda _: True):
            number = _number_of(name, len(wnids), images)
            file = folder / wnids[number - 1] / name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content)
            written.add(number)
            bar.advance(1)
        if len(written) != len(wnids):
            raise DataError(
                f"there are {len(written):,} of {len(wnids):,} images; {printable(images)}: download it again"
            )
    return {release.images: release.images_md5, release.devkit: release.devkit_md5}


def _wnids_of_images(devkit: Path, release: ImageNetRelease) -> list[str]:
    """Return the wnid of each validation image, in the order of their numbers."""
    files = read_all(devkit, [META, TRUTH])
    try:
        structs = read_structs(files[META], "synsets")
        wnid_of = {row["ILSVRC2012_ID"]: row["WNID"] for row in structs}  # those of groups of classes are above 1000
    except (DataError, KeyError, TypeError) as error:
        raise DataError(
            f"{META} does not say which classes there are: {error}; {printable(devkit)}: download it again"
        ) from error
    numbers: Sequence[str] = files[TRUTH].decode("ascii", errors="replace").split()
    try:
        wnids = [wnid_of[int(number)] for number in numbers]
    except (ValueError, KeyError) as error:
        raise DataError(
            f"{TRUTH} names a class that there is not: {error}; {printable(devkit)}: download it again"
        ) from error
    if Counter(wnids) != dict.fromkeys(imagenet_wnids(), release.per_class):
        raise DataError(
            f"the {len(wnids):,} images are not {release.per_class} of each class of ImageNet; {printable(devkit)}: "
            "download it again"
        )
    return wnids


def _number_of(name: str, num_images: int, archive: Path) -> int:
    """Return the number in the name of an image; DataError for any other name."""
    match = IMAGE_NAME.fullmatch(name)
    if match is None or not 1 <= int(match[1]) <= num_images:
        raise DataError(
            f"{printable(name)} is not the name of one of the images; {printable(archive)}: download it again"
        )
    return int(match[1])
