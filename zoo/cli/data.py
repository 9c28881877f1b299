"""``zoo data``: what is in a data folder and what is wrong with it; data folders of what owners of data distribute."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.cli.options import add_workers_option, positive, whole_number
from zoo.data.places import local, place_of
from zoo.errors import DataError, printable

if TYPE_CHECKING:
    from zoo.data.check import SplitReport
    from zoo.run.console import Progress
    from zoo.tables import Cell


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``data`` and its kinds."""
    parser = commands.add_parser(
        "data", help="look at data, index it, write it into shards, or make a data folder of CIFAR or ImageNet"
    )
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True, help="what to do: see KIND --help")
    check = kinds.add_parser(
        "check", help="read every image and label map of DATA; print sizes, classes, and everything that is wrong"
    )
    check.add_argument("config", metavar="CONFIG", help="an experiment that is to train on them: its file or name")
    check.add_argument("data", metavar="DATA", type=place_of, help="folder of the images, as for zoo train")
    add_workers_option(check, 4, "threads that read files")
    check.set_defaults(run=_check)
    for kind, archive in {"cifar10": "cifar-10-python.tar.gz", "cifar100": "cifar-100-python.tar.gz"}.items():
        cifar = kinds.add_parser(kind, help=f"write class folders of {archive}: OUT/train and OUT/val, of PNG files")
        cifar.add_argument(
            "source", metavar="SOURCE", type=Path,
            help=f"{archive} as it is distributed, its folder as torchvision unpacks it, or a folder with either",
        )  # fmt: skip
        cifar.add_argument("out", metavar="OUT", type=Path, help="folder to make; it must not exist, or be empty")
        cifar.set_defaults(run=_unpack_cifar)
    imagenet = kinds.add_parser(
        "imagenet-val", help="sort ILSVRC2012_img_val.tar into class folders: OUT/val, of its files as they are"
    )
    imagenet.add_argument(
        "source", metavar="SOURCE", type=Path,
        help="folder with ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz, which tells the classes; or the "
        "former, with the latter beside it",
    )  # fmt: skip
    imagenet.add_argument(
        "out", metavar="OUT", type=Path, help="folder to make val/ in; val/ must not exist, or be empty"
    )
    imagenet.set_defaults(run=_unpack_imagenet_val)
    index = kinds.add_parser(
        "index", help="write DATA/train.index and DATA/val.index, so that no run has to look for the images again"
    )
    index.add_argument("data", metavar="DATA", type=place_of, help="folder of images, of shards, or of Parquet files")
    index.set_defaults(run=_index)
    shard = kinds.add_parser(
        "shard", help="write the images of class folders or Parquet files into tar files, as webdataset has them"
    )
    shard.add_argument("data", metavar="DATA", type=place_of, help="folder of the images, as for zoo train")
    shard.add_argument("out", metavar="OUT", type=Path, help="folder to make train/ and val/ in")
    shard.add_argument(
        "--per-shard", type=positive, default=1000, metavar="N", help="images in a tar file (default: %(default)s)"
    )
    shard.add_argument(
        "--seed", type=whole_number, default=0, metavar="N",
        help="of the order of the training images; validation images keep theirs (default: %(default)s)",
    )  # fmt: skip
    shard.set_defaults(run=_shard)
    for subparser in kinds.choices.values():
        subparser.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )


def _check(args: argparse.Namespace) -> int:
    """Read all images, print what is in them and all faults; returns 0, or raises DataError if there are faults."""
    from zoo.config import load_experiment
    from zoo.data.check import check_data

    config = load_experiment(args.config)
    reports = check_data(config, args.data, args.workers, _progress)
    print("\n\n".join(_described(report) for report in reports))
    num_faults = sum(len(report.faults) for report in reports)
    if num_faults:
        raise DataError(
            f"{_counted(num_faults, 'fault')}, listed above; {printable(args.data)}: mend or remove these files, and "
            "check again"
        )
    return 0


def _unpack_cifar(args: argparse.Namespace) -> int:
    """Write the class folders and what they were made of; returns 0."""
    from zoo.data.cifar import CIFAR, unpack_cifar

    _write_source(args, unpack_cifar(CIFAR[args.kind], args.source, args.out, _progress))
    return 0


def _unpack_imagenet_val(args: argparse.Namespace) -> int:
    """Write the class folders and what they were made of; returns 0."""
    from zoo.data.imagenet_validation import ImageNetRelease, unpack_imagenet_val

    _write_source(args, unpack_imagenet_val(ImageNetRelease(), args.source, args.out, _progress))
    return 0


def _index(args: argparse.Namespace) -> int:
    """Write the index of each split that there is; returns 0."""
    from zoo.data.folder import write_source_index
    from zoo.data.index import index_path

    for root in _splits(local(args.data)):
        count = write_source_index(root)
        print(f"{_counted(count, 'image')}; {printable(index_path(root))}")
    return 0


def _shard(args: argparse.Namespace) -> int:
    """Write the shards of each split that there is; returns 0."""
    from zoo.data.folder import open_source
    from zoo.data.shards import write_shards

    for root in _splits(local(args.data)):
        is_train = root.name == "train"
        source, target = open_source(root, allow_empty_classes=not is_train), args.out / root.name
        count = write_shards(
            source, target, per_shard=args.per_shard, seed=args.seed if is_train else None, show_progress=_progress
        )
        print(f"{_counted(len(source.names), 'image')} in {_counted(count, 'shard')}; {printable(target)}")
    return 0


def _splits(data: Path) -> list[Path]:
    """Return those of DATA/train and DATA/val that there are; DataError if there is neither."""
    from zoo.data.parquet import parquet_files

    roots = [data / "train", data / "val"]
    found = [root for root in roots if root.is_dir() or parquet_files(root)]
    if not found:
        raise DataError(f"there is neither train/ nor val/; {printable(data)}: give a folder that holds one of them")
    return found


def _progress(split: str, total: int) -> Progress:
    from zoo.run.console import Progress

    return Progress(split, total, unit="images")


def _write_source(args: argparse.Namespace, md5s: dict[str, str]) -> None:
    """Write OUT/KIND.json, which says what the class folders were made of and by which version."""
    from zoo.files import write_json
    from zoo.run.environment import checkout_commit, utc_now, version_of

    content = {"made_by": f"zoo data {args.kind}", "zoo": version_of("zoo"), "commit": checkout_commit(),
               "date": utc_now(), "md5_of_source": md5s}  # fmt: skip
    write_json(args.out / f"{args.kind}.json", content)
    print(f"written to {printable(args.out)}; {args.kind}.json there says what it was made of")


def _described(report: SplitReport) -> str:
    """Return what is in a split, the table of its classes, and its faults."""
    images, faults = _counted(report.num_images, "image"), _counted(len(report.faults), "fault")
    lines = [f"{report.split}: {images}{_sizes(report.sizes)}, {faults}"]
    if report.num_images:
        lines += ["", _table(report)]
    lines += ["", *(f"fault: {printable(fault)}" for fault in report.faults)] if report.faults else []
    return "\n".join(lines)


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _sizes(sizes: Counter[tuple[int, int]]) -> str:
    if not sizes:
        return ""
    (width, height), (most_width, most_height) = (
        chosen(sizes, key=lambda size: size[0] * size[1]) for chosen in (min, max)
    )
    if len(sizes) == 1:
        return f" of {width} x {height} px"
    return f" in {len(sizes):,} sizes, from {width} x {height} to {most_width} x {most_height} px"


def _table(report: SplitReport) -> str:
    """Return the classes with the images that hold them, and with the share of the pixels that they have."""
    from zoo.tables import markdown_table

    counted = zip(report.classes, report.images, strict=True)
    rows: list[list[Cell]] = [[printable(name), int(count)] for name, count in counted]
    if report.pixels is None:
        return markdown_table(["class", "images"], rows)
    shares = 100 * report.pixels / max(1, report.pixels.sum())
    rows.append(["(void)", None])
    rows = [[number, *row, float(share)] for number, (row, share) in enumerate(zip(rows, shares, strict=True))]
    rows[-1][0] = None
    return markdown_table(["number", "class", "images with it", "pixels, %"], rows)
