"""Checking a data set before a run: reads all images and label maps, and reports all faults."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from zoo.data.dataset import ImageDataset
from zoo.data.reading import Unreachable, read_many
from zoo.errors import DataError


class Findings(NamedTuple):
    """What `check_images` found in a data set.

    Args:
    - `faults`: a message for each image that would stop a run, and one if no image has a class.
    - `absent`: a message that names the classes without images; "" if there are none.
    """

    faults: list[str]
    absent: str


def check_images(dataset: ImageDataset, title: str, workers: int) -> Findings:
    """Draw each image of a data set once; return the faults, and the classes that no image has.

    Raises Unreachable if a file system or a server does not deliver images.

    Args:
    - `title`: name of the progress bar.
    - `workers`: number of threads.
    """
    results = read_many(partial(_check, dataset), range(len(dataset)), workers)
    faults: list[str] = []
    counts = np.zeros(len(dataset.classes), dtype=np.int64)
    for result in tqdm(results, desc=title, total=len(dataset), unit="image", disable=None, leave=False):
        if isinstance(result, str):
            faults.append(result)
        else:
            counts[result[result < len(counts)]] += 1  # a user's data set may name fewer classes, or none
    absent = dataset.describe_absent(counts.tolist())
    if len(counts) and not counts.any() and len(faults) < len(dataset):
        return Findings([*faults, f"{dataset.root}: no {dataset.class_unit} has a class; {absent}"], "")
    return Findings(faults, absent)


def _check(dataset: ImageDataset, index: int) -> np.ndarray | str:
    """Return the classes of an image, or the message of an error that would stop a run."""
    try:
        return dataset.classes_in(index, dataset[0, index])
    except Unreachable:  # all other images would wait and fail in the same way
        raise
    except DataError as error:
        return str(error)
