"""Converting ImageNet's validation set from the two published archives to class folders."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from zoo.data.imagenet import ilsvrc2012_wnids
from zoo.data.prepare.archives import DOWNLOAD_AGAIN, check_md5, read_all, read_members
from zoo.data.prepare.output import ShowProgress, check_free, complete_folder
from zoo.errors import DataError

IMAGE_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG")
GROUND_TRUTH = "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"


@dataclass(frozen=True)
class ImageNetRelease:
    """The two archives, with their md5 digests from torchvision.

    Args:
    - `images`, `images_md5`: the archive of the images.
    - `devkit`, `devkit_md5`: the development kit, which has their classes.
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
    """Write ``out``/val/WNID/ILSVRC2012_val_*.JPEG, unchanged; return the md5 of the archives.

    ``source`` is the archive of the images, with the devkit beside it, or the folder that contains both. ``out``/val is
    renamed into place when it is complete. Raises DataError if an archive is missing or differs from the published one,
    and if ``out``/val exists.
    """
    target = out / "val"
    check_free(target)
    images = source / release.images if source.is_dir() else source
    devkit = images.with_name(release.devkit)
    if missing := next((file for file in (images, devkit) if not file.exists()), None):
        remedy = f"SOURCE is a folder with {release.images} and {release.devkit}, or the former beside the latter"
        raise DataError(f"there is no {missing.name}", missing.parent, remedy)
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
            what = f"the archive has {len(written):,} of {len(wnids):,} images"
            raise DataError(what, images, DOWNLOAD_AGAIN)
    return {release.images: release.images_md5, release.devkit: release.devkit_md5}


def _wnids_of_images(devkit: Path, release: ImageNetRelease) -> list[str]:
    """Return the wnid of each validation image, in the order of their numbers."""
    known = ilsvrc2012_wnids()
    wnid_of = {str(number): wnid for number, wnid in enumerate(known, start=1)}
    numbers = read_all(devkit, [GROUND_TRUTH])[GROUND_TRUTH].decode("ascii", errors="replace").split()
    wnids = [wnid_of.get(number, "") for number in numbers]
    if Counter(wnids) != dict.fromkeys(known, release.per_class):
        what = f"{GROUND_TRUTH} does not list {release.per_class} images of each class"
        raise DataError(what, devkit, DOWNLOAD_AGAIN)
    return wnids


def _number_of(name: str, num_images: int, archive: Path) -> int:
    """Return the number in the name of an image; DataError for any other name."""
    match = IMAGE_NAME.fullmatch(name)
    if match is None or not 1 <= int(match[1]) <= num_images:
        raise DataError(f"{name} is not one of the validation images", archive, DOWNLOAD_AGAIN)
    return int(match[1])
