"""Segmentation of images into files: `segment`."""

from __future__ import annotations

import io
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image, ImageFile
from torch import Tensor, nn
from torchvision.transforms import functional as tvF

from zoo.config import Experiment
from zoo.data.reading import naming, read_as, read_bytes, read_image, read_text
from zoo.data.scan import find_images
from zoo.data.segmentation_transforms import scale_to_longest_side
from zoo.engine.consistency import SHOWN_DIGITS, check_same_on_all_ranks, environment_fingerprint, weights_digest
from zoo.engine.precision import AMP_DTYPES, autocast
from zoo.engine.process import Process, open_process
from zoo.engine.reporting import peak_memory_bytes
from zoo.engine.validation import is_memory_full
from zoo.errors import ConfigError, DataError, listed, printable
from zoo.files import write_json
from zoo.limits import MAX_SIDE
from zoo.models.deeplab import DeepLab
from zoo.run.console import Progress
from zoo.run.label_images import (
    Palette,
    check_kind,
    palette_of,
    write_ids,
    write_overlay,
    write_palette,
    write_probabilities,
)
from zoo.run.scoring import LoadedNetwork, load_network
from zoo.tasks.views import Fusion, ImageViews, Segments
from zoo.tasks.views import segment as segment_views

logger = logging.getLogger(__name__)

SUFFIXES = {"palette": ".png", "ids": ".png", "prob": ".npz", "overlay": ".png"}
SETTINGS_FILE = "segment.json"


class Output(Protocol):
    """The files that are made of an image."""

    at_image_size: bool
    """Whether classes are those of the image's own pixels, or of those that the network saw."""

    def paths(self, name: str) -> list[Path]:
        """Return the files of the image ``name``: its path below the folder of the images, without the extension."""

    def possible_paths(self, name: str) -> list[Path]:
        """Return these files and those that other options would make of the image."""

    def is_complete(self, name: str, size: tuple[int, int]) -> bool:
        """Return whether these files can all be read, and are those of an image of ``size`` (width, height)."""

    def write(self, name: str, image: Image.Image, segments: Segments) -> None:
        """Write these files, each of them whole or not at all."""


@dataclass(frozen=True)
class Folders:
    """A folder OUT/KIND for each kind of file, with the sub-folders of the images.

    Args:
    - `out`: the folder OUT.
    - `kinds`: some of `SUFFIXES`: "palette", "ids", "prob" and "overlay".
    - `palette`: colours and names of the classes.

    Raises ConfigError where a kind cannot hold so many classes.
    """

    out: Path
    kinds: Sequence[str]
    palette: Palette
    at_image_size = True

    def __post_init__(self) -> None:
        for kind in self.kinds:
            check_kind(kind, len(self.palette))

    def paths(self, name: str) -> list[Path]:
        """Return OUT/KIND/NAME with the extension of each kind."""
        return [self._path(kind, name) for kind in self.kinds]

    def possible_paths(self, name: str) -> list[Path]:
        """Return the same for all kinds."""
        return [self._path(kind, name) for kind in SUFFIXES]

    def is_complete(self, name: str, size: tuple[int, int]) -> bool:
        """Return whether all files can be read and have the size of the image; an overlay is larger by its legend."""
        for kind, path in zip(self.kinds, self.paths(name), strict=True):
            width, height = written_size(path) or (0, 0)
            is_overlay = kind == "overlay" and width >= size[0] and height > size[1]
            if not is_overlay and (width, height) != size:
                return False
        return True

    def _path(self, kind: str, name: str) -> Path:
        return self.out / kind / f"{name}{SUFFIXES[kind]}"

    def write(self, name: str, image: Image.Image, segments: Segments) -> None:
        """Write the files."""
        classes = segments.classes.numpy()
        writers: dict[str, Callable[[Path], None]] = {
            "palette": lambda path: write_palette(path, classes, self.palette),
            "ids": lambda path: write_ids(path, classes, len(self.palette)),
            "prob": lambda path: write_probabilities(path, classes, segments.probabilities.numpy(), len(self.palette)),
            "overlay": lambda path: write_overlay(path, image, classes, self.palette),
        }
        for kind, path in zip(self.kinds, self.paths(name), strict=True):
            writers[kind](path)


@dataclass(frozen=True)
class Summary:
    """What `segment_images` did, over all processes.

    Args:
    - `written`: number of images whose files were written.
    - `skipped`: number of images whose files were there before.
    - `faults`: a line for each image without files: what is wrong, and its name.
    - `elapsed_s`: seconds from the first image to the last.
    - `peak_memory_bytes`: the peak of the process that needed most: CUDA: of the tensors; CPU: of the whole process.
    """

    written: int
    skipped: int
    faults: tuple[str, ...]
    elapsed_s: float
    peak_memory_bytes: int


def segment(
    network: LoadedNetwork | str | os.PathLike[str],
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    weights: str | os.PathLike[str] | None = None,
    output: Sequence[str] = ("palette",),
    scales: Sequence[float] = (1.0,),
    flip: bool = False,
    fusion: Fusion = "mean",
    tile: int | None = None,
    longest_side: int | None = None,
    overwrite: bool = False,
    process: Process | None = None,
) -> Summary:
    """Write the class of each pixel of images to ``out``/KIND/NAME, and return a summary.

    Logits are resized to the size of the image before the argmax. An image is skipped if its files exist, can be read
    and have its size. Unreadable images are logged and listed in the summary, and the others continue. Under torchrun
    each process calls this function, takes its share of the images, and gets the summary of all.

    Args:
    - `network`: what `zoo.load_network` returned, or its ``name`` argument.
    - `source`: image, or folder, which is searched recursively.
    - `out`: folder for the files, outside of ``source``.
    - `weights`: weights file or published name; default those of ``network``.
    - `output`: kinds of files: "palette" (indexed PNG of the classes, with colors), "ids" (gray PNG of the classes, 16
      bits for more than 256), "prob" (npz with the class and probability of each pixel), "overlay" (colors over the
      image, with a legend).
    - `scales`: factors by which the sides of the image are scaled.
    - `flip`: whether the mirror image is added at each scale.
    - `fusion`: how predictions of the views are combined: "mean" or "max" of the probabilities, or "voting".
    - `tile`: side in px of windows that larger images are computed in, a multiple of 32.
    - `longest_side`: longer side in px that images are scaled to; default the experiment's
      ``segmentation.longest_side_val``.
    - `overwrite`: whether all images are segmented again and their files replaced.
    - `process`: this process, if `zoo.engine.process.open_process` is open already.

    Raises ConfigError for impossible options and for a network that does not segment; DataError if there are no images
    or their files cannot be told apart; WeightsError for weights that do not fit.
    """
    views = ImageViews(tuple(scales), flip, fusion, tile)
    if longest_side is not None and not 0 < longest_side <= MAX_SIDE:
        raise ConfigError(f"longest_side = {longest_side}: give a number from 1 to {MAX_SIDE}")
    with open_process() if process is None else nullcontext(process) as process:
        if not isinstance(network, LoadedNetwork):
            network = load_network(network, weights)
        check_segments(network)  # before the files are checked against its number of classes
        section = network.experiment.segmentation
        assert section is not None
        palette = palette_of(network.experiment, network.class_names)
        return segment_images(
            network,
            Path(source),
            Folders(Path(out), output, palette),
            views,
            process=process,
            longest_side=longest_side or section.longest_side_val,
            settings_file=Path(out) / SETTINGS_FILE,
            overwrite=overwrite,
        )


def segment_images(
    network: LoadedNetwork,
    source: Path,
    output: Output,
    views: ImageViews | None = None,
    *,
    process: Process | None = None,
    longest_side: int | None = None,
    settings_file: Path | None = None,
    overwrite: bool = False,
) -> Summary:
    """Segment an image, or all images of a folder and its sub-folders, and write files; return what was done.

    Every image is segmented exactly once, whatever the number of processes; rank r of W takes the images r, r + W and
    so on. One that cannot be read or that does not fit into memory is named in the log and in the summary, and the
    others go on. An image is skipped if its files are all there, can be read and have its size.

    Args:
    - `network`: what `zoo.load_network` returned; its model is moved to the device of ``process``.
    - `source`: an image file, or a folder.
    - `output`: which files are made.
    - `views`: scales, mirror images and tiles.
    - `process`: this process of a run of several, all of which get the same summary; default a run of one process, on
      the CUDA device where there is one. A process without ``control`` group that has a rank and a world size takes its
      share without asking the others; its summary is that of its share.
    - `longest_side`: length in px that the longer side of images is scaled to before the network; None: not scaled.
    - `settings_file`: None, or the file that says what the files beside it were made of and how. If it is there and
      says something else, nothing is skipped silently, and ConfigError is raised.
    - `overwrite`: segment all images, and replace the files that are there. If these were made in another way, they
      are removed first, those of other kinds too, so that none is taken for finished after an interruption.

    Raises DataError where there is no image, for images whose files would have the same name, and for files that would
    lie among the images; ConfigError for a network that does not segment, and if the processes of a run were not
    started with the same arguments.
    """
    process = process or Process(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    views = views or ImageViews()
    check_segments(network)
    settings = {**asdict(views), "scales": list(views.scales), "longest_side": longest_side}
    settings["experiment"] = network.experiment.digest()[:SHOWN_DIGITS]
    _check_processes(process, network, settings)
    images = process.on_main(lambda: _plan(source, output))
    if settings_file is not None:
        folder = source if os.path.isdir(source) else source.parent
        facts = {**settings, "weights": weights_digest(network.model), "images": printable(os.path.realpath(folder))}
        read = {os.path.realpath(path) for path, _ in images}
        possible = [path for _, name in images for path in output.possible_paths(name)]
        others = [path for path in possible if os.path.realpath(path) not in read]
        process.on_main(lambda: _settle(settings_file, facts, others if overwrite else None))
    if views.tile is not None:
        _warn_of_small_tiles(network.model, views.tile)
    forward = _forward(network, process.device)
    own = images[process.rank :: process.world_size]
    skipped, faults, begin = 0, [], time.perf_counter()
    with Progress("segment", len(own), show=process.is_main, unit="images") as progress:
        for path, name in own:
            if not overwrite and _is_done(output, path, name):
                skipped += 1
                progress.advance(1)
                continue
            try:
                with _naming_full_memory(process.device):
                    image = read_image(path)
                    segments = _segment(forward, image, network.experiment, views, process.device, longest_side, output)
                    _write(output, name, image, segments)
            except DataError as error:
                faults.append(f"{error}" if printable(path) in str(error) else f"{error}; {printable(path)}")
                logger.warning("%s", faults[-1])
            progress.advance(1)
    written = len(own) - skipped - len(faults)
    share = written, skipped, faults, time.perf_counter() - begin, peak_memory_bytes(process.device)
    shares = process.broadcast(process.gather(share))
    return Summary(
        written=sum(part[0] for part in shares),
        skipped=sum(part[1] for part in shares),
        faults=tuple(fault for part in shares for fault in part[2]),
        elapsed_s=max(part[3] for part in shares),
        peak_memory_bytes=max(part[4] for part in shares),
    )


def check_segments(network: LoadedNetwork) -> None:
    """Raise ConfigError for a network that classifies whole images."""
    if network.experiment.task != "segmentation":
        raise ConfigError(
            f"{network.title} classifies whole images; zoo segment: give a network that classifies pixels (deeplab_*), "
            "or use zoo predict"
        )


def _plan(source: Path, output: Output) -> list[tuple[Path, str]]:
    """Return (file, name) of all images; DataError where their files cannot be told apart, or would replace images."""
    if not os.path.exists(source):
        raise DataError(f"there is no image or folder {printable(source)}; IN: give one of them")
    paths = find_images(source) if os.path.isdir(source) else [source]
    root = source if os.path.isdir(source) else source.parent
    images = [(path, os.path.splitext(os.path.relpath(path, root))[0]) for path in paths]
    owners: dict[Path, Path] = {}
    inputs = {os.path.realpath(path) for path in paths}
    for path, name in images:
        for file in output.paths(name):
            if (other := owners.setdefault(file, path)) != path:
                raise DataError(
                    f"the files of {printable(other)} and of {printable(path)} would have the same name, "
                    f"{printable(file)}; rename one of the two images"
                )
            if os.path.realpath(file) in inputs:
                raise DataError(
                    f"{printable(file)} is one of the images, and would be replaced; OUT: give another folder"
                )
    folders = {os.path.realpath(file.parent) for file in owners}
    if os.path.isdir(source) and any(_is_within(folder, os.path.realpath(source)) for folder in folders):
        raise DataError(
            f"the files would lie among the images in {printable(source)}, and be taken for images by the next call; "
            "OUT: give a folder outside of IN"
        )
    return images


def _is_done(output: Output, path: Path, name: str) -> bool:
    """Return whether the files of an image are there and can be kept; log a warning if they are there but cannot."""
    if not all(map(os.path.isfile, output.paths(name))):
        return False
    try:
        if output.is_complete(name, read_as(path, lambda image: image.size, "an image")):
            return True
    except DataError:  # the image itself cannot be read, which segmenting it will report
        return False
    logger.warning("the files of an image are damaged or of another size, and are written again; %s", printable(path))
    return False


def written_size(path: Path) -> tuple[int, int] | None:
    """Return (width, height) of the image or of the arrays in a file that was written; None if it cannot be read."""
    try:
        if path.suffix == SUFFIXES["prob"]:
            with naming(printable(path), "an archive"), np.load(io.BytesIO(read_bytes(path))) as content:
                height, width = content["classes"].shape
                return (width, height) if content["probability"].shape == (height, width) else None
        return read_as(path, _verified_size, "an image")
    except DataError:
        return None


def _verified_size(image: ImageFile.ImageFile) -> tuple[int, int]:
    """Return the size of an image, whose checksums are compared; ValueError or another error if they differ."""
    image.verify()
    return image.size


def _is_within(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder


def _settle(file: Path, facts: Mapping[str, Any], replaced: Sequence[Path] | None) -> None:
    """Write ``facts`` into ``file``.

    If others are there, the files ``replaced`` are removed first; without any ConfigError is raised.
    """
    try:
        before = json.loads(read_text(file, "the settings")) if os.path.exists(file) else facts
    except (DataError, ValueError, RecursionError) as error:
        if replaced is None:
            raise ConfigError(f"{printable(file)} cannot be read: {error}; remove it, or give another OUT") from error
        before = None
    if before != facts:
        before = before if isinstance(before, dict) else {}
        changes = [
            f"{key} = {before.get(key)!r} there, {facts.get(key)!r} now"
            for key in sorted({*before, *facts})
            if before.get(key) != facts.get(key)
        ]
        if replaced is None:
            raise ConfigError(
                f"{printable(file.parent)} has files that were made in another way ({listed(changes)}): give "
                "--overwrite to make them anew, or another OUT"
            )
        for path in replaced:
            if os.path.isfile(path):
                path.unlink()
    write_json(file, facts)


def _check_processes(process: Process, network: LoadedNetwork, settings: Mapping[str, Any]) -> None:
    if process.control is None:
        return
    check_same_on_all_ranks(
        process,
        lambda: {**environment_fingerprint(process, "segment"), **settings, "weights": weights_digest(network.model)},
        "give every process the same command, weights and images",
    )


def _warn_of_small_tiles(model: nn.Module, tile: int) -> None:
    """Log a warning if tiles are smaller than the window that the pooled branch of a DeepLab head averages over."""
    if not isinstance(model, DeepLab) or model.head.pooling_size is None:
        return
    window = model.head.pooling_size
    window_px = model.feature_info.reduction()[-1] * max([window] if isinstance(window, int) else window)
    if tile < window_px:
        logger.warning(
            "tiles of %d px are smaller than the %d px that the network's head averages over, which changes its result "
            "more than that it sees less at the edges; --tile: give at least %d if they fit into memory",
            tile, window_px, window_px,
        )  # fmt: skip


def _forward(network: LoadedNetwork, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return the function from images to logits at the resolution of the head, in the experiment's number format."""
    model = network.model.to(device).eval()
    dtype = AMP_DTYPES[network.experiment.training.amp]
    run = getattr(model, "forward_logits", model)

    def forward(images: Tensor) -> Tensor:
        with autocast(device, dtype):
            logits: Tensor = run(images)
        return logits.float()

    return forward


def _segment(
    forward: Callable[[Tensor], Tensor],
    image: Image.Image,
    experiment: Experiment,
    views: ImageViews,
    device: torch.device,
    longest_side: int | None,
    output: Output,
) -> Segments:
    scaled = image if longest_side is None else scale_to_longest_side(image, longest_side)
    tensor = tvF.normalize(tvF.to_tensor(scaled), list(experiment.input.mean), list(experiment.input.std))
    size = (image.height, image.width) if output.at_image_size else None
    return segment_views(forward, tensor.to(device), views, size)


def _write(output: Output, name: str, image: Image.Image, segments: Segments) -> None:
    try:
        output.write(name, image, segments)
    except OSError as error:
        raise ConfigError(
            f"a file cannot be written: {error.strerror}; {printable(error.filename or output.paths(name)[0])}: make "
            "room or mend its folder, and give the same command again: what is written is kept"
        ) from error


@contextmanager
def _naming_full_memory(device: torch.device) -> Iterator[None]:
    """Raise DataError in place of torch's error where the memory is full."""
    try:
        yield
    except RuntimeError as error:
        if not is_memory_full(error):
            raise
        if device.type == "cuda":
            torch.cuda.empty_cache()
        raise DataError(
            f"the memory of {device} is full: give --tile PX to compute in windows, or less --longest-side or --scales"
        ) from error
