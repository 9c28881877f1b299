"""``zoo validate``: score weights on a folder of images, by a published protocol or any crop."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.cli.options import add_loader_options, add_process_options, add_weights_option, check_writable, positive
from zoo.data.places import place_of
from zoo.errors import ConfigError, listed, printable
from zoo.tasks.protocols import PROTOCOLS, WHOLE_IMAGES, Protocol, center_crop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zoo.run.scoring import LoadedNetwork
    from zoo.tasks.segmentation import SegmentationResult

PROTOCOL_HELP = (
    "published way to score: center224 and tencrop224 (shorter side 256), center320 (shorter side 320, centre crop "
    "320: documented nowhere in the original project, the usual convention of its time); of segmentation whole (images "
    "at one scale) and whole-flip (the mean of their probabilities and those of their mirror images)"
)


# Options that only one task has, by their names as attributes.
ONLY_CLASSIFICATION = {"crop": "--crop", "scale": "--scale", "ten_crops": "--ten-crops",
                       "batch_size": "--batch-size", "predictions": "--predictions"}  # fmt: skip
ONLY_SEGMENTATION = {"confusion": "--confusion"}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``validate``, and ``test-imagenet``, which takes the arguments of the original test script."""
    parser = commands.add_parser("validate", help="score weights on DATA/val")
    parser.add_argument(
        "name", metavar="NAME",
        help="a network (zoo list), the name of an experiment or its file, or a checkpoint of zoo train",
    )  # fmt: skip
    parser.add_argument(
        "data", metavar="DATA", type=place_of,
        help="folder with val/: a folder per class, or of segmentation images/ and labels/ (see segmentation.layout); "
        "or shards, also by their address (https://, s3://, gs://)",
    )  # fmt: skip
    add_weights_option(parser)
    parser.add_argument(
        "--task", choices=("classification", "segmentation"),
        help="what the network has to be for: one class per image, or one per pixel (default: what it is for)",
    )  # fmt: skip
    parser.add_argument(
        "--confusion", type=Path, metavar="FILE",
        help="(segmentation) draw the confusion matrix, each row divided by its sum, into a .png file",
    )  # fmt: skip
    _add_options(parser)
    script = commands.add_parser("test-imagenet", help="the same, as CONFIG CHECKPOINT DATA")
    script.add_argument("name", metavar="CONFIG", help="an experiment file")
    script.add_argument(
        "weights", metavar="CHECKPOINT", type=Path, help="weights, a checkpoint of zoo train, or a published name"
    )
    script.add_argument("data", metavar="DATA", type=place_of, help="folder with val/, one folder per class")
    _add_options(script)
    script.set_defaults(task=None, confusion=None)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_loader_options(parser, workers=4)
    parser.add_argument("--protocol", type=protocol, choices=[*PROTOCOLS, *WHOLE_IMAGES], help=PROTOCOL_HELP)
    parser.add_argument(
        "-c", "--crop", type=positive, metavar="PX", help="side of the crop (default: the experiment's crop_val)"
    )
    parser.add_argument(
        "-s", "--scale", type=scale, metavar="PX",
        help="shorter side before the crop, -1 for no resizing (default: the experiment's scale_val)",
    )  # fmt: skip
    parser.add_argument(
        "--ten_crops", "--ten-crops", action="store_true",
        help="average the logits of the corners, the centre and their mirror images",
    )  # fmt: skip
    parser.add_argument(
        "--batch-size", type=positive, metavar="N",
        help="images at once per process (default: the experiment's batch size over the number of processes, a tenth "
        "of that for ten crops); halved when memory is full",
    )  # fmt: skip
    parser.add_argument("--limit", type=positive, metavar="N", help="score only N images, spread evenly over the data")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the scores to FILE")
    parser.add_argument(
        "--predictions", type=Path, metavar="FILE",
        help="write a CSV line per image to FILE, sorted by path: path, class, the top five classes and their "
        "probabilities; two such files can be compared line by line",
    )  # fmt: skip
    add_process_options(parser)
    parser.set_defaults(run=run)


def protocol(text: str) -> str:
    """Return ``text`` if it names a published protocol; otherwise argparse reports how to ask for other sizes."""
    if text in PROTOCOLS or text in WHOLE_IMAGES:
        return text
    other = re.fullmatch(r"(center|tencrop)(\d+)", text)
    crops, crop = ("--ten_crops " if other[1] == "tencrop" else "", other[2]) if other else ("[--ten_crops] ", "PX")
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a published protocol ({', '.join([*PROTOCOLS, *WHOLE_IMAGES])}); for other sizes leave out "
        f"--protocol and give {crops}-c {crop} -s PX, the crop and the shorter side before it"
    )


def scale(text: str) -> int:
    """Return ``text`` as a size in px or -1; argparse reports the ValueError."""
    return -1 if text == "-1" else positive(text)


def run(args: argparse.Namespace) -> int:
    """Score the weights, print a table and write the files that were asked for; returns 0."""
    if args.protocol and (args.crop or args.scale or args.ten_crops):
        raise ConfigError(
            f"--protocol {args.protocol} fixes scale, crop and number of crops; command line: "
            f"leave out --crop, --scale and --ten-crops, or --protocol"
        )
    from zoo.engine.process import open_process
    from zoo.files import write_json
    from zoo.run.plot_style import check_matplotlib
    from zoo.run.predictions import write_predictions
    from zoo.run.results_table import results_table
    from zoo.run.scoring import load_network, score
    from zoo.tasks.prediction import Recorder
    from zoo.tasks.segmentation import SegmentationResult

    if args.confusion is not None:
        if args.confusion.suffix.lower() != ".png":
            raise ConfigError(
                f"{printable(args.confusion)} is not called .png; --confusion: the plot is written as PNG"
            )
        check_matplotlib("leave out --confusion")
    with open_process(args.local_rank, args.dist_backend) as process:
        process.on_main(lambda: check_writable(args.json, args.predictions, args.confusion))
        network = load_network(args.name, args.weights)
        _check_task(args, network)
        recorder = Recorder(args.data) if args.predictions else None
        result = score(
            network,
            args.data,
            _protocol(args, network),
            process=process,
            workers=args.workers,
            batch_size=args.batch_size,
            limit=args.limit,
            on_bad_image=args.on_bad_image,
            print_freq=args.print_freq,
            record=recorder,
        )
        shares = process.gather(recorder.predictions) if recorder else []
        if process.is_main:
            print(results_table(network.title, [result], network.experiment.expected))
            content = network.result_json(result, process)
            if isinstance(result, SegmentationResult):
                content |= _report_classes(network, result, args.confusion)
            if args.json is not None:
                write_json(args.json, content)
            if args.predictions is not None:
                write_predictions(args.predictions, [line for share in shares for line in share])
    return 0


def _report_classes(network: LoadedNetwork, result: SegmentationResult, plot: Path | None) -> dict[str, Sequence[str]]:
    """Print a table of the classes, write the plot of their confusion, and return their names for the result file."""
    import numpy as np

    from zoo.files import write_bytes
    from zoo.run.confusion_plot import confusion_plot
    from zoo.run.label_images import palette_of
    from zoo.run.segmentation_scores import class_table

    names = palette_of(network.experiment, network.class_names).names
    print(f"\n{class_table(result, names)}")
    if plot is not None:
        title = f"{network.title}: {result.miou:.2f} % mIoU, {result.count} images"
        write_bytes(plot, confusion_plot(np.array(result.confusion), names, title))
    return {"classes": list(names)}


def _check_task(args: argparse.Namespace, network: LoadedNetwork) -> None:
    """Raise ConfigError for a --task that the network is not for, and for options of the other task."""
    task, arch = network.experiment.task, network.experiment.network.arch
    if args.task not in (None, task):
        raise ConfigError(
            f"{network.title} ({arch}) is a network of {task}; --task {args.task}: leave it out, or give another NAME"
        )
    others = ONLY_CLASSIFICATION if task == "segmentation" else ONLY_SEGMENTATION
    given = [option for name, option in others.items() if getattr(args, name)]
    if given:
        how = "whole images are scored, one at a time" if task == "segmentation" else "each image has one class"
        raise ConfigError(
            f"{network.title} ({arch}) is a network of {task}, where {how}; command line: leave out {listed(given)}"
        )


def _protocol(args: argparse.Namespace, network: LoadedNetwork) -> Protocol | str | None:
    """Return the protocol that the options ask for; None for that of the experiment."""
    if args.protocol or not (args.crop or args.scale or args.ten_crops):
        name: str | None = args.protocol
        return name
    default = center_crop(network.experiment)
    return Protocol(args.scale or default.scale, args.crop or default.crop, args.ten_crops)
