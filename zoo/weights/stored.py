"""A weights file as a whole: its tensors and what it says of the network that they belong to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zoo.errors import WeightsError, printable
from zoo.weights.fetch import fetch_weights, provide_weights, published_name
from zoo.weights.fit import CLASSIFIER_WEIGHT, LoadReport, load_state_dict
from zoo.weights.read import read_checkpoint, state_dict_in
from zoo.weights.record import NetworkRecord, check_record, option_defaults, record_in


@dataclass(frozen=True)
class StoredWeights:
    """What a weights file holds: the network's tensors, its record if there is one, and all else of the file."""

    path: Path
    state_dict: dict[str, Tensor]
    record: NetworkRecord | None
    content: Mapping[Any, Any]

    def record_to_build(self) -> NetworkRecord | None:
        """Return the record for somebody who will build the network before the tensors are compared with it.

        Raises WeightsError where it claims another number of classes than the classifier beside it has: no file of a
        few bytes shall make its reader allocate a classifier of gigabytes.
        """
        weight = self.state_dict.get(CLASSIFIER_WEIGHT)
        found = 0 if weight is None else len(weight)
        if self.record is not None and found != self.record.classes:
            raise WeightsError(
                f"{printable(self.path)}: network.classes = {self.record.classes}: the classifier beside it has "
                f"{found} outputs; take the weights alone with zoo.weights.read_state_dict(FILE), or ask who made it"
            )
        return self.record


def locate_weights(path_or_name: str | os.PathLike[str]) -> Path:
    """Return ``path_or_name`` as a path; of published weights that of their verified file, downloaded if need be."""
    name = published_name(path_or_name)
    return Path(path_or_name) if name is None else fetch_weights(name)


def read_weights(path_or_name: str | os.PathLike[str]) -> StoredWeights:
    """Return the content of the weights file at a path, or of the published weights of a name, downloaded if need be.

    Published weights are read once, and their md5 is compared before anything of them is loaded. Raises WeightsError
    if the file is missing, damaged or unsafe, or says of its network what cannot be true.
    """
    published = published_name(path_or_name)
    path = Path(path_or_name) if published is None else provide_weights(published)
    content = read_checkpoint(path, published=published)
    state_dict = state_dict_in(content, path)
    record = record_in(content, printable(path)) if published is None else NetworkRecord.of_published(published)
    return StoredWeights(path, state_dict, record, content)


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> LoadReport:
    """Load the weights file at ``path``, or the published weights of that name, into ``model``; return what was done.

    Everything must fit, except that a classifier which the model has not, or has with another number of classes, is
    left out (logged). Where both the file and the model say which network they are, they must agree: weights that
    were trained with another activation or kind of norm have the same shapes, but compute something else. Raises
    WeightsError if the file is missing, damaged, unsafe or does not fit; the model is then unchanged.
    """
    return load_stored(model, read_weights(path))


def load_stored(model: nn.Module, stored: StoredWeights) -> LoadReport:
    """Do what `load_weights` does with a file that was read already."""
    own = getattr(model, "built_as", None)
    if own is not None and stored.record is not None:
        check_record(stored.record, {**option_defaults(own.arch), **own.settings()}, printable(stored.path))
    return load_state_dict(model, stored.state_dict, source=printable(stored.path))
