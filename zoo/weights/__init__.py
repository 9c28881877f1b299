"""Weights files: fetching the published ones, reading files safely, and loading them into a network strictly."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from zoo.errors import printable
from zoo.weights.fetch import fetch_weights, provide_weights, published_name
from zoo.weights.fit import LoadReport, load_state_dict
from zoo.weights.read import read_checkpoint, read_state_dict
from zoo.weights.verify import md5_of

__all__ = [
    "LoadReport",
    "fetch_weights",
    "load_published",
    "load_state_dict",
    "load_weights",
    "locate_weights",
    "md5_of",
    "read_checkpoint",
    "read_state_dict",
]


def locate_weights(path_or_name: str | os.PathLike[str]) -> Path:
    """Return ``path_or_name`` as a path; of published weights that of their verified file, downloaded if need be."""
    return fetch_weights(name) if (name := published_name(path_or_name)) else Path(path_or_name)


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> LoadReport:
    """Load the weights file at ``path``, or the published weights of that name, into ``model``; return what was done.

    Everything must fit, except that a classifier which the model has not, or has with another number of classes, is
    left out (logged). Raises WeightsError if the file is missing, damaged, unsafe or does not fit; the model is then
    unchanged.
    """
    if name := published_name(path):
        return load_published(model, name)
    return load_state_dict(model, read_state_dict(path), source=printable(path))


def load_published(model: nn.Module, name: str) -> LoadReport:
    """Load the published weights ``name`` into ``model``, as `load_weights` does; downloads them if need be.

    The file is read and its md5 compared each time, before anything of it is loaded.
    """
    path = provide_weights(name)
    return load_state_dict(model, read_state_dict(path, published=name), source=printable(path))
