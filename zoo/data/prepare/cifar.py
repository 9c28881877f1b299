"""Converting CIFAR-10 and CIFAR-100 from the published Python version to class folders, with torchvision's readers."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path

from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100

from zoo.data.prepare.archives import check_md5, read_all
from zoo.data.prepare.output import ShowProgress, check_free, complete_folder
from zoo.data.reading import read_bytes
from zoo.errors import DataError

CIFAR: dict[str, type[CIFAR10]] = {"cifar10": CIFAR10, "cifar100": CIFAR100}


def unpack_cifar(release: type[CIFAR10], source: Path, out: Path, show_progress: ShowProgress) -> dict[str, str]:
    """Write ``out``/train/CLASS/*.png and ``out``/val/CLASS/*.png; return the md5 of each file that was read.

    ``source`` is the archive, the unpacked folder, or a folder that contains one of these. Images are named by their
    numbers in the published order. ``out`` is renamed into place when it is complete. Raises DataError if files are
    missing or differ from the published ones, and if ``out`` exists.
    """
    check_free(out)
    with tempfile.TemporaryDirectory() as private:
        digests = _copy_files(release, source, Path(private))
        with complete_folder(out) as folder:
            for split in ("train", "val"):
                _write_split(_read_split(release, Path(private), split == "train"), folder / split, show_progress)
    return digests


def _copy_files(release: type[CIFAR10], source: Path, private: Path) -> dict[str, str]:
    """Copy the published files to a private folder and return their md5.

    Pickles can run code, so only bytes with a verified digest are unpickled. torchvision verifies the copies.
    """
    meta = release.meta["filename"], release.meta["md5"]
    md5s = dict([*release.train_list, *release.test_list, meta])
    folder = next((place for place in (source, source / release.base_folder) if (place / meta[0]).exists()), None)
    if folder is not None:
        for name, md5 in md5s.items():
            check_md5(folder / name, md5)
        contents = {name: read_bytes(folder / name, "the data set") for name in md5s}
        digests = md5s
    else:
        archive = source / release.filename if source.is_dir() else source
        if not archive.exists():
            what = f"there is neither {release.filename} nor {release.base_folder}/"
            raise DataError(what, source, "SOURCE is one of these, or a folder that contains one")
        check_md5(archive, release.tgz_md5)
        members = read_all(archive, [f"{release.base_folder}/{name}" for name in md5s])
        contents = {os.path.basename(name): content for name, content in members.items()}
        digests = {release.filename: release.tgz_md5}
    (private / release.base_folder).mkdir()
    for name, content in contents.items():
        (private / release.base_folder / name).write_bytes(content)
    return digests


def _read_split(release: type[CIFAR10], folder: Path, train: bool) -> CIFAR10:
    try:
        with warnings.catch_warnings():  # numpy warns about the age of these pickles
            warnings.simplefilter("ignore")
            return release(folder, train=train)
    except RuntimeError as error:  # the md5 of a file differs
        raise DataError("the files are not the original ones", remedy="download the data set again") from error


def _write_split(images: CIFAR10, folder: Path, show_progress: ShowProgress) -> None:
    for name in images.classes:
        (folder / name).mkdir(parents=True)
    with show_progress(folder.name, len(images.targets)) as bar:
        for index, (pixels, label) in enumerate(zip(images.data, images.targets, strict=True)):
            Image.fromarray(pixels).save(folder / images.classes[label] / f"{index:05d}.png")
            bar.advance(1)
