"""Weights files: fetching the published ones, reading files safely, and loading them into a network strictly."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from zoo.weights.fetch import fetch_weights
from zoo.weights.fit import LoadReport, load_state_dict
from zoo.weights.index import all_published
from zoo.weights.read import md5_of, read_checkpoint, read_state_dict

__all__ = [
    "LoadReport",
    "fetch_weights",
    "load_state_dict",
    "load_weights",
    "locate_weights",
    "md5_of",
    "read_checkpoint",
    "read_state_dict",
]


def locate_weights(path_or_name: str | os.PathLike[str]) -> Path:
    """Return ``path_or_name`` as a path; of published weights that of their verified file, downloaded if need be."""
    path = Path(path_or_name)
    is_name = os.fspath(path_or_name) in all_published() and not path.exists()
    return fetch_weights(os.fspath(path_or_name)) if is_name else path


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> LoadReport:
    """Load the weights file at ``path``, or the published weights of that name, into ``model``; return what was done.

    Everything must fit, except that a classifier which the model has not, or has with another number of classes, is
    left out (logged). Raises WeightsError if the file is missing, damaged, unsafe or does not fit; the model is then
    unchanged.
    """
    path = locate_weights(path)
    return load_state_dict(model, read_state_dict(path), source=str(path))
