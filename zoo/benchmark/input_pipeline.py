"""Throughput per core of the input pipeline and its stages, relative to torchvision's JPEG decoder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch

from zoo.benchmark.results import Case, Results
from zoo.benchmark.timing import Step, ratios, time_interleaved
from zoo.config import Decoder, Experiment
from zoo.data.augmentation import draw_colors, finish
from zoo.data.folder import Batch, ImageFolder, collate
from zoo.data.location import DataPath
from zoo.data.pixels import ByteTensorPixels, PILPixels, Pixels, decode_jpeg, jpeg_frame, open_pixels
from zoo.data.sampler import Key
from zoo.data.seeding import random_of
from zoo.data.transforms import TrainTransform, Transform, ValTransform
from zoo.errors import DataError
from zoo.files import write_bytes
from zoo.run.plot_style import BLACK, COLORS, LABEL_SIZE, new_figure, png_of, style_axes
from zoo.tasks.protocols import PROTOCOLS

BARE_DECODER = "bare decode_jpeg"
WHOLE_PIPELINE = "read to collate"
FINISHED_PIPELINE = "read to finish"
SPLITS = ("train", "val")
BATCH = 16  # images per collated batch


class Setting(NamedTuple):
    """A configuration of the pipeline: key in the results, split, decoder and transform."""

    key: str
    split: str
    decoder: Decoder
    transform: Transform


def measure_input_pipeline(
    results: Results, config: Experiment, data: DataPath, *, num_images: int, rounds: int
) -> None:
    """Add the throughput of each stage for JPEG files of ``data``/train and ``data``/val, and a summary.

    The whole pipeline is the work of a loader process: read, decode, crop and resize, collate. The remaining work on
    the network's device, `finish`, is measured separately, and once together with the pipeline on one core.

    Args:
    - `config`: its ``input`` section defines the training pipeline. Validation uses the published protocols, center
      crop and ten crops of 224 px.
    - `num_images`: number of files read per split, evenly spaced.
    - `rounds`: interleaved timings of each stage.

    The summary contains ``images_per_s`` by setting and stage, on one core, and ``ratios`` of each setting's whole
    pipeline to the bare decoder on the same files in the same round; keys with "_finished" include `finish`.
    Raises DataError if a split has no JPEG file.
    """
    summary = results.summary
    summary |= {"images_per_s": {}, "ratios": {}}
    for split in SPLITS:
        settings = [setting for setting in settings_of(config) if setting.split == split]
        _measure_split(results, settings, data / split, num_images, rounds)


def settings_of(config: Experiment) -> list[Setting]:
    """Return the measured settings: the training pipeline of ``config`` and the published crops, with each decoder."""
    train = TrainTransform(config.input)
    crops = {
        key: ValTransform(*PROTOCOLS[f"{key}224"][:2], config.input.mean, config.input.std, key == "tencrop")
        for key in ("center", "tencrop")
    }
    return [
        Setting("train", "train", "torchvision", train),
        Setting("train_pil", "train", "pil", train),
        *(Setting(key, "val", "torchvision", crop) for key, crop in crops.items()),
        *(Setting(f"{key}_pil", "val", "pil", crop) for key, crop in crops.items()),
    ]


def draw_plot(path: Path, summary: Mapping[str, Any]) -> None:
    """Write a bar plot of a summary to ``path``, with a line for the bare decoder."""
    ratios_of = {key: value for key, value in summary["ratios"].items() if not key.endswith("_finished")}
    figure = new_figure(7, 3.5, "Images per second and core, relative to torchvision's bare JPEG decoder")
    axes = figure.subplots()
    names = list(ratios_of)[::-1]
    colors = [COLORS[SPLITS.index("train" if name.startswith("train") else "val")] for name in names]
    bars = axes.barh(names, [ratios_of[name] for name in names], color=colors)
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=LABEL_SIZE)
    axes.axvline(1, color=BLACK, linestyle="--")
    style_axes(axes, f"{WHOLE_PIPELINE} / {BARE_DECODER}", "")
    write_bytes(path, png_of(figure))


def _measure_split(results: Results, settings: Sequence[Setting], root: DataPath, num_images: int, rounds: int) -> None:
    """Measure the ``settings`` of one split."""
    summary = results.summary
    datasets = {setting.key: _open(setting, root) for setting in settings}
    indices = _jpeg_indices(next(iter(datasets.values())), num_images)
    steps: dict[tuple[str, str], Step] = {}
    encoded = [datasets[settings[0].key].source.read(index) for index in indices]
    results.settings[f"images of {root.name}/"] = len(indices)
    results.settings[f"mean bytes, {root.name}/"] = round(mean(map(len, encoded)))
    tensors = [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in encoded]
    steps[root.name, BARE_DECODER] = _each(decode_jpeg, tensors)
    for setting in settings:
        stages = _stages(setting, datasets[setting.key], indices, encoded, results.device)
        steps |= {(setting.key, stage): step for stage, step in stages.items()}
    named = {f"{key}: {stage}": step for (key, stage), step in steps.items()}
    # Process time, not thread time: a decoder may use its own thread.
    seconds = time_interleaved(named, time.process_time, rounds=rounds, min_sample_s=0)
    bare = seconds[f"{root.name}: {BARE_DECODER}"]
    for key, stage in steps:
        taken = seconds[f"{key}: {stage}"]
        rates = [len(indices) / each for each in taken]
        decoder = next((setting.decoder for setting in settings if setting.key == key), "torchvision")
        case = Case(key, (len(indices),), "uint8", root.name)
        results.add(case, decoder, stage, "images/s", rates)
        summary["images_per_s"].setdefault(key, {})[stage] = median(rates)
        for whole, name in ((WHOLE_PIPELINE, key), (FINISHED_PIPELINE, f"{key}_finished")):
            if stage == whole:
                values = ratios(bare, taken)
                results.add(case, decoder, f"{whole} / {BARE_DECODER}", "1", values)
                summary["ratios"][name] = median(values)


def _open(setting: Setting, root: DataPath) -> ImageFolder:
    return ImageFolder(root, setting.transform, decoder=setting.decoder, allow_empty_classes=True)


def _jpeg_indices(images: ImageFolder, num_images: int) -> list[int]:
    """Return the evenly spaced indices of at most ``num_images`` JPEG files that `decode_jpeg` can read."""
    chosen = [index * len(images) // min(num_images, len(images)) for index in range(min(num_images, len(images)))]
    found = [index for index in chosen if jpeg_frame(images.source.read(index)) is not None]
    if not found:
        raise DataError(
            f"none of {len(chosen)} images is an 8-bit gray or RGB JPEG file",
            images.root,
            "give a folder with JPEG files, because the pipeline is compared with a JPEG decoder",
        )
    return found


def _stages(
    setting: Setting, images: ImageFolder, indices: Sequence[int], encoded: Sequence[bytes], device: torch.device
) -> dict[str, Step]:
    """Return the stages of a setting and the whole pipeline."""
    keys = [[(0, index) for index in indices[start : start + BATCH]] for start in range(0, len(indices), BATCH)]

    def whole(some: Sequence[Key]) -> Batch:
        batch = collate(images.__getitems__(some), ())
        if isinstance(batch, DataError):
            raise batch
        return batch

    samples = [images.__getitems__(some) for some in keys]
    batches = [whole(some) for some in keys]
    opened = partial(open_pixels, name="", decoder=setting.decoder)
    generator = random_of(0)
    decoded = [_decoded(opened(each)) for each in encoded]
    stages = {
        WHOLE_PIPELINE: _each(whole, keys),
        FINISHED_PIPELINE: _each(lambda some: whole(some).on(device), keys),
        "read": _each(images.source.read, indices),
        "decode": _each(lambda each: _decoded(opened(each)), encoded),
        "crop and resize": _each(lambda image: setting.transform.draw(image, generator), decoded),
        "collate": _each(lambda some: collate(some, ()), samples),
        "to shared memory": _each(lambda batch: batch.images.clone().share_memory_(), batches),
    }
    if device.type != "cpu":
        pinned = [batch.images.pin_memory() for batch in batches]
        stages["transfer"] = _each(lambda images: images.to(device), pinned)
    normalization = batches[0].normalization
    if normalization is not None:
        on_device = [batch.images.to(device) for batch in batches]
        stages["normalize"] = _each(partial(finish, colors=None, normalization=normalization), on_device)
        for jitter, lighting, name in ((True, False, "jitter"), (False, True, "lighting"), (True, True, "both")):
            if isinstance(setting.transform, TrainTransform):
                change = torch.tensor([draw_colors(jitter, lighting, generator) for _ in range(BATCH)], device=device)
                changed = [(each, change[: len(each)]) for each in on_device]
                stages[f"normalize with {name}"] = _each(lambda pair: finish(pair[0], pair[1], normalization), changed)
    return stages


def _decoded(image: Pixels) -> Pixels:
    """Return ``image`` decoded to memory."""
    return image if isinstance(image, PILPixels) else ByteTensorPixels(image.tensor())


def _each(run: Callable[[Any], object], work: Sequence[Any]) -> Step:
    """Return a step that calls ``run`` on every item of ``work``."""

    def repeatedly(times: int) -> None:
        for _ in range(times):
            for one in work:
                run(one)

    return Step(repeatedly)
