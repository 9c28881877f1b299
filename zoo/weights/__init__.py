"""Weights files: fetching the published ones, reading files safely, and loading them into a network strictly."""

from __future__ import annotations

import os

from torch import nn

from zoo.weights.fetch import fetch_weights
from zoo.weights.fit import LoadReport, load_state_dict
from zoo.weights.read import md5_of, read_checkpoint, read_state_dict

__all__ = [
    "LoadReport",
    "fetch_weights",
    "load_state_dict",
    "load_weights",
    "md5_of",
    "read_checkpoint",
    "read_state_dict",
]


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> LoadReport:
    """Load the weights file at ``path`` into ``model`` and return what was done.

    Everything must fit, except that a classifier which the model has not, or has with another number of classes, is
    left out (logged). Raises WeightsError if the file is missing, damaged, unsafe or does not fit; the model is then
    unchanged.
    """
    return load_state_dict(model, read_state_dict(path), source=str(path))
