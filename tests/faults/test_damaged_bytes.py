"""One damaged byte anywhere in a checkpoint is found, or changes nothing; never are wrong values loaded."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.tiny import build_net, differences, make_config, save
from zoo.engine.checkpoint import CHECKPOINT, read
from zoo.engine.process import Process
from zoo.engine.state import build_state
from zoo.errors import ZooError
from zoo.tasks import task_of
from zoo.weights.read import read_checkpoint

NUM_BYTES = 1000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = make_config()
    folder = tmp_path_factory.mktemp("log")
    save(build_state(task_of(config), build_net(config.network), Process()), folder)
    return folder / CHECKPOINT


def _damaged(path: Path, positions: list[int]) -> Iterator[int]:
    """Yield each position while the byte there is another one."""
    chance = random.Random(0)
    with open(path, "r+b", buffering=0) as file:
        for position in positions:
            byte = os.pread(file.fileno(), 1, position)
            os.pwrite(file.fileno(), bytes([byte[0] ^ chance.randint(1, 255)]), position)
            try:
                yield position
            finally:
                os.pwrite(file.fileno(), byte, position)


@pytest.mark.exhaustive
@pytest.mark.parametrize("reader", [read, read_checkpoint], ids=["resume", "weights"])
def test_a_damaged_byte_of_a_checkpoint_is_found_or_harmless(
    reader: Callable[[Path], Any], checkpoint: Path, record_property: Callable[[str, object], None]
) -> None:
    """The header and the directory at the end have a part of the bytes of their own, as they are short."""
    expected, size = reader(checkpoint), checkpoint.stat().st_size
    chance = random.Random(1)
    ends = [*range(100), *range(size - 100, size)]
    positions = ends + chance.sample(range(100, size - 100), NUM_BYTES - len(ends))
    wrong, num_found = [], 0
    for position in _damaged(checkpoint, positions):
        try:
            content = reader(checkpoint)
        except ZooError:
            num_found += 1
        else:
            wrong += [f"byte {position}: {place}" for place in differences(expected, content)]
    assert wrong == []
    assert num_found > NUM_BYTES / 2
    assert differences(expected, reader(checkpoint)) == []
    record_property("cases", len(positions))
