"""One thread per test process: faster for small tensors, and the same bits on every machine. No downloads."""

import gc
import logging
import os
from collections.abc import Iterator

import pytest

# Before torch is imported: processes that a test starts inherit all of this. Without bytecode, each of them and each
# worker of xdist would compile all modules of torch that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns if it is unset
# The tests of downloads take it away: they have a server on this machine.
os.environ["ZOO_OFFLINE"] = "1"

import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _frozen_heap() -> None:
    """Freeze the heap, because planning collects garbage around each measured step."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(scope="module")
def small_networks() -> Iterator[None]:
    """Let `zoo.get` build the small networks of tests/nets.py."""
    from tests.nets import small_architectures

    with small_architectures():
        yield


@pytest.fixture(autouse=True)
def _restored_logger() -> Iterator[None]:
    """Restore the package's logger after each test, because commands configure it."""
    logger = logging.getLogger("zoo")
    before = logger.handlers, logger.level
    yield
    logger.handlers, logger.level = before
