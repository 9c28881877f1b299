"""``python -m tests.dist.observed`` is zoo with notes of the images that it trains on, and less patience.

The environment says how, each for tests alone:
- `OBSERVED_NOTES`: folder; a process appends a line for each batch that it draws to a file of its own there.
- `OBSERVED_LIMIT_S`: seconds after which a process that is silent is lost.
- `OBSERVED_PAUSES_S`: seconds that this process waits before each of its batches, as if its disk were slow; with commas
  between them, and the last for all that follow.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from zoo.cli import main
from zoo.data.sampler import Key, TrainBatches
from zoo.engine import heartbeat

BEATS_PER_LIMIT = 16


def observe() -> None:
    """Note the batches of this process from now on."""
    *some_s, last_s = map(float, os.environ.get("OBSERVED_PAUSES_S", "0").split(","))
    pauses_s = itertools.chain(some_s, itertools.repeat(last_s))
    notes = Path(os.environ["OBSERVED_NOTES"])
    name = "-".join([str(time.time_ns()), os.environ["WORLD_SIZE"], os.environ["RANK"]])
    iterate = TrainBatches.__iter__

    def noted(batches: TrainBatches) -> Iterator[list[Key]]:
        for keys in iterate(batches):
            time.sleep(next(pauses_s))
            with (notes / name).open("a") as file:
                file.write(json.dumps(keys) + "\n")
            yield keys

    TrainBatches.__iter__ = noted  # type: ignore[method-assign]
    if "OBSERVED_LIMIT_S" in os.environ:
        heartbeat.LIMIT_S = float(os.environ["OBSERVED_LIMIT_S"])
        heartbeat.BEAT_S = heartbeat.LIMIT_S / BEATS_PER_LIMIT


if __name__ == "__main__":
    observe()
    sys.exit(main())
