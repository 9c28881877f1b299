"""The names of classes, and which output of a network each class folder belongs to."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.data.imagenet import NUM_CLASSES, imagenet_names, imagenet_wnids
from zoo.data.location import DataPath
from zoo.data.reading import naming, read_text
from zoo.data.shards import CLASSES, has_shards
from zoo.errors import DataError, brief, listed, printable

if TYPE_CHECKING:
    from zoo.data.folder import ImageDataset

logger = logging.getLogger(__name__)


def class_names(num_classes: int, source: Path | None = None, known: Sequence[str] | None = None) -> list[str]:
    """Return a name for each class of a network, in the order of its outputs.

    The names are those of ``source``: a folder with one folder per class, such as the one that the network was trained
    on (DATA/train), a folder of shards with a file of names, or a text file with one name per line. Without a source
    they are the ``known`` names from the network's weights file, followed by numbers for the classes that it does not
    name. If nothing is known either, 1000 classes have the names of ImageNet, and any other count has numbers. If the
    known names are the wnids of all of ImageNet, the names of ImageNet take their place. Raises DataError unless the
    source has as many names as the network has classes.
    """
    if source is None:
        of_imagenet = num_classes == NUM_CLASSES and tuple(known or imagenet_wnids()) == imagenet_wnids()
        if of_imagenet:
            return imagenet_names()
        return [*(known or ()), *(str(index) for index in range(len(known or ()), num_classes))]
    names = _names_in(source)
    if len(names) != num_classes:
        raise DataError(
            f"there are {len(names)} class names ({listed(names, 3)}) but the network has {num_classes} classes; "
            f"{printable(source)}: give the folder with the class folders (DATA/train), or a file with one name per "
            "line"
        )
    return names


def _names_in(source: Path) -> list[str]:
    if has_shards(source):
        source = source / CLASSES
    if not source.is_dir():
        return [line.strip() for line in read_text(source, "the class names").split("\n") if line.strip()]
    with naming(printable(source), "the class names"):  # sorted, as `ImageFolder` numbers the classes
        return sorted(path.name for path in source.iterdir() if path.is_dir() and not path.name.startswith("."))


def check_num_classes(images: ImageDataset, num_outputs: int) -> None:
    """Raise DataError for more classes than the network has outputs; log a warning for fewer."""
    num_classes = len(images.classes)
    if num_classes > num_outputs:
        raise DataError(
            f"there are {num_classes} class folders but the network has {num_outputs} outputs; "
            f"{printable(images.root)}: "
            f"set network.num_classes to {num_classes} or remove folders"
        )
    if num_classes < num_outputs:
        logger.warning(
            "warning: %d class folders for a network with %d outputs; %s: set network.num_classes to %d unless classes "
            "are missing on purpose", num_classes, num_outputs, printable(images.root), num_classes,
        )  # fmt: skip


def check_same_classes(train: ImageDataset, val: ImageDataset) -> None:
    """Raise DataError, naming the differences, unless both have the same classes in the same order."""
    if train.classes == val.classes:
        return
    missing = sorted(set(train.classes) - set(val.classes))
    unknown = sorted(set(val.classes) - set(train.classes))
    if not missing and not unknown:  # folders are sorted, but shards number classes as they like
        number = next(i for i, pair in enumerate(zip(train.classes, val.classes, strict=True)) if len(set(pair)) > 1)
        raise DataError(
            f"{train.root.name}/ and {val.root.name}/ have the same classes in another order: class {number} is "
            f"{brief(train.classes[number])} and {brief(val.classes[number])}; {printable(train.root.parent)}: "
            "make both with the same order"
        )
    parts = [f"{len(missing)} only in {train.root.name}/: {listed(missing)}"] if missing else []
    parts += [f"{len(unknown)} only in {val.root.name}/: {listed(unknown)}"] if unknown else []
    raise DataError(
        f"{train.root.name}/ and {val.root.name}/ have different classes ({'; '.join(parts)}); "
        f"{printable(train.root.parent)}: give both the same folders (one in val/ may be empty)"
    )


def match_classes(images: ImageDataset, num_outputs: int, names: Sequence[str] | None) -> None:
    """Number the classes of ``images`` like the network's outputs, by the names of their folders.

    ``names`` are the classes of the network in the order of its outputs, made `printable`; None where they are not
    known. A network with 1000 outputs is then taken for one of ImageNet if the folders are called like classes of
    ImageNet. Otherwise there have to be as many folders as outputs; they are numbered in the order of their names, as
    in training, and this is logged. A folder of an ImageNet class may be called by its wnid ("n02123045") or by its
    name in torchvision ("tabby"); 1000 folders called 0 to 999, as those of ImageNet-V2, are the classes of these
    numbers. If names are known, the folders of some classes may be missing.

    Raises DataError for a folder that is no class of the network, for two folders that are the same class, for a name
    that two classes have, and for another number of folders if no names are known.
    """
    folders = [printable(name) for name in images.classes]
    if names is None and num_outputs == NUM_CLASSES and _are_of_imagenet(folders):
        names = imagenet_wnids()
    if names is None:
        _check_number(images, num_outputs)
        logger.warning(
            "the names of the network's classes are not known: its %d outputs are taken for the %s in their order "
            "(%s), as if it was trained on the same data; %s",
            num_outputs, images.class_kind, listed(folders, 3), printable(images.root),
        )  # fmt: skip
        return
    outputs = _outputs_of(folders, names, images)
    if len(folders) < num_outputs:
        logger.warning(
            "%d %s are matched by name to %d of the network's %d outputs; %s",
            len(folders), images.class_kind, len(folders), num_outputs, printable(images.root),
        )  # fmt: skip
    images.number_classes(outputs)


def _are_of_imagenet(folders: Sequence[str]) -> bool:
    """Return whether folders are called as classes of ImageNet: one by a wnid, half by names, or all by numbers.

    Some names may be misspelt.
    """
    names = set(imagenet_names())
    by_name = sum(folder in names for folder in folders)
    is_named = not set(imagenet_wnids()).isdisjoint(folders) or 2 * by_name >= len(folders)
    return is_named or _are_imagenet_numbers(folders)


def _are_imagenet_numbers(folders: Sequence[str]) -> bool:
    """Return whether the folders are called 0 to 999, as those of ImageNet-V2; their order is "0", "1", "10", "100"."""
    return set(folders) == {str(number) for number in range(NUM_CLASSES)}


def _check_number(images: ImageDataset, num_outputs: int) -> None:
    """Raise DataError unless there are as many classes as outputs."""
    if len(images.classes) == num_outputs:
        return
    raise DataError(
        f"there are {len(images.classes)} {images.class_kind} but the network has {num_outputs} outputs, and nobody "
        f"knows which: the names of its classes are not in its weights file; {printable(images.root)}: give all "
        f"{images.class_kind} that it was trained on (some may be empty), or weights that know the names, as those of "
        "zoo train do"
    )


def _outputs_of(folders: Sequence[str], names: Sequence[str], images: ImageDataset) -> list[int]:
    outputs = {name: output for output, name in enumerate(names)}
    if tuple(names) == imagenet_wnids() and _are_imagenet_numbers(folders):
        return [int(folder) for folder in folders]
    if not outputs.keys() >= set(folders):
        outputs = {**_outputs_by_imagenet_name(folders, outputs, images.root), **outputs}
    unknown = [folder for folder in folders if folder not in outputs]
    if unknown:
        raise DataError(
            f"{len(unknown)} of {len(folders)} {images.class_kind} are no classes of the network: {listed(unknown)}; "
            f"{printable(images.root)}: rename or remove them (the network's {len(names)} classes are "
            f"{listed(names, 3)}), or give the weights of a network that was trained on them"
        )
    by_output = defaultdict(list)
    for folder in folders:
        by_output[outputs[folder]].append(folder)
    for same in by_output.values():
        if len(same) > 1:
            raise DataError(
                f"{images.class_kind} that are the same class: {listed(same)}; {printable(images.root)}: merge them"
            )
    return [outputs[folder] for folder in folders]


def _outputs_by_imagenet_name(folders: Sequence[str], outputs: Mapping[str, int], root: DataPath) -> dict[str, int]:
    """Return the output of each name that torchvision has for one of the wnids in ``outputs``.

    Raises DataError where a folder has a name that several classes have.
    """
    wnids = defaultdict(list)
    for wnid, name in zip(imagenet_wnids(), imagenet_names(), strict=True):
        if wnid in outputs:
            wnids[name].append(wnid)
    for folder in folders:
        if folder not in outputs and len(wnids.get(folder, ())) > 1:
            raise DataError(
                f"{folder} could be {' or '.join(wnids[folder])}; {printable(root)}: name the folder after one of these"
            )
    return {name: outputs[wnids_of_name[0]] for name, wnids_of_name in wnids.items()}
