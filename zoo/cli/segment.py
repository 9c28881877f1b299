"""``zoo segment``: the class of each pixel of images, as files; ``test-vistas``, with the original's arguments."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.cli.options import add_process_options, add_weights_option, check_writable, positive, whole_number
from zoo.errors import ConfigError, DataError

if TYPE_CHECKING:
    from zoo.run.segmenting import Summary

VISTAS = "wider_resnet38_deeplab_vistas"
VISTAS_SCALES = "0.7, 1, 1.2"  # the original's default
KINDS = ("palette", "ids", "prob")
OVERLAY = "overlay"
NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{0,9})?|\.[0-9]{1,9}")
MIB = 2**20


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``segment``, and ``test-vistas``, which takes the arguments of the original test script."""
    _add_segment(commands)
    _add_test_vistas(commands)


def _add_segment(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "segment",
        help="write the class of each pixel of images into files",
        description="Write the class of each pixel of images into OUT/KIND/NAME, with the sub-folders of IN. The "
        "logits are resized to the image's own size before a class is chosen (test-vistas chooses at the size that the "
        "network saw and resizes the classes). An image is skipped if its files can be read and have its size; one "
        "that cannot be used is named, the others go on, and the exit code is then 2.",
    )
    parser.add_argument(
        "name", metavar="NAME",
        help="a deeplab network (zoo list), the name of an experiment or its file, or a checkpoint of zoo train",
    )  # fmt: skip
    parser.add_argument(
        "source", metavar="IN", type=Path,
        help="an image, or a folder, which is searched with its sub-folders; two images whose files would have one "
        "name (a.jpg, a.png) are refused",
    )  # fmt: skip
    parser.add_argument("out", metavar="OUT", type=Path, help="folder for the files, outside of IN")
    add_weights_option(parser)
    _add_view_options(parser, scales="1")
    parser.add_argument(
        "--fusion", choices=("mean", "max", "voting"), default="mean",
        help="how the views become one: the class with the largest mean probability, with the largest single "
        "probability, or that is the best of most views (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=kinds, default=KINDS[:1], metavar="LIST",
        help="files for each image, one or more of: palette (PNG whose values are the classes and that shows colours), "
        "ids (gray PNG of the classes, 16 bits for more than 256), prob (npz with the class of each pixel and its "
        "probability); separated by commas (default: palette)",
    )  # fmt: skip
    parser.add_argument(
        "--overlay", action="store_true",
        help="also write the colours over the image, with a legend of the classes that occur",
    )  # fmt: skip
    parser.add_argument(
        "--longest-side", type=positive, metavar="PX",
        help="scale images to this longer side for the network (default: the experiment's "
        "segmentation.longest_side_val)",
    )  # fmt: skip
    parser.add_argument(
        "--overwrite", action="store_true", help="segment all images, and replace the files that are there"
    )
    add_process_options(parser)
    parser.set_defaults(run=run_segment)


def _add_test_vistas(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "test-vistas",
        help="segment images with the published Vistas model, as the original script did",
        description="Segment the images of IN_DIR with a WideResNet-38 DeepLab model of Mapillary Vistas and write "
        "OUT_DIR/NAME.png, replacing what is there. Images are scaled to a longer side of 2048 px, classes are chosen "
        "at that size, and each pixel of the image gets the nearest one (zoo segment resizes the logits).",
    )
    parser.add_argument("snapshot", metavar="SNAPSHOT", type=Path, help="the model: a file with body, head and cls")
    parser.add_argument("source", metavar="IN_DIR", type=Path, help="folder of images, with its sub-folders")
    parser.add_argument("out", metavar="OUT_DIR", type=Path, help="folder for the files, outside of IN_DIR")
    _add_view_options(parser, scales=VISTAS_SCALES)
    parser.add_argument(
        "--fusion-mode", choices=("mean", "voting", "max"), default="mean",
        help="how the views become one (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--output-mode", choices=("palette", "raw", "prob"), default="raw",
        help="palette: indexed PNG with colours; raw: gray PNG of the classes; prob: raw, and NAME_prob.png with the "
        "probability times 255 (default: raw)",
    )  # fmt: skip
    parser.add_argument(
        "--world-size", type=positive, metavar="N",
        help="number of processes, one per GPU, which are started unless --rank is given (default: the number of GPUs, "
        "or what torchrun started)",
    )  # fmt: skip
    parser.add_argument(
        "--rank",
        type=whole_number,
        metavar="N",
        help="be process N of --world-size alone, on GPU N, and start no other",
    )
    add_process_options(parser)
    parser.set_defaults(run=run_test_vistas)


def _add_view_options(parser: argparse.ArgumentParser, scales: str) -> None:
    parser.add_argument(
        "--scales", type=numbers, default=numbers(scales), metavar="LIST",
        help=f"factors of the image's sides at which the network sees it, separated by commas (default: {scales})",
    )  # fmt: skip
    parser.add_argument("--flip", action="store_true", help="see each scale mirrored as well")
    parser.add_argument(
        "--tile", type=positive, metavar="PX",
        help="compute an image that is larger in windows of this side, which overlap by a quarter: for images that do "
        "not fit into memory. The result changes, as the network sees less around a pixel, and more so below the "
        "window that the network's head averages over (672 px in the Vistas model); a multiple of 32",
    )  # fmt: skip


def numbers(text: str) -> tuple[float, ...]:
    """Return the numbers in ``text``: "0.7, 1, 1.2", also in brackets; argparse reports the error of anything else."""
    inner = text.strip()
    if inner[:1] + inner[-1:] in ("[]", "()"):
        inner = inner[1:-1]
    words = [word.strip() for word in inner.split(",")]
    if not all(NUMBER.fullmatch(word) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0.7,1,1.2")
    return tuple(map(float, words))


def kinds(text: str) -> tuple[str, ...]:
    """Return the kinds of files in ``text``, each once; argparse reports the error of an unknown one."""
    words = tuple(word.strip() for word in text.split(","))
    if not set(words) <= set(KINDS) or len(set(words)) < len(words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(KINDS)}, each at most once")
    return words


def run_segment(args: argparse.Namespace) -> int:
    """Write the files and print what was done; returns 0. Raises DataError if images are left out."""
    from zoo.engine.process import open_process
    from zoo.limits import MAX_SIDE
    from zoo.run.label_images import palette_of
    from zoo.run.scoring import load_network
    from zoo.run.segmenting import SETTINGS_FILE, Folders, check_segments, segment_images
    from zoo.tasks.views import ImageViews

    views = ImageViews(args.scales, args.flip, args.fusion, args.tile)
    if args.longest_side is not None and args.longest_side > MAX_SIDE:
        raise ConfigError(f"--longest-side {args.longest_side}: give at most {MAX_SIDE}")
    with open_process(args.local_rank, args.dist_backend) as process:
        settings_file = args.out / SETTINGS_FILE
        process.on_main(lambda: check_writable(settings_file))
        network = load_network(args.name, args.weights)
        check_segments(network)  # before its number of classes is compared with what files can hold
        section = network.experiment.segmentation
        assert section is not None
        palette = palette_of(network.experiment, network.class_names)
        summary = segment_images(
            network,
            args.source,
            Folders(args.out, (*args.output, *([OVERLAY] if args.overlay else [])), palette),
            views,
            process=process,
            longest_side=args.longest_side or section.longest_side_val,
            settings_file=settings_file,
            overwrite=args.overwrite,
        )
    return _report(summary) if process.is_main else 0


def run_test_vistas(args: argparse.Namespace) -> int:
    """Write the files and print what was done; returns 0. Raises DataError if images are left out."""
    import torch

    from zoo.engine.process import open_process
    from zoo.run.label_images import palette_of
    from zoo.run.scoring import load_network
    from zoo.run.segmenting import OriginalFiles, segment_images
    from zoo.tasks.views import ImageViews

    views = ImageViews(args.scales, args.flip, args.fusion_mode, args.tile)
    is_launched = not os.environ.keys().isdisjoint({"RANK", "WORLD_SIZE"})
    if is_launched and (args.rank, args.world_size) != (None, None):
        raise ConfigError("--world-size and --rank: a launcher has started this process and said which it is; leave "
                          "them out")  # fmt: skip
    num_processes = args.world_size or (1 if is_launched else max(1, torch.cuda.device_count()))
    if args.rank is not None and args.rank >= num_processes:
        raise ConfigError(f"--rank {args.rank} is not one of the {num_processes} processes of --world-size")
    if args.rank is None and num_processes > 1:
        return _start_processes(args, num_processes)
    local_rank = args.rank if args.local_rank is None else args.local_rank
    with open_process(local_rank, args.dist_backend) as process:
        if args.rank is not None:  # a share of its own, as in the original: nothing is exchanged
            process = replace(process, rank=args.rank, world_size=num_processes)
        check_writable(args.out / "NAME.png")
        network = load_network(VISTAS, args.snapshot)
        section = network.experiment.segmentation
        assert section is not None
        palette = palette_of(network.experiment, network.class_names)
        summary = segment_images(
            network,
            args.source,
            OriginalFiles(args.out, args.output_mode, palette),
            views,
            process=process,
            longest_side=section.longest_side_val,
            overwrite=True,
        )
    return _report(summary) if process.is_main or args.rank is not None else 0


def _start_processes(args: argparse.Namespace, num_processes: int) -> int:
    """Run this command in so many processes, each for its share of the images; return the largest of their codes."""
    options = ["--scales", ",".join(map(repr, args.scales)), "--fusion-mode", args.fusion_mode]
    options += ["--output-mode", args.output_mode, *["--flip"] * args.flip, *["--debug"] * args.debug]
    options += [] if args.tile is None else ["--tile", str(args.tile)]
    places = [os.path.abspath(path) for path in (args.snapshot, args.source, args.out)]  # none begins with a dash
    command = [sys.executable, "-m", "zoo", args.command, *places, *options, "--world-size", str(num_processes)]
    processes = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(num_processes)]
    try:
        return max(process.wait() % 256 for process in processes)
    finally:
        for process in processes:
            process.terminate()  # does nothing to one that has ended


def _report(summary: Summary) -> int:
    """Print how many images were segmented, how fast and in how much memory; DataError if some could not be."""
    from zoo.run.console import format_duration

    num_images = summary.written + len(summary.faults)
    speed = f"{summary.written / summary.elapsed_s:.2f} images/s, " if summary.written else ""
    print(
        f"{summary.written} of {num_images} images segmented in {format_duration(summary.elapsed_s)} ({speed}"
        f"peak memory {summary.peak_memory_bytes / MIB:,.0f} MiB)"
        + (f", {summary.skipped} were there already" if summary.skipped else "")
    )
    if summary.faults:
        raise DataError(
            f"{len(summary.faults)} of {num_images} images could not be used and are named above, the others have "
            "their files; mend or remove them, and give the same command again"
        )
    return 0
