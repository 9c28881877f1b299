"""Small runs on several machines, and the comparison of two of them: images of each step, and bits of the weights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.dist.hosts import Host, Launch, torchrun
from tests.dist.observed import observe
from tests.dist.spawn import run_distributed
from tests.engine.tiny import differences, make_images
from zoo.cli import main
from zoo.engine.checkpoint import CHECKPOINT, read

MODULE = "tests.dist.observed"
NUM_STEPS = 15
LIMIT_S = 8.0
END_S = 240.0  # of a whole run, on a machine that does other things too
SETTINGS: dict[str, Any] = {
    "network": {"arch": "resnet32_cifar", "bn_mode": "sync", "classes": 2},
    "optimizer": {"batch_size": 12, "learning_rate": 0.01, "schedule": {"epochs": 3}},
    "input": {"crop_train": 10, "scale_val": 12, "crop_val": 10},
    "checkpoint": {"every_steps": 2},
}

Batches = list[list[Any]]


class Run:
    """A run in a folder that all machines see; it holds the settings, the images, the log and notes of each step."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log, self.notes = folder, folder / "log", folder / "notes"
        self.notes.mkdir(parents=True)
        self.config, self.data = folder / "tiny.json", make_images(folder / "data", num_train=60, num_val=11)
        self.config.write_text(json.dumps(SETTINGS))

    @contextmanager
    def started(
        self, machines: list[Host], *options: str, pauses_s: Mapping[int, str] | None = None, more: tuple[str, ...] = ()
    ) -> Iterator[Launch]:
        """Start training on machines, or go on; ``options`` are those of torchrun and ``more`` those of zoo."""
        command = ["train", str(self.config), str(self.data), "--log-dir", str(self.log), "-j", "0"]
        common = {"OBSERVED_NOTES": str(self.notes), "OBSERVED_LIMIT_S": str(LIMIT_S)}
        pauses_s = pauses_s or {}
        own = {
            index: {**common, "OBSERVED_PAUSES_S": pauses_s.get(index, "0")} for index in range(len(machines))
        }
        with torchrun(machines, MODULE, [*command, "--resume", "auto", *more], self.folder, own, *options) as launch:
            yield launch

    def train_here(self, world_size: int) -> None:
        """Train on this machine to the end, without torchrun."""
        command = ["train", str(self.config), str(self.data), "--log-dir", str(self.log), "-j", "0"]
        assert run_distributed(_main, world_size, command, str(self.notes), group=False) == [0] * world_size

    def train(self, machines: list[Host]) -> None:
        """Train on machines to the end, or go on."""
        with self.started(machines) as launch:
            launch.wait_for_end(list(range(len(machines))), END_S)
            codes = [launcher.returncode for launcher in launch.launchers]
            assert codes == [0] * len(machines), "".join(map(launch.printed, range(len(machines))))

    def firsts(self) -> list[Path]:
        """Return the notes of rank 0 of each attempt until now."""
        return sorted(path for path in self.notes.iterdir() if path.name.endswith("-0"))

    def num_drawn(self) -> int:
        """Return for how many steps rank 0 of the latest attempt has drawn images."""
        return len(_lines(self.firsts()[-1])) if self.firsts() else 0

    def attempts(self) -> list[Batches]:
        """Return, for each time that the run was begun or went on, the images of all processes in each step."""
        files: dict[tuple[str, ...], list[Path]] = {}
        for path in sorted(self.notes.iterdir()):
            _, world_size, rank = path.name.split("-")
            files.setdefault((world_size, rank), []).append(path)
        batches: dict[str, Batches] = {}
        for (world_size, rank), paths in files.items():
            if rank == "0":
                for number, path in enumerate(paths):
                    ranks = [files[world_size, str(other)][number] for other in range(int(world_size))]
                    batches[path.name] = _whole([_lines(share) for share in ranks])
        return [batches[name] for name in sorted(batches)]


def _main(command: list[str], notes: str) -> int:
    os.environ["OBSERVED_NOTES"] = notes
    observe()
    return main(command)


def _lines(path: Path) -> Batches:
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _whole(shares: list[Batches]) -> Batches:
    """Return the images of each step in the order of the whole batch; a step that a rank has not begun is left out."""
    whole = []
    for parts in zip(*shares, strict=False):
        batch: list[Any] = [None] * sum(map(len, parts))
        for rank, part in enumerate(parts):
            batch[rank :: len(parts)] = part
        whole.append(batch)
    return whole


def assert_same_order(straight: Run, other: Run, num_attempts: int) -> None:
    """Raise unless each attempt of ``other`` took the images of ``straight`` from where it went on, to the end."""
    (expected,) = straight.attempts()
    assert len(expected) == NUM_STEPS
    attempts = other.attempts()
    assert len(attempts) == num_attempts
    done = 0
    for batches in attempts:
        start = expected.index(batches[0])
        assert start <= done
        assert batches == expected[start : start + len(batches)]
        done = start + len(batches)
    assert done == NUM_STEPS
    assert num_attempts == 1 or start > 0  # from a checkpoint, and not from the beginning


def assert_same_bits(straight: Run, other: Run) -> None:
    """Raise unless the last checkpoints are equal to the bit."""
    assert differences(read(straight.log / CHECKPOINT), read(other.log / CHECKPOINT)) == []


def distance(straight: Run, other: Run) -> float:
    """Return how far the weights of two runs are from each other, as a share of their norm."""
    first, second = (read(run.log / CHECKPOINT)["state_dict"] for run in (straight, other))
    assert first.keys() == second.keys()
    pairs = [(first[key].double(), second[key].double()) for key in first if first[key].is_floating_point()]
    square = sum(float((a - b).square().sum()) for a, b in pairs) / sum(float(a.square().sum()) for a, _ in pairs)
    return float(torch.tensor(square).sqrt())
