"""Class names, and matching class folders to the outputs of a network."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING
from unicodedata import normalize

from zoo.data.imagenet import NUM_CLASSES, imagenet_names, imagenet_wnids
from zoo.errors import DataError, escape, join_names
from zoo.tables import counted

if TYPE_CHECKING:
    from zoo.data.dataset import ImageDataset

logger = logging.getLogger(__name__)


def class_names(num_classes: int, known: Sequence[str] | None = None) -> list[str]:
    """Return a name for each class of a network, in the order of its outputs.

    ``known`` are the names in the weights file. Without them, 1000 classes get the names of ImageNet, and other numbers
    of classes get numbers as names. Wnids of ImageNet are replaced by its names.
    """
    if num_classes == NUM_CLASSES and tuple(known or imagenet_wnids()) == imagenet_wnids():
        return imagenet_names()
    return [*(known or ()), *(str(index) for index in range(len(known or ()), num_classes))]


def check_num_classes(images: ImageDataset, num_outputs: int) -> None:
    """Raise DataError if there are more classes than outputs; log a warning if there are fewer."""
    num_classes = len(images.classes)
    if num_classes > num_outputs:
        what = f"{counted(num_classes, 'class folder')} but the network has {counted(num_outputs, 'output')}"
        raise DataError(what, images.root, f"set network.num_classes to {num_classes} or remove folders")
    if num_classes < num_outputs:
        logger.warning(
            "warning: %s: %s for a network with %s; set network.num_classes to %d unless classes "
            "are intentionally missing", escape(images.root), counted(num_classes, "class folder"),
            counted(num_outputs, "output"), num_classes,
        )  # fmt: skip


def check_same_classes(train: ImageDataset, val: ImageDataset) -> None:
    """Raise DataError, naming the differences, unless both have the same classes in the same order."""
    if train.classes == val.classes:
        return
    missing = sorted(set(train.classes) - set(val.classes))
    unknown = sorted(set(val.classes) - set(train.classes))
    where = train.root.parent
    if not missing and not unknown:  # shards may number classes in any order; folders are sorted
        what = f"{train.root.name}/ and {val.root.name}/ have the same classes in another order"
        raise DataError(what, where, "create both with the same order")
    parts = [f"{len(missing)} only in {train.root.name}/: {join_names(missing)}"] if missing else []
    parts += [f"{len(unknown)} only in {val.root.name}/: {join_names(unknown)}"] if unknown else []
    what = f"{train.root.name}/ and {val.root.name}/ have different classes ({'; '.join(parts)})"
    if not {normalize("NFC", name) for name in missing}.isdisjoint(normalize("NFC", name) for name in unknown):
        remedy = "rename the folders to one form; file systems and archives of macOS decompose letters (NFD)"
        raise DataError(f"{what}, and some of them differ only in the Unicode composition of a letter", where, remedy)
    raise DataError(what, where, "give both the same folders (one in val/ may be empty)")


def match_classes(images: ImageDataset, num_outputs: int, names: Sequence[str] | None) -> None:
    """Set the targets of ``images`` to the network's outputs, matched by the names of the class folders.

    A folder of an ImageNet class may be named by its wnid ("n02123045") or torchvision's name ("tabby"). 1000 folders
    named 0 to 999, as in ImageNet-V2, are the classes of these numbers. Folders of some classes may be missing.

    ``names`` are the escaped classes of the network in the order of its outputs. If they are None, a network with 1000
    outputs is assumed to be trained on ImageNet if the folders are named like classes of ImageNet. Otherwise
    there must be as many folders as outputs; they are numbered in sorted order, as in training, with a warning. The
    labels of a data set without class names are numbers of outputs.

    Raises DataError for a folder that is not a class of the network, for two folders of the same class, and without
    names for a different number of folders.
    """
    if not images.classes:
        logger.warning("the data set names no classes: its labels are taken for outputs; %s", escape(images.root))
        return
    folders = [escape(name) for name in images.classes]
    if names is None and num_outputs == NUM_CLASSES:
        of_imagenet = {*imagenet_wnids(), *imagenet_names()}
        if not of_imagenet.isdisjoint(folders) or _are_imagenet_numbers(folders):
            names = imagenet_wnids()
    if names is None:
        _check_number(images, num_outputs)
        logger.warning(
            "the names of the network's classes are unknown: its outputs are assumed to be the %s in sorted order "
            "(%s), as if it was trained on the same data; %s",
            images.class_kind, join_names(folders, 3), escape(images.root),
        )  # fmt: skip
        return
    outputs = _outputs_of(folders, names, images)
    if len(folders) < num_outputs:
        logger.warning(
            "the %s are matched by name to %d of the network's %d outputs; %s",
            images.class_kind, len(folders), num_outputs, escape(images.root),
        )  # fmt: skip
    images.remap_targets(outputs)


def _are_imagenet_numbers(folders: Sequence[str]) -> bool:
    """Return whether the folders are named 0 to 999, as in ImageNet-V2. They are sorted as "0", "1", "10", "100"."""
    return set(folders) == {str(number) for number in range(NUM_CLASSES)}


def _check_number(images: ImageDataset, num_outputs: int) -> None:
    """Raise DataError unless there are as many classes as outputs."""
    if len(images.classes) == num_outputs:
        return
    outputs = counted(num_outputs, "output")
    counts = f"the number of {images.class_kind} is {len(images.classes)} but the network has {outputs}"
    remedy = (
        f"give all {images.class_kind} that it was trained on (some may be empty), or weights with class names, as "
        "zoo train writes them"
    )
    raise DataError(f"{counts}, and its weights file does not name its classes", images.root, remedy)


def _outputs_of(folders: Sequence[str], names: Sequence[str], images: ImageDataset) -> list[int]:
    outputs = {name: output for output, name in enumerate(names)}
    if tuple(names) == imagenet_wnids() and _are_imagenet_numbers(folders):
        return [int(folder) for folder in folders]
    if not outputs.keys() >= set(folders):
        pairs = zip(imagenet_names(), imagenet_wnids(), strict=True)
        outputs = {**{name: outputs[wnid] for name, wnid in pairs if wnid in outputs}, **outputs}
    unknown = [folder for folder in folders if folder not in outputs]
    if unknown:
        kind = images.class_kind
        what = f"{len(unknown)} of {len(folders)} {kind} are not classes of the network: {join_names(unknown)}"
        remedy = (
            f"rename or remove them (the network's {len(names)} classes are {join_names(names, 3)}), or give the "
            "weights of a network that was trained on them"
        )
        raise DataError(what, images.root, remedy)
    by_output = defaultdict(list)
    for folder in folders:
        by_output[outputs[folder]].append(folder)
    for same in by_output.values():
        if len(same) > 1:
            raise DataError(f"{images.class_kind} of the same class: {join_names(same)}", images.root, "merge them")
    return [outputs[folder] for folder in folders]
