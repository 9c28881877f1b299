"""Training loaders of zoo and of other packages for the same work, each set up as its documentation recommends.

The work: read JPEG files in random order, crop 0.08 to 1 of the area at an aspect ratio of 3/4 to 4/3, resize the crop
to 224 x 224 px bilinearly with antialiasing, flip it with probability 1/2, and collate batches. All of them give uint8
images, which are normalized on the device, except torchvision's reference pipeline, which normalizes in its workers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image, read_file
from torchvision.transforms import v2

from zoo.config import Input, parse_experiment
from zoo.data.folder import open_source
from zoo.data.loader import LoaderOptions, build_train_loader
from zoo.data.shards import shard_files
from zoo.data.transforms import AREAS, CROP_TRIES, RATIOS, random_box

SIDE = 224
DALI_PREFETCH = 2  # batches, its default


@dataclass(frozen=True)
class Files:
    """The same images as files and as shards.

    Args:
    - `folder`: folder with train/, which has a folder per class.
    - `shards`: folder with train/, which has tar files in webdataset's format.
    - `num_images`: their number.
    - `batch_size`: images per batch.
    """

    folder: Path
    shards: Path
    num_images: int
    batch_size: int


Epoch = Callable[[], Iterable[Any]]  # starts an epoch of batches, whose images are their first items


class Pipeline(NamedTuple):
    """A loader: the package that it needs, the form of its batches, and a function that sets it up.

    Args:
    - `package`: module to import.
    - `install`: argument of ``pip install``.
    - `dtype`, `layout`: of the images.
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
        scale=AREAS, ratio=RATIOS, hflip=0.5, interpolation="bilinear", num_workers=workers,
        device=torch.device("cpu"),
    )  # fmt: skip
    return lambda: prefetcher.loader


def _torchvision(files: Files, workers: int) -> Epoch:
    """The classification reference of torchvision: its preset with PIL, and its loader."""
    settings = Input()
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(SIDE, scale=AREAS, ratio=RATIOS, antialias=True),
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
        [v2.RandomResizedCrop(SIDE, scale=AREAS, ratio=RATIOS, antialias=True), v2.RandomHorizontalFlip()]
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
            v2.RandomResizedCrop(SIDE, scale=AREAS, ratio=RATIOS, antialias=True),
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
            encoded, device="cpu", output_type=types.RGB, random_area=list(AREAS), random_aspect_ratio=list(RATIOS),
            num_attempts=CROP_TRIES,
        )  # fmt: skip
        resized = fn.resize(crops, size=[SIDE, SIDE], interp_type=types.INTERP_TRIANGULAR)
        return fn.flip(resized, horizontal=fn.random.coin_flip()), targets

    pipeline = define()
    pipeline.build()
    num_batches = math.ceil(files.num_images / files.batch_size)

    def epoch() -> Iterator[Any]:
        # Scheduled by hand, because DALI would go on to prefetch the next epoch.
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
    """Return the number of images of a batch; ValueError unless they have the form that ``pipeline`` promises."""
    images = batch[0]
    shape = tuple(images.shape() if callable(images.shape) else images.shape)
    expected = (SIDE, SIDE, 3) if pipeline.layout == "channels_last" else (3, SIDE, SIDE)
    dtype = str(images.dtype).rpartition(".")[2].lower()
    if shape[1:] != expected or dtype != pipeline.dtype:
        raise ValueError(f"a batch has images of {dtype} and shape {shape[1:]}, not {pipeline.dtype} and {expected}")
    return int(shape[0])
