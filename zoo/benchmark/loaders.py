"""Throughput of zoo's training loader and of other packages' loaders, on the same files with the same work.

The work: read JPEG files in random order, crop 0.08 to 1 of the area at an aspect ratio of 3/4 to 4/3, resize the crop
to 224 x 224 px bilinearly with antialiasing, flip it with probability 1/2, and collate batches. All loaders give uint8
images, which are normalized on the device, except torchvision's reference pipeline, which normalizes in its workers.
Each is set up as its documentation recommends.

Each loader runs in a separate process, with its workers. The loaders take turns: a turn is one epoch, from the first
request to the last batch, and all other processes are idle.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image, read_file
from torchvision.transforms import v2

from zoo.benchmark.results import Case, Results, describe_error
from zoo.config.experiment import Input
from zoo.config.parse import parse_experiment
from zoo.data.dataset import Source, open_source
from zoo.data.loader import LoaderOptions, build_train_loader
from zoo.data.prepare.write_shards import write_shards
from zoo.data.sources.folder import FolderSource
from zoo.data.sources.location import DataPath
from zoo.data.sources.shards import shard_files
from zoo.data.transforms.classification import AREAS, ASPECT_RATIOS, CROP_TRIES, random_box
from zoo.data.transforms.pixels import TensorPixels, open_pixels
from zoo.errors import ConfigError, DataError, ZooError
from zoo.memory.timing import ratios

BASELINE = "zoo"
WARMUP = 2  # epochs before the first turn
SHARDS_PER_WORKER = 4  # webdataset distributes whole shards among its workers: all get equal parts
METRICS = {"per core": "cpu_s", "wall clock": "wall_s"}  # metric -> field of `Turn`
NS = 1e-9


SIDE = 224
DALI_PREFETCH = 2  # batches; DALI's default


@dataclass(frozen=True)
class Files:
    """The same images as files and as shards.

    Args:
    - `folder`: folder with train/, which has a folder per class.
    - `shards`: folder with train/, which has tar files in webdataset's format.
    - `num_images`: number of images.
    - `batch_size`: images per batch.
    """

    folder: Path
    shards: Path
    num_images: int
    batch_size: int


Epoch = Callable[[], Iterable[Any]]  # starts an epoch of batches; the first item of a batch is its images


class Pipeline(NamedTuple):
    """A loader: the package that it needs, the form of its batches, and a function that sets it up.

    Args:
    - `package`: module to import.
    - `install`: argument of ``pip install``.
    - `dtype`, `layout`: dtype and layout of the images.
    - `build`: (files, workers) -> function that starts an epoch.
    """

    package: str
    install: str
    dtype: str
    layout: str
    build: Callable[[Files, int], Epoch]


def _zoo(files: Files, workers: int, sharded: bool = False) -> Epoch:
    root = files.shards if sharded else files.folder
    content = {
        "network": {"classes": len(open_source(root / "train").classes)},
        "optimizer": {"batch_size": files.batch_size},
    }
    loader = build_train_loader(root, parse_experiment(content, "the benchmark"), LoaderOptions(workers=workers))

    def start() -> Iterable[Any]:
        loader.batch_sampler.set_epoch(loader.batch_sampler.epoch + 1)
        return loader

    return start


def _timm(files: Files, workers: int) -> Epoch:
    """timm's loader for training, before its prefetcher moves batches to the device and normalizes them."""
    from timm.data import ImageDataset, create_loader

    prefetcher = create_loader(
        ImageDataset(str(files.folder / "train")), SIDE, files.batch_size, is_training=True, color_jitter=0.0,
        scale=AREAS, ratio=ASPECT_RATIOS, hflip=0.5, interpolation="bilinear", num_workers=workers,
        device=torch.device("cpu"),
    )  # fmt: skip
    return lambda: prefetcher.loader


def _torchvision(files: Files, workers: int) -> Epoch:
    """The classification reference of torchvision: its preset with PIL, and its loader."""
    settings = Input()
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(SIDE, scale=AREAS, ratio=ASPECT_RATIOS, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float, scale=True),
            v2.Normalize(settings.mean, settings.std),
        ]
    )
    return _torch_loader(ImageFolder(files.folder / "train", transform), files, workers)


def _torchvision_tensors(files: Files, workers: int) -> Epoch:
    """torchvision's fastest path on a CPU: decoded to tensors, and transformed in 8 bits."""
    transform = v2.Compose(
        [v2.RandomResizedCrop(SIDE, scale=AREAS, ratio=ASPECT_RATIOS, antialias=True), v2.RandomHorizontalFlip()]
    )
    return _torch_loader(ImageFolder(files.folder / "train", transform, loader=_decode), files, workers)


def _decode(path: str) -> Tensor:
    return decode_image(read_file(path), ImageReadMode.RGB)


def _torch_loader(dataset: ImageFolder, files: Files, workers: int) -> Epoch:
    loader = DataLoader(
        dataset, files.batch_size, sampler=RandomSampler(dataset), num_workers=workers, persistent_workers=True
    )
    return lambda: loader


def _webdataset(files: Files, workers: int) -> Epoch:
    """webdataset's shards, decoded by PIL as its examples do; each worker reads its own shards."""
    import webdataset

    transform = v2.Compose(
        [
            v2.RandomResizedCrop(SIDE, scale=AREAS, ratio=ASPECT_RATIOS, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
        ]
    )
    urls = [str(path) for path in shard_files(files.shards / "train")]
    dataset = (
        webdataset.WebDataset(urls, shardshuffle=len(urls), empty_check=False)
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(transform)
        .batched(files.batch_size)
    )
    loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=True)
    return lambda: loader


def _dali(files: Files, workers: int) -> Epoch:
    """DALI without a GPU: it decodes only the crop, with simple upsampling of the colors."""
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=files.batch_size, num_threads=workers, device_id=None, prefetch_queue_depth=DALI_PREFETCH)
    def define() -> Any:
        encoded, targets = fn.readers.file(file_root=str(files.folder / "train"), random_shuffle=True)
        crops = fn.decoders.image_random_crop(
            encoded, device="cpu", output_type=types.RGB, random_area=list(AREAS),
            random_aspect_ratio=list(ASPECT_RATIOS), num_attempts=CROP_TRIES,
        )  # fmt: skip
        resized = fn.resize(crops, size=[SIDE, SIDE], interp_type=types.INTERP_TRIANGULAR)
        return fn.flip(resized, horizontal=fn.random.coin_flip()), targets

    pipeline = define()
    pipeline.build()
    num_batches = math.ceil(files.num_images / files.batch_size)

    def epoch() -> Iterator[Any]:
        # Schedules batches explicitly, because DALI would go on to prefetch the next epoch.
        for _ in range(min(DALI_PREFETCH, num_batches)):
            pipeline.schedule_run()
        for number in range(num_batches):
            images, targets = pipeline.share_outputs()
            yield images.as_tensor(), targets
            pipeline.release_outputs()
            if number + DALI_PREFETCH < num_batches:
                pipeline.schedule_run()

    return epoch


def _spdl(files: Files, workers: int) -> Epoch:
    """SPDL's threads with its own decoder, FFmpeg, which crops, resizes and flips."""
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    folder = ImageFolder(files.folder / "train")

    def load(sample: tuple[str, int]) -> tuple[Any, int]:
        packets = spdl.io.demux_image(sample[0])
        box = random_box(packets.height, packets.width, random.Random(random.getrandbits(64)))
        filters = [
            f"crop={box.width}:{box.height}:{box.left}:{box.top}:exact=1",
            f"scale={SIDE}:{SIDE}:flags=bilinear",
            *(["hflip"] if random.random() < 0.5 else []),
            "format=rgb24",
        ]
        return spdl.io.decode_packets(packets, filter_desc=",".join(filters)), sample[1]

    def collate(samples: list[tuple[Any, int]]) -> tuple[Any, Tensor]:
        images = spdl.io.to_torch(spdl.io.convert_frames([frames for frames, _ in samples]))
        return images, torch.tensor([target for _, target in samples])

    def epoch() -> Iterator[Any]:
        pipeline = (
            PipelineBuilder()
            .add_source(random.sample(folder.samples, len(folder.samples)))
            .pipe(load, concurrency=workers)
            .aggregate(files.batch_size)
            .pipe(collate)
            .add_sink()
            .build(num_threads=workers)
        )
        with pipeline.auto_stop():
            yield from pipeline

    return epoch


PIPELINES: Mapping[str, Pipeline] = {
    "zoo": Pipeline("zoo", "zoo", "uint8", "contiguous", _zoo),
    "zoo-shards": Pipeline("zoo", "zoo", "uint8", "contiguous", partial(_zoo, sharded=True)),
    "timm": Pipeline("timm", "timm", "uint8", "contiguous", _timm),
    "torchvision": Pipeline("torchvision", "torchvision", "float32", "contiguous", _torchvision),
    "torchvision-tensors": Pipeline("torchvision", "torchvision", "uint8", "contiguous", _torchvision_tensors),
    "dali": Pipeline("nvidia.dali", "nvidia-dali-cuda130", "uint8", "channels_last", _dali),
    "spdl": Pipeline("spdl.io", "spdl spdl-io", "uint8", "channels_last", _spdl),
    "webdataset": Pipeline("webdataset", "webdataset", "uint8", "contiguous", _webdataset),
}


def num_images_of(batch: Any, pipeline: Pipeline) -> int:
    """Return the number of images of a batch. Raises ValueError unless dtype and layout are those of ``pipeline``."""
    images = batch[0]
    shape = tuple(images.shape() if callable(images.shape) else images.shape)
    expected = (SIDE, SIDE, 3) if pipeline.layout == "channels_last" else (3, SIDE, SIDE)
    dtype = str(images.dtype).rpartition(".")[2].lower()
    if shape[1:] != expected or dtype != pipeline.dtype:
        raise ValueError(f"a batch has images of {dtype} and shape {shape[1:]}, not {pipeline.dtype} and {expected}")
    return int(shape[0])


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
    """Measure the throughput of each loader for JPEG files of ``data``/train, and its ratio to zoo's.

    Args:
    - `names`: the loaders, keys of `PIPELINES`. Missing packages are noted.
    - `workers`: numbers of worker processes, or threads for loaders that use threads.
    - `num_images`: number of files, evenly spaced, rounded down to whole batches for each worker.
    - `rounds`: epochs of each loader.

    The rate "per core" divides images by the CPU time of all processes and threads of a loader, so it hardly depends on
    other programs; "wall clock" is the rate that training sees. A ratio compares turns of the same round: 0.5 means
    half as many images as zoo. The summary has medians by number of workers, loader and metric, and the range of the
    ratios.

    Raises DataError if there are too few JPEG files, and ConfigError if the system is not Linux: CPU times come from
    /proc.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigError(f"CPU times of workers are read from /proc, which {sys.platform} does not have; use Linux")
    os.environ.pop("GOMP_CPU_AFFINITY", None)  # workers would inherit it and share one core
    results.settings |= {"clock": "CPU time of all processes of a loader, and wall clock"}
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
    """Copy evenly spaced JPEG files of ``source`` into class folders and shards. DataError if there are too few."""
    unit = batch_size * workers
    available = len(source.names)
    num_images = min(num_images, available) // unit * unit
    if num_images == 0:
        what = f"{available} images are fewer than a batch of {batch_size} for each of {workers} workers"
        raise DataError(what, source.root, "give more images, or smaller --batch and --workers")
    for number in range(num_images):
        index = number * available // num_images
        encoded = source.read(index)
        name = os.path.join(source.root, os.fsdecode(source.names[index]))
        if not isinstance(open_pixels(encoded, name), TensorPixels):
            raise DataError(
                "the image is not an 8-bit gray or RGB JPEG file, which all loaders read", name, "leave it out"
            )
        path = root / "files" / "train" / f"{source.targets[index]:05}" / f"{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded)
    files = Files(root / "files", root / "shards", num_images, batch_size)
    per_shard = num_images // (SHARDS_PER_WORKER * workers)
    write_shards(
        FolderSource(files.folder / "train"),
        files.shards / "train",
        per_shard=max(1, per_shard),
        seed=0,
    )
    return files


def _take_turns(
    results: Results, names: Sequence[str], files: Files, workers: int, rounds: int
) -> dict[str, list[Turn]]:
    """Run the loaders in turn; return the turns of each loader. Loaders that cannot run are noted."""
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
    """Add the records for one number of workers, and add the ratios to the summary."""
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
    """A process with one loader that runs an epoch on request. Raises `_Unavailable` if it fails."""

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
        """Tell the process to exit, with its workers, after its epoch."""
        self._connection.close()

    def join(self) -> None:
        """Wait until the process has ended."""
        self._process.join()

    def receive(self) -> Any:
        """Receive an answer of the process. The first one, after the warmup, is {package: version}."""
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
