"""Weights files: fetching the published ones, reading files safely, and loading them into a network strictly."""

from zoo.weights.fetch import fetch_weights
from zoo.weights.fit import LoadReport, load_state_dict
from zoo.weights.read import read_checkpoint, read_state_dict
from zoo.weights.record import NetworkRecord
from zoo.weights.stored import StoredWeights, load_stored, load_weights, read_weights
from zoo.weights.verify import md5_of

__all__ = [
    "LoadReport",
    "NetworkRecord",
    "StoredWeights",
    "fetch_weights",
    "load_state_dict",
    "load_stored",
    "load_weights",
    "md5_of",
    "read_checkpoint",
    "read_state_dict",
    "read_weights",
]
