"""Writes segmentations of images to files: `segment`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional as tvF

from zoo.config.experiment import Experiment
from zoo.config.limits import MAX_SIDE
from zoo.data.reading import EXTENSIONS, read_image
from zoo.data.segmentation.transforms import scale_to_longest_side
from zoo.data.sources.scan import find_images
from zoo.engine._consistency import SHOWN_DIGITS, check_same_on_all_ranks, environment_fingerprint
from zoo.engine._digest import digest
from zoo.engine._precision import AMP_DTYPES, autocast
from zoo.engine._process import Process, open_process
from zoo.errors import ConfigError, DataError, escape
from zoo.registry.load_network import LoadedNetwork, as_loaded
from zoo.run.console import Progress, console, environment_rank
from zoo.run.label_images import KINDS, FileKind, colors_of
from zoo.tasks.protocols import Fusion
from zoo.tasks.tta import Segments, check_views, segment_image

logger = logging.getLogger(__name__)


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


def segment(
    network: LoadedNetwork | str | os.PathLike[str],
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    weights: str | os.PathLike[str] | None = None,
    output: Sequence[str | FileKind] = ("palette",),
    scales: Sequence[float] = (1.0,),
    flip: bool = False,
    fusion: Fusion = "mean",
    longest_side: int | None = None,
    classes_at: Literal["image", "input"] = "image",
    overwrite: bool = False,
    endings: Sequence[str] = EXTENSIONS,
    recursive: bool = True,
    process: Process | None = None,
    verbose: bool = True,
) -> Segmented:
    """Write the class of each pixel of images to ``out``/KIND/NAME; return the numbers of images.

    Skips an image if its files exist. Logs unreadable images, lists them in the result, and continues with the others.
    Under torchrun each process calls this function, takes its share of the images (rank r of W takes the images r, r +
    W and so on), and gets the result of all.

    Args:
    - `network`: a name for `zoo.load_network`, or its result.
    - `source`: image, or folder.
    - `out`: folder for the files, outside of ``source``.
    - `weights`: weights file or published name; default the weights of ``network``.
    - `output`: kinds of files: "palette" (indexed PNG of the classes, with colors), "ids" (gray PNG of the classes, 16
      bits for more than 256), "prob" (npz with the class and probability of each pixel), "overlay" (colors over the
      image); or other kinds.
    - `scales`: factors by which the sides of the image are scaled.
    - `flip`: add the mirror image at each scale.
    - `fusion`: rule that selects the class of a pixel from these views: "mean" of the probabilities, "voting", or
      "max", the largest probability in any view; see `zoo.tasks.tta.segment_image`.
    - `longest_side`: longer side in px that images are scaled to; default the experiment's
      ``segmentation.longest_side_val``.
    - `classes_at`: size at which classes are selected. "image": logits are resized to the size of the image first.
      "input": classes and probabilities are selected at the size of the network's input, and resized to the size of the
      image by the nearest pixel, as in the script of the original project.
    - `overwrite`: segment all images again and replace their files.
    - `endings`: endings of the images in a folder ``source``, in lower or upper case.
    - `recursive`: also search subfolders of ``source``.
    - `process`: this process, if `zoo.engine._process.open_process` is open already.
    - `verbose`: show progress and unreadable images.

    Raises ConfigError for impossible options and for a classifier, DataError if there are no images, or if two images
    would have the same files, and WeightsError for weights that do not fit.
    """
    check_views(scales, fusion)
    source, out = Path(source), Path(out)
    if longest_side is not None and not 0 < longest_side <= MAX_SIDE:
        raise ConfigError(f"longest_side = {longest_side}: give a number from 1 to {MAX_SIDE}")
    if classes_at not in ("image", "input"):
        raise ConfigError(f"classes_at = {classes_at!r}: give image or input")
    if unknown := [kind for kind in output if isinstance(kind, str) and kind not in KINDS]:
        raise ConfigError(f"output = {unknown[0]!r}: give one or more of {', '.join(KINDS)}")
    kinds = [KINDS[kind] if isinstance(kind, str) else kind for kind in output]
    with (
        console(environment_rank() if process is None else process.rank, verbose),
        open_process() if process is None else nullcontext(process) as process,
    ):
        loaded = as_loaded(network, weights)
        section = loaded.experiment.segmentation
        if section is None:
            raise ConfigError(
                "this network classifies whole images",
                loaded.title,
                "give a segmentation network (deeplab_* or pyramid_*), or use zoo predict",
            )
        longest_side = longest_side or section.longest_side_val
        colors = colors_of(loaded.experiment)
        check_same_on_all_ranks(
            process,
            lambda: {
                **environment_fingerprint(process, "segment"),
                "scales": list(scales),
                "flip": flip,
                "fusion": fusion,
                "longest_side": longest_side,
                "classes_at": classes_at,
                "experiment": loaded.experiment.digest()[:SHOWN_DIGITS],
                "weights": digest(loaded.model.state_dict())[:SHOWN_DIGITS],
            },
            "give every process the same command, weights and images",
        )
        images = process.on_main(lambda: _output_files(source, out, kinds, endings, recursive))
        forward = _forward(loaded, process.device)
        own = images[process.rank :: process.world_size]
        skipped, faults = 0, []
        with Progress("segment", len(own), show=process.is_main) as progress:
            for path, files in own:
                if not overwrite and all(map(os.path.isfile, files)):  # each was written atomically
                    skipped += 1
                    progress.advance(1)
                    continue
                try:
                    image = read_image(path)
                    inputs = _input(image, loaded.experiment, longest_side).to(process.device)
                    size = (image.height, image.width) if classes_at == "image" else None
                    segments = segment_image(forward, inputs, scales, flip, size, fusion)
                    if classes_at == "input":
                        segments = _resized(segments, image.size)
                    for kind, file in zip(kinds, files, strict=True):
                        kind.write(file, image, segments, colors)
                except DataError as error:
                    faults.append(f"{error}" if escape(path) in str(error) else f"{error}; {escape(path)}")
                    logger.warning("%s", faults[-1])
                except OSError as error:
                    raise ConfigError(
                        f"a file cannot be written: {error.strerror}",
                        error.filename or out,
                        "free disk space or make the folder writable, and repeat the command; complete files are kept",
                    ) from error
                progress.advance(1)
        written = len(own) - skipped - len(faults)
        shares = process.broadcast(process.gather((written, skipped, faults)))
    return Segmented(
        written=sum(share[0] for share in shares),
        skipped=sum(share[1] for share in shares),
        faults=[fault for share in shares for fault in share[2]],
    )


def _output_files(
    source: Path, out: Path, kinds: Sequence[FileKind], endings: Sequence[str], recursive: bool
) -> list[tuple[Path, list[Path]]]:
    """Return all images with their files, one of each of the ``kinds``.

    Raises DataError if there are no images, and if files would collide with each other or lie among the images.
    """
    if not os.path.exists(source):
        raise DataError(f"there is no image or folder {escape(source)}", "IN", "give an image or a folder")
    paths = find_images(source, endings, recursive) if os.path.isdir(source) else [source]
    root = source if os.path.isdir(source) else source.parent
    images, owners = [], dict[Path, Path]()
    for path in paths:
        name = os.path.splitext(os.path.relpath(path, root))[0]
        files = [out / kind.folder / f"{name}{kind.ending}" for kind in kinds]
        images.append((path, files))
        for file in files:
            if (other := owners.setdefault(file, path)) != path:
                raise DataError(
                    f"the files of {escape(other)} and of {escape(path)} would have the same name, {escape(file)}",
                    remedy="rename one of the two images",
                )
    inside = os.path.realpath(root)
    folders = [os.path.realpath(out / kind.folder) for kind in kinds]
    if os.path.isdir(source) and any(_is_searched(folder, inside, recursive) for folder in folders):
        raise DataError(
            f"the files would lie among the images in {escape(root)}, and the next call would segment them",
            "OUT",
            "give a folder outside of IN" if recursive else "give another folder",
        )
    return images


def _is_searched(folder: str, root: str, recursive: bool) -> bool:
    return os.path.commonpath([folder, root]) == root if recursive else folder == root


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


def _resized(segments: Segments, size: tuple[int, int]) -> Segments:
    """Resize ``segments`` to a ``size`` (width, height) by nearest neighbor."""
    maps = (Image.fromarray(each.numpy()).resize(size, Image.Resampling.NEAREST) for each in segments)
    return Segments(*(torch.from_numpy(np.array(each)) for each in maps))
