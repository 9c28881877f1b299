"""Weights files: fetching the published ones, reading files safely, and loading them into a network strictly."""

from zoo.weights.cache import digests_of, fetch_weights, md5_of
from zoo.weights.load import LoadReport, load_state_dict
from zoo.weights.read import read_checkpoint, read_state_dict
from zoo.weights.stored import StoredWeights, load_stored, load_weights, read_weights

__all__ = [
    "LoadReport",
    "StoredWeights",
    "digests_of",
    "fetch_weights",
    "load_state_dict",
    "load_stored",
    "load_weights",
    "md5_of",
    "read_checkpoint",
    "read_state_dict",
    "read_weights",
]
