"""One thread per test process: faster for small tensors, and the same bits on every machine. No downloads.

Bytecode is written, also where the environment says not to: each process that a test starts would compile all modules
of torch that it imports.
"""

import gc
import logging
import os
import sys
from collections.abc import Iterator

import pytest

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Before torch is imported: processes that a test starts inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The tests of downloads take it away: they have a server on this machine.
os.environ["ZOO_OFFLINE"] = "1"

import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _frozen_heap() -> None:
    """Planning collects garbage around each step that it measures, and need not search what earlier tests imported."""
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
