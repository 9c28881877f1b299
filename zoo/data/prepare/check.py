"""Checking a data set before a run: reads all images and label maps, and reports all faults."""

from __future__ import annotations

from functools import partial

from tqdm import tqdm

from zoo.data.folder import ImageDataset
from zoo.data.reading import read_many
from zoo.data.remote import Unreachable
from zoo.errors import DataError


def find_faults(dataset: ImageDataset, title: str, workers: int) -> list[str]:
    """Return a message for each image that would stop a run, after drawing each image once.

    Raises Unreachable if a server fails while images are read.

    Args:
    - `title`: name of the progress bar.
    - `workers`: number of threads.
    """
    results = read_many(partial(_fault_of, dataset), range(len(dataset)), workers)
    bar = tqdm(results, desc=title, total=len(dataset), unit="image", disable=None, leave=False)
    return list(filter(None, bar))


def _fault_of(dataset: ImageDataset, index: int) -> str | None:
    try:
        dataset[0, index]
    except Unreachable:  # every image of the shard would wait and fail in the same way
        raise
    except DataError as error:
        return str(error)
    return None
