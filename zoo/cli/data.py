"""``zoo data``: check, index and shard data sets."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from zoo.cli.options import (
    Command,
    DataFolder,
    Group,
    Positive,
    WholeNumber,
    argument,
    default_workers,
    option,
    positive,
)
from zoo.data.location import DataName, require_folder, require_local
from zoo.errors import ConfigError, DataError, escape
from zoo.tables import counted

if TYPE_CHECKING:
    from zoo.data.location import DataPath
    from zoo.data.source import Source
    from zoo.run.console import Progress


def quality(text: str) -> int:
    """Return ``text`` as a JPEG quality, 1 to 100."""
    if positive(text) > 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a JPEG quality from 1 to 100")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class DataCheck(Command):
    """Read every image and label map of DATA, and print all faults."""

    config: str = argument("CONFIG")
    """Experiment to train: its file or name."""
    data: DataFolder = argument("DATA")
    """Data set, as for zoo train."""
    workers: WholeNumber = option("-j", default_factory=default_workers(4))
    """Threads that read files (default: number of cores, at most 4)."""

    def run(self) -> int:
        from zoo.config import load_experiment
        from zoo.data.prepare.check import check_data

        config = load_experiment(self.config)
        reports = check_data(config, require_folder(self.data), self.workers, _progress)
        for report in reports:
            print(f"{report.split}: {counted(report.num_images, 'image')}, {counted(len(report.faults), 'fault')}")
            print("".join(f"fault: {escape(fault)}\n" for fault in report.faults), end="")
        num_faults = sum(len(report.faults) for report in reports)
        if num_faults:
            raise DataError(
                f"{counted(num_faults, 'fault')}, listed above",
                self.data,
                "repair or remove these files, and check again",
            )
        return 0


@dataclass(frozen=True, kw_only=True)
class DataIndex(Command):
    """Write DATA/train.index and DATA/val.index, which have the position of each image in shards of other tools."""

    data: DataFolder = argument("DATA")
    """Folder of shards."""

    def run(self) -> int:
        from zoo.data.index import index_path
        from zoo.data.shards import has_shards, write_shard_index

        for root in _splits(require_local(self.data)):
            if not has_shards(root):
                raise DataError("there are no tar files, and class folders need no index", root)
            count = write_shard_index(root)
            print(f"{counted(count, 'image')}; {escape(index_path(root))}")
        return 0


@dataclass(frozen=True, kw_only=True)
class DataShard(Command):
    """Write the images of class folders, or of a data set by name, into tar shards in webdataset's layout.

    With --resize, an image whose shorter side exceeds PX is resized with Lanczos' filter and encoded as JPEG with 4:2:0
    subsampling. All other images are copied byte for byte, or encoded as PNG if DATA has only their pixels. The index
    records the settings and the encoder.
    """

    data: DataFolder = argument("DATA")
    """Data set, as for zoo train."""
    out: Path = argument("OUT")
    """Folder to create train/ and val/ in."""
    per_shard: Positive = 1000
    """Images per shard."""
    seed: WholeNumber = 0
    """Seed of the order of training images; validation images keep theirs."""
    resize: Positive | None = option(metavar="PX")
    """Resize larger images to this length of their shorter side."""
    quality: Annotated[int, quality] | None = option(metavar="Q")
    """JPEG quality of resized images, 1 to 100 (default: 90)."""
    workers: WholeNumber = option("-j", default_factory=default_workers(4))
    """Threads that resize images (default: number of cores, at most 4)."""

    def run(self) -> int:
        from zoo.data.prepare.resizing import Resizing
        from zoo.data.prepare.write_shards import write_shards

        if self.quality is not None and self.resize is None:
            what = f"--quality {self.quality} has no effect, because images are copied"
            raise ConfigError(what, "command line", "give --resize PX too, or leave out --quality")
        resizing = None
        if self.resize is not None:
            resizing = Resizing(self.resize) if self.quality is None else Resizing(self.resize, self.quality)
        for split, source in _sources(self.data):
            is_train, target = split == "train", self.out / split
            count = write_shards(
                source, target, per_shard=self.per_shard, seed=self.seed if is_train else None,
                show_progress=_progress, resizing=resizing, workers=self.workers,
            )  # fmt: skip
            print(f"{counted(len(source.names), 'image')} in {counted(count, 'shard')}; {escape(target)}")
        return 0


DATA = Group(
    "Check, index or shard a data set",
    {
        "check": DataCheck,
        "index": DataIndex,
        "shard": DataShard,
    },
)


def _sources(data: DataPath | DataName) -> Iterator[tuple[str, Source]]:
    """Yield the splits of ``data``, "train" and "val", and their images; DataError if a folder has neither."""
    from zoo.data.folder import open_source
    from zoo.data.map_dataset import Datasets
    from zoo.data.named import open_data
    from zoo.data.prepare.dataset_source import DatasetSource

    opened = open_data(data)
    if isinstance(opened, Datasets):
        for split, dataset in (("train", opened.train), ("val", opened.val)):
            yield split, DatasetSource(dataset, split)
        return
    for root in _splits(require_local(opened)):
        yield root.name, open_source(root, allow_empty_classes=root.name != "train")


def _splits(data: Path) -> list[Path]:
    """Return which of DATA/train and DATA/val exist; DataError if neither does."""
    found = [root for root in (data / "train", data / "val") if root.is_dir()]
    if not found:
        raise DataError("there is neither train/ nor val/", data, "give a folder that holds one of them")
    return found


def _progress(split: str, total: int) -> Progress:
    from zoo.run.console import Progress

    return Progress(split, total, unit="images")
