"""Throughput of zoo's training loader beside those of other packages, on the same files with the same work.

Each loader runs in a process of its own, with its workers. The loaders take turns: a turn is one epoch, from the first
request to the last batch, and all other processes are idle.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch

from zoo.benchmark.loader_pipelines import PIPELINES, SIDE, Epoch, Files, Pipeline, num_images_of
from zoo.benchmark.results import Case, Results, describe_error
from zoo.benchmark.timing import ratios
from zoo.data.folder import open_source
from zoo.data.location import DataPath
from zoo.data.pixels import jpeg_frame
from zoo.data.prepare.write_shards import write_shards
from zoo.data.source import Source
from zoo.errors import ConfigError, DataError, ZooError

BASELINE = "zoo"
WARMUP = 2  # epochs before the first turn
SHARDS_PER_WORKER = 4  # so that the workers of webdataset, which share out whole shards, have equal parts
METRICS = {"per core": "cpu_s", "wall clock": "wall_s"}  # to fields of `Turn`
NS = 1e-9


class Turn(NamedTuple):
    """Seconds per image of one epoch: wall clock, and CPU time of the process and its workers."""

    wall_s: float
    cpu_s: float


def measure_loaders(
    results: Results,
    data: DataPath,
    *,
    names: Sequence[str],
    workers: Sequence[int],
    num_images: int,
    batch_size: int,
    rounds: int,
) -> None:
    """Add the throughput of each loader for JPEG files of ``data``/train, and its ratio to zoo's.

    Args:
    - `names`: the loaders, keys of `PIPELINES`. One whose package is not installed becomes a note.
    - `workers`: numbers of worker processes, or threads for loaders that use threads.
    - `num_images`: number of files, evenly spaced, rounded down to whole batches for each worker.
    - `rounds`: epochs of each loader.

    The rate "per core" divides images by the CPU time of all processes and threads of a loader, so it hardly depends on
    other programs; "wall clock" is the rate that training sees. A ratio compares turns of the same round: 0.5 means
    half as many images as zoo. The summary has medians by number of workers, loader and metric, and the range of the
    ratios.

    Raises DataError if there are too few JPEG files, and ConfigError without Linux, whose /proc has the CPU times.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigError(f"CPU times of workers are read from /proc, which {sys.platform} does not have; use Linux")
    source = open_source(data / "train")
    with tempfile.TemporaryDirectory(prefix="zoo-loaders-") as folder:
        files = _copy(source, Path(folder), num_images, batch_size, max(workers))
        sizes = [path.stat().st_size for path in files.folder.rglob("*.jpg")]
        results.settings |= {"images": len(sizes), "mean bytes": round(mean(sizes)), "batch": batch_size}
        results.summary["loaders"] = {}
        for count in workers:
            turns = _take_turns(
                results, [BASELINE, *(name for name in names if name != BASELINE)], files, count, rounds
            )
            _report(results, turns, files, count)


def _copy(source: Source, root: Path, num_images: int, batch_size: int, workers: int) -> Files:
    """Write evenly spaced JPEG files of ``source`` into class folders and shards; DataError if there are too few."""
    unit = batch_size * workers
    available = len(source.names)
    num_images = min(num_images, available) // unit * unit
    if num_images == 0:
        what = f"{available} images are fewer than a batch of {batch_size} for each of {workers} workers"
        raise DataError(what, source.root, "give more images, or smaller --batch and --workers")
    for number in range(num_images):
        index = number * available // num_images
        encoded = source.read(index)
        if jpeg_frame(encoded) is None:
            what = "the image is not an 8-bit gray or RGB JPEG file, which all loaders read"
            raise DataError(what, Path(source.root) / os.fsdecode(source.names[index]), "leave it out")
        path = root / "files" / "train" / f"{source.targets[index]:05}" / f"{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded)
    files = Files(root / "files", root / "shards", num_images, batch_size)
    per_shard = num_images // (SHARDS_PER_WORKER * workers)
    write_shards(
        open_source(files.folder / "train"),
        files.shards / "train",
        per_shard=max(1, per_shard),
        seed=0,
        show_progress=lambda split, total: nullcontext(_NoBar()),
    )
    return files


class _NoBar:
    def advance(self, count: int) -> None:
        pass


def _take_turns(
    results: Results, names: Sequence[str], files: Files, workers: int, rounds: int
) -> dict[str, list[Turn]]:
    """Return the turns of each loader that can be run; the others become notes."""
    servers: dict[str, _Server] = {}
    try:
        for name in names:
            if _is_installed(PIPELINES[name].package):
                servers[name] = _Server(name, files, workers)
            else:
                results.note(f"not measured: {name}: pip install {PIPELINES[name].install}")
        turns: dict[str, list[Turn]] = {}
        for name, server in servers.items():
            try:
                results.settings |= server.receive()
                turns[name] = []
            except _Unavailable as error:
                results.note(f"not measured: {name}: {error}")
        if BASELINE not in turns:
            raise DataError("zoo's own loader failed, see the notes of the results", files.folder, "report a bug")
        order = list(turns)
        for number in range(rounds):
            start = number % len(order)
            for name in order[start:] + order[:start]:
                turns[name].append(servers[name].take_turn())
    finally:
        for server in servers.values():
            server.end()
        for server in servers.values():
            server.join()
    return turns


def _report(results: Results, turns: dict[str, list[Turn]], files: Files, workers: int) -> None:
    """Add the records of one number of workers, and the ratios to the summary."""
    summary: dict[str, Any] = {}
    results.summary["loaders"][str(workers)] = summary
    for name, own in turns.items():
        pipeline = PIPELINES[name]
        case = Case(f"{workers} workers", (files.batch_size, 3, SIDE, SIDE), pipeline.dtype, pipeline.layout)
        summary[name] = {}
        for metric, field in METRICS.items():
            seconds, of_zoo = ([getattr(turn, field) for turn in each] for each in (own, turns[BASELINE]))
            relative = ratios(of_zoo, seconds)
            results.add(case, name, metric, "images/s", [1 / each for each in seconds])
            results.add(case, name, f"{metric} / {BASELINE}", "1", relative)
            rate = median(1 / each for each in seconds)
            summary[name][metric] = {
                "images_per_s": rate,
                "ratio": median(relative),
                "range": [min(relative), max(relative)],
            }


class _Unavailable(ZooError):
    """A loader cannot be run; the message says why."""


class _Server:
    """A process with one loader, which runs an epoch on request; `_Unavailable` if it fails."""

    def __init__(self, name: str, files: Files, workers: int) -> None:
        self._name = name
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, name, files, workers))
        self._process.start()
        other.close()

    def take_turn(self) -> Any:
        """Return the `Turn` of one epoch."""
        self._connection.send(True)
        return self.receive()

    def end(self) -> None:
        """Let the process end, with its workers, when it has finished its epoch."""
        self._connection.close()

    def join(self) -> None:
        """Wait until the process has ended."""
        self._process.join()

    def receive(self) -> Any:
        """Return what the process answers: first, after the warmup, the version of the package by its name."""
        try:
            answer = self._connection.recv()
        except EOFError:
            raise _Unavailable(f"the process of {self._name} ended without an answer") from None
        if isinstance(answer, str):
            raise _Unavailable(answer)
        return answer


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:  # the parent package is missing
        return False


def _serve(connection: Connection, name: str, files: Files, workers: int) -> None:
    """Set up a loader, and answer each request with a `Turn`, or the text of an error, until the pipe is closed."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # OpenMP may have pinned the parent to a core
    torch.set_num_threads(1)
    with suppress(EOFError, BrokenPipeError):
        try:
            pipeline = PIPELINES[name]
            start = pipeline.build(files, workers)
            for _ in range(WARMUP):
                _run_epoch(start, pipeline, files)
            connection.send({pipeline.package: getattr(sys.modules[pipeline.package], "__version__", "unknown")})
            while connection.recv():
                connection.send(_run_epoch(start, pipeline, files))
        except EOFError:
            raise
        except Exception as error:  # other packages may raise anything
            connection.send(describe_error(error))


def _run_epoch(start: Epoch, pipeline: Pipeline, files: Files) -> Turn:
    wall_s, cpu_s = time.perf_counter(), _cpu_s()
    found = sum(num_images_of(batch, pipeline) for batch in start())
    wall_s, cpu_s = time.perf_counter() - wall_s, _cpu_s() - cpu_s
    if found != files.num_images:
        raise ValueError(f"an epoch has {found} images, not {files.num_images}")
    return Turn(wall_s / found, cpu_s / found)


def _cpu_s() -> float:
    """Return the CPU time of this process and its workers, with all their threads, in seconds."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for child in multiprocessing.active_children():
        for thread in Path(f"/proc/{child.pid}/task").iterdir():
            total += int((thread / "schedstat").read_text().split()[0]) * NS
    return total
