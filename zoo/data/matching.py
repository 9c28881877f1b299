"""Which output of a network each class folder belongs to."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from zoo.data.classes import NUM_IMAGENET, imagenet_names, imagenet_wnids
from zoo.data.folder import ImageFolder
from zoo.errors import DataError, listed, printable

logger = logging.getLogger(__name__)


def match_classes(images: ImageFolder, num_outputs: int, names: Sequence[str] | None) -> None:
    """Make the targets of ``images`` the outputs of the network that their class folders stand for, by name.

    ``names``: the classes of the network in the order of its outputs, made `printable`; None where they are not known.
    A network with 1000 outputs is then taken for one of ImageNet if the folders are called like classes of ImageNet.
    Otherwise as many folders as outputs are numbered in the order of their names, as in training, which is logged.
    Classes of ImageNet go by wnid ("n02123045") or by their name in torchvision ("tabby"). Folders may be missing.

    Raises DataError for folders that are no classes of the network, for two folders that are the same class, for names
    that two classes have, and for another number of folders where no names are known.
    """
    folders = [printable(name) for name in images.classes]
    if names is None and num_outputs == NUM_IMAGENET and _are_of_imagenet(folders):
        names = imagenet_wnids()
    if names is None:
        _check_number(len(folders), num_outputs, images.root)
        logger.warning(
            "the names of the network's classes are not known: its %d outputs are taken for the class folders in the "
            "order of their names, as if it was trained on the same folders; %s", num_outputs, printable(images.root),
        )  # fmt: skip
        return
    outputs = _outputs_of(folders, names, images.root)
    if len(folders) < num_outputs:
        logger.warning(
            "%d class folders are matched by name to %d of the network's %d outputs; %s",
            len(folders), len(folders), num_outputs, printable(images.root),
        )  # fmt: skip
    images.number_classes(outputs)


def _are_of_imagenet(folders: Sequence[str]) -> bool:
    """Return whether one folder is called by a wnid, or at least half by a name of ImageNet; some may be misspelt."""
    names = set(imagenet_names())
    by_name = sum(folder in names for folder in folders)
    return not set(imagenet_wnids()).isdisjoint(folders) or 2 * by_name >= len(folders)


def _check_number(num_folders: int, num_outputs: int, root: Path) -> None:
    """Raise DataError unless there are as many folders as outputs."""
    if num_folders == num_outputs:
        return
    raise DataError(
        f"there are {num_folders} class folders but the network has {num_outputs} outputs, and nobody knows which: the "
        f"names of its classes are not in its weights file; {printable(root)}: give all class folders that it was "
        "trained on (some may be empty), or weights that know the names, as those of zoo train do"
    )


def _outputs_of(folders: Sequence[str], names: Sequence[str], root: Path) -> list[int]:
    outputs = {name: output for output, name in enumerate(names)}
    if not outputs.keys() >= set(folders):
        outputs = {**_outputs_by_imagenet_name(folders, outputs, root), **outputs}
    unknown = [folder for folder in folders if folder not in outputs]
    if unknown:
        raise DataError(
            f"{len(unknown)} of {len(folders)} class folders are no classes of the network: {listed(unknown)}; "
            f"{printable(root)}: rename or remove them (the network's {len(names)} classes are {listed(names, 3)}), or "
            "give the weights of a network that was trained on them"
        )
    by_output = defaultdict(list)
    for folder in folders:
        by_output[outputs[folder]].append(folder)
    for same in by_output.values():
        if len(same) > 1:
            raise DataError(f"class folders that are the same class: {listed(same)}; {printable(root)}: merge them")
    return [outputs[folder] for folder in folders]


def _outputs_by_imagenet_name(folders: Sequence[str], outputs: Mapping[str, int], root: Path) -> dict[str, int]:
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
    return {name: outputs[found[0]] for name, found in wnids.items()}
