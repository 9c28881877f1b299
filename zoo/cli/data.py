"""``zoo data``: check and shard data sets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zoo.cli.options import (
    Command,
    DataFolder,
    Group,
    Positive,
    WholeNumber,
    argument,
    default_workers,
    option,
)
from zoo.data.sources.location import require_local
from zoo.errors import DataError, escape
from zoo.tables import counted


@dataclass(frozen=True, kw_only=True)
class DataCheck(Command):
    """Read every image and label map of DATA, and print all unreadable files."""

    example = "zoo data check resnet18 DATA"
    config: str = argument("CONFIG")
    """Experiment or architecture to train, as for zoo train."""
    data: DataFolder = argument("DATA")
    """Data set, as for zoo train."""
    workers: WholeNumber = option("-j", default=default_workers(4))
    """Threads that read files (default: number of cores, at most 4)."""

    def run(self) -> int:
        from zoo.config.experiment import Experiment
        from zoo.data.loader import DEFAULT_OPTIONS
        from zoo.data.named import open_data
        from zoo.data.prepare.check import check_images
        from zoo.registry.experiments import default_experiment, open_experiment
        from zoo.run.training import build_loaders
        from zoo.tasks import task_of

        data, named = open_data(self.data), open_experiment(self.config)
        config = named if isinstance(named, Experiment) else default_experiment(named, data)
        if config.segmentation is not None:  # class-uniform sampling reads all label maps, but draws only some images
            segmentation = config.segmentation.model_copy(update={"class_uniform": False})
            config = config.model_copy(update={"segmentation": segmentation})
        num_faults = 0
        loaders = build_loaders(task_of(config), data, DEFAULT_OPTIONS)
        for split, loader in zip(("train", "val"), loaders, strict=True):
            assert loader is not None, "folders and named data sets have images to validate on"
            faults, absent = check_images(loader.dataset, split, self.workers)
            num_faults += len(faults)
            print(f"{split}: {counted(len(loader.dataset), 'image')}, {counted(len(faults), 'fault')}")
            print("".join(f"fault: {escape(fault)}\n" for fault in faults), end="")
            print(f"warning: {escape(absent)}\n" if absent else "", end="")
        if num_faults:
            raise DataError(f"{counted(num_faults, 'fault')}, listed above", self.data, "repair or remove these files")
        return 0


@dataclass(frozen=True, kw_only=True)
class DataShard(Command):
    """Write the images of class folders into tar shards in webdataset's layout, byte for byte."""

    example = "zoo data shard DATA DATA-shards"
    data: DataFolder = argument("DATA")
    """Folder with class folders in train/ and val/, or in one of them."""
    out: Path = argument("OUT")
    """Folder to create train/ and val/ in."""
    per_shard: Positive = 1000
    """Images per shard."""
    seed: WholeNumber = 0
    """Seed of the order of training images; validation images keep their order."""

    def run(self) -> int:
        from zoo.data.prepare.write_shards import write_shards
        from zoo.data.sources.folder import FolderSource

        for root in _splits(require_local(self.data)):
            is_train, target = root.name == "train", self.out / root.name
            source = FolderSource(root, allow_empty_classes=not is_train)
            count = write_shards(source, target, per_shard=self.per_shard, seed=self.seed if is_train else None)
            print(f"{counted(len(source.names), 'image')} in {counted(count, 'shard')}; {escape(target)}")
        return 0


DATA = Group(
    "Check or shard a data set",
    {
        "check": DataCheck,
        "shard": DataShard,
    },
)


def _splits(data: Path) -> list[Path]:
    """Return the existing folders of DATA/train and DATA/val. Raises DataError if there are none."""
    found = [root for root in (data / "train", data / "val") if root.is_dir()]
    if not found:
        raise DataError("there is neither train/ nor val/", data, "give a folder that holds one of them")
    return found
