"""One thread per test process: faster for small tensors, and the same bits on every machine. No downloads."""

import gc
import logging
import os
from collections.abc import Iterator

import pytest

# Before torch is imported: processes that a test starts inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The tests of downloads take it away: they have a server on this machine.
os.environ["ZOO_OFFLINE"] = "1"

import torch

torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Planning collects garbage after the steps that it measures; the modules of all tests need no such search."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _restored_logger() -> Iterator[None]:
    """Commands set up the package's logger; each test finds it as it was."""
    logger = logging.getLogger("zoo")
    before = logger.handlers, logger.level
    yield
    logger.handlers, logger.level = before
