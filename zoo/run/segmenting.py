"""Writes segmentations of images to files: `segment`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional as tvF

from zoo.config import Experiment
from zoo.data.reading import read_image
from zoo.data.scan import find_images
from zoo.data.segmentation_transforms import scale_to_longest_side
from zoo.engine.consistency import SHOWN_DIGITS, check_same_on_all_ranks, environment_fingerprint, weights_digest
from zoo.engine.precision import AMP_DTYPES, autocast
from zoo.engine.process import Process, open_process
from zoo.engine.validation import is_memory_full
from zoo.errors import ConfigError, DataError, escape
from zoo.run.console import Progress
from zoo.run.label_images import (
    Palette,
    check_kind,
    id_image,
    overlay,
    palette_image,
    palette_of,
    write_png,
    write_probabilities,
)
from zoo.run.scoring import LoadedNetwork, load_network, single_process
from zoo.spec.limits import MAX_SIDE
from zoo.tasks.tta import Fusion, Segments, TestTimeAugmentation
from zoo.tasks.tta import segment as segment_views

logger = logging.getLogger(__name__)

FileWriter = Callable[[Path, Image.Image, Segments], None]
# The files of an image NAME, its path without suffix: of the folder OUT and the ending END, OUT/NAMEEND.
Outputs = Mapping[tuple[Path, str], FileWriter]


class Segmented(NamedTuple):
    """Result of `segment`, over all processes.

    Args:
    - `written`: number of images whose files were written.
    - `skipped`: number of images whose files existed.
    - `faults`: an error message for each image without files.
    """

    written: int
    skipped: int
    faults: list[str]


def output_folders(out: Path, kinds: Sequence[str], palette: Palette) -> Outputs:
    """Return the outputs in a folder OUT/KIND for each kind, see `segment`.

    Raises ConfigError if a kind cannot hold as many classes as ``palette`` has.
    """
    for kind in kinds:
        check_kind(kind, len(palette))
    count = len(palette)

    def write_npz(path: Path, _: Image.Image, found: Segments) -> None:
        write_probabilities(path, found.classes.numpy(), found.probabilities.numpy(), count)

    writers: dict[str, tuple[str, FileWriter]] = {
        "palette": (".png", lambda path, _, found: write_png(path, palette_image(found.classes.numpy(), palette))),
        "ids": (".png", lambda path, _, found: write_png(path, id_image(found.classes.numpy(), count))),
        "prob": (".npz", write_npz),
        "overlay": (".png", lambda path, image, found: write_png(path, overlay(image, found.classes.numpy(), palette))),
    }
    return {(out / kind, writers[kind][0]): writers[kind][1] for kind in kinds}


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
    longest_side: int | None = None,
    overwrite: bool = False,
    process: Process | None = None,
) -> Segmented:
    """Write the class of each pixel of images to ``out``/KIND/NAME, and return how many there are.

    Logits are resized to the size of the image before the argmax. An image is skipped if its files exist.
    Unreadable images are logged and listed in the result, and the others continue. Under torchrun each process calls
    this function, takes its share of the images, and gets the result of all.

    Args:
    - `network`: result of `zoo.load_network`, or its ``name`` argument.
    - `source`: image, or folder, which is searched recursively.
    - `out`: folder for the files, outside of ``source``.
    - `weights`: weights file or published name; default the weights of ``network``.
    - `output`: kinds of files: "palette" (indexed PNG of the classes, with colors), "ids" (gray PNG of the classes, 16
      bits for more than 256), "prob" (npz with the class and probability of each pixel), "overlay" (colors over the
      image).
    - `scales`: factors by which the sides of the image are scaled.
    - `flip`: whether the mirror image is added at each scale.
    - `fusion`: how predictions of the views are combined: "mean" or "max" of the probabilities, or "voting".
    - `longest_side`: longer side in px that images are scaled to; default the experiment's
      ``segmentation.longest_side_val``.
    - `overwrite`: whether all images are segmented again and their files replaced.
    - `process`: this process, if `zoo.engine.process.open_process` is open already.

    Raises ConfigError for impossible options and for a classifier; DataError if there are no images, or two images
    would have the same files; WeightsError for weights that do not fit.
    """
    views = TestTimeAugmentation(tuple(scales), flip, fusion)
    if longest_side is not None and not 0 < longest_side <= MAX_SIDE:
        raise ConfigError(f"longest_side = {longest_side}: give a number from 1 to {MAX_SIDE}")
    with open_process() if process is None else nullcontext(process) as process:
        if not isinstance(network, LoadedNetwork):
            network = load_network(network, weights)
        check_segments(network)  # before `output_folders` checks the number of classes
        section = network.experiment.segmentation
        assert section is not None
        palette = palette_of(network.experiment, network.class_names)
        return segment_images(
            network,
            Path(source),
            output_folders(Path(out), output, palette),
            views,
            process=process,
            longest_side=longest_side or section.longest_side_val,
            overwrite=overwrite,
        )


def segment_images(
    network: LoadedNetwork,
    source: Path,
    outputs: Outputs,
    views: TestTimeAugmentation | None = None,
    *,
    process: Process | None = None,
    longest_side: int | None = None,
    overwrite: bool = False,
    at_image_size: bool = True,
) -> Segmented:
    """Write the files of an image or of the images of a folder, like `segment`.

    Rank r of W segments the images r, r + W and so on. Images that do not fit into memory are treated like unreadable
    ones. A process with a rank and world size but without ``control`` group takes its share without communication;
    its result covers that share.

    Args:
    - `network`: result of `zoo.load_network`; its model is moved to the device of ``process``.
    - `outputs`: the files of an image, and the function that writes each atomically.
    - `views`: scales and mirror images.
    - `process`: default: a single process, on a CUDA device if available.
    - `longest_side`: longer side in px that images are scaled to before the network; None: not scaled.
    - `at_image_size`: whether logits are resized to the size of the image, or left at the size of the network's input.
    """
    process = process or single_process()
    views = views or TestTimeAugmentation()
    check_segments(network)
    settings = {**asdict(views), "scales": list(views.scales), "longest_side": longest_side}
    settings["experiment"] = network.experiment.digest()[:SHOWN_DIGITS]
    _check_processes(process, network, settings)
    images = process.on_main(lambda: _plan(source, outputs))
    forward = _forward(network, process.device)
    own = images[process.rank :: process.world_size]
    skipped, faults = 0, []
    with Progress("segment", len(own), show=process.is_main, unit="images") as progress:
        for path, name in own:
            if not overwrite and all(map(os.path.isfile, _files(outputs, name))):  # each was written atomically
                skipped += 1
                progress.advance(1)
                continue
            try:
                with _naming_full_memory(process.device):
                    image = read_image(path)
                    size = (image.height, image.width) if at_image_size else None
                    inputs = _input(image, network.experiment, longest_side).to(process.device)
                    _write(_files(outputs, name), image, segment_views(forward, inputs, views, size))
            except DataError as error:
                faults.append(f"{error}" if escape(path) in str(error) else f"{error}; {escape(path)}")
                logger.warning("%s", faults[-1])
            progress.advance(1)
    written = len(own) - skipped - len(faults)
    shares = process.broadcast(process.gather((written, skipped, faults)))
    return Segmented(
        written=sum(share[0] for share in shares),
        skipped=sum(share[1] for share in shares),
        faults=[fault for share in shares for fault in share[2]],
    )


def check_segments(network: LoadedNetwork) -> None:
    """Raise ConfigError if the network is not a segmentation network."""
    if network.experiment.task != "segmentation":
        raise ConfigError(
            f"{network.title} classifies whole images",
            "zoo segment",
            "give a segmentation network (deeplab_*), or use zoo predict",
        )


def _plan(source: Path, outputs: Outputs) -> list[tuple[Path, str]]:
    """Return (file, name) of all images. Raises DataError if files would collide with each other or with images."""
    if not os.path.exists(source):
        raise DataError(f"there is no image or folder {escape(source)}", "IN", "give an image or a folder")
    paths = find_images(source) if os.path.isdir(source) else [source]
    root = source if os.path.isdir(source) else source.parent
    images = [(path, os.path.splitext(os.path.relpath(path, root))[0]) for path in paths]
    owners: dict[Path, Path] = {}
    inputs = {os.path.realpath(path) for path in paths}
    for path, name in images:
        for file in _files(outputs, name):
            if (other := owners.setdefault(file, path)) != path:
                raise DataError(
                    f"the files of {escape(other)} and of {escape(path)} would have the same name, {escape(file)}",
                    remedy="rename one of the two images",
                )
            if os.path.realpath(file) in inputs:
                what = f"{escape(file)} is one of the images and would be overwritten"
                raise DataError(what, "OUT", "give another folder")
    folders = {os.path.realpath(file.parent) for file in owners}
    if os.path.isdir(source) and any(_is_within(folder, os.path.realpath(source)) for folder in folders):
        raise DataError(
            f"the files would lie among the images in {escape(source)}, and the next call would segment them",
            "OUT",
            "give a folder outside of IN",
        )
    return images


def _is_within(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder


def _check_processes(process: Process, network: LoadedNetwork, settings: Mapping[str, Any]) -> None:
    if process.control is None:
        return
    check_same_on_all_ranks(
        process,
        lambda: {**environment_fingerprint(process, "segment"), **settings, "weights": weights_digest(network.model)},
        "give every process the same command, weights and images",
    )


def _forward(network: LoadedNetwork, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return the function from images to logits at the head's resolution, with the experiment's precision."""
    model = network.model.to(device).eval()
    dtype = AMP_DTYPES[network.experiment.training.amp]
    run = getattr(model, "forward_logits", model)

    def forward(images: Tensor) -> Tensor:
        with autocast(device, dtype):
            logits: Tensor = run(images)
        return logits.float()

    return forward


def _input(image: Image.Image, experiment: Experiment, longest_side: int | None) -> Tensor:
    scaled = image if longest_side is None else scale_to_longest_side(image, longest_side)
    return tvF.normalize(tvF.to_tensor(scaled), list(experiment.input.mean), list(experiment.input.std))


def _files(outputs: Outputs, name: str) -> dict[Path, FileWriter]:
    return {folder / f"{name}{end}": write for (folder, end), write in outputs.items()}


def _write(files: Mapping[Path, FileWriter], image: Image.Image, segments: Segments) -> None:
    try:
        for path, write in files.items():
            write(path, image, segments)
    except OSError as error:
        raise ConfigError(
            f"a file cannot be written: {error.strerror}",
            error.filename or next(iter(files)),
            "free disk space or make the folder writable, and repeat the command; complete files are kept",
        ) from error


@contextmanager
def _naming_full_memory(device: torch.device) -> Iterator[None]:
    """Context manager: raises DataError instead of torch's out-of-memory errors."""
    try:
        yield
    except RuntimeError as error:
        if not is_memory_full(error):
            raise
        if device.type == "cuda":
            torch.cuda.empty_cache()
        raise DataError(
            f"the memory of {device} is full",
            remedy="give a smaller --longest-side or smaller --scales",
        ) from error
