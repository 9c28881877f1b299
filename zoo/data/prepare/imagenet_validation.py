"""Unpacking ImageNet's validation set from the two published archives to class folders, with torchvision."""

from __future__ import annotations

import tempfile
from pathlib import Path

from torchvision.datasets import imagenet

from zoo.data.prepare.output import check_free, complete_folder
from zoo.errors import DataError


def unpack_imagenet_val(source: Path, out: Path) -> dict[str, str]:
    """Write ``out``/val/WNID/ILSVRC2012_val_*.JPEG, unchanged; return the md5 of the archives.

    ``source`` is the archive of the images, with the devkit beside it, or the folder that contains both. ``out``/val is
    renamed into place when it is complete. Raises DataError if an archive is missing or differs from the published one,
    if ``out``/val exists, and if scipy is not installed.
    """
    target = out / "val"
    check_free(target)
    (images_name, _), (devkit_name, _) = (imagenet.ARCHIVE_META[kind] for kind in ("val", "devkit"))
    images = (source / images_name if source.is_dir() else source).absolute()
    devkit = images.with_name(devkit_name)
    if missing := next((file for file in (images, devkit) if not file.exists()), None):
        remedy = f"SOURCE is a folder with {images_name} and {devkit_name}, or the former beside the latter"
        raise DataError(f"there is no {missing.name}", missing.parent, remedy)
    try:
        with tempfile.TemporaryDirectory() as meta, complete_folder(target) as folder:
            imagenet.parse_devkit_archive(meta, str(devkit))
            _, wnids = imagenet.load_meta_file(meta)
            imagenet.parse_val_archive(str(folder), str(images), wnids, folder="")
    except ImportError as error:  # it reads the classes of the devkit
        raise DataError(f"torchvision needs scipy: {error}", devkit, "pip install scipy") from error
    except RuntimeError as error:  # the md5 differs
        raise DataError(error, source, "download it again") from error
    return dict(imagenet.ARCHIVE_META[kind] for kind in ("val", "devkit"))
