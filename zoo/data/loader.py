"""Data loaders. Batches are bit-identical with any number of workers."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pickle import PicklingError
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, get_worker_info

from zoo.config.experiment import Experiment
from zoo.data.classes import check_num_classes
from zoo.data.dataset import Batch, ImageDataset, ImageFolder, Sample, collate
from zoo.data.map_dataset import Datasets, MapDataset
from zoo.data.sampler import Key, TrainBatches, ValBatches, replicas_of
from zoo.data.sources.location import DataPath
from zoo.data.targets import weighted_order
from zoo.data.transforms.classification import TrainTransform, ValTransform
from zoo.errors import DataError, truncate
from zoo.torch_internals.data import end_workers

PREFETCHED = 2  # steps that a worker reads ahead
WORKER_GRACE_S = 2.0  # time for a worker to exit before it is killed
SHARED_MEMORY = "/dev/shm"
# Patterns of torch's RuntimeErrors about shared memory ("... No space left on device (28)") and file descriptors.
NO_SHARED_MEMORY = re.compile(r"shared memory|\(shm\)")
TOO_MANY_FILES = re.compile(rf"Too many open files|ancdata|\(({errno.EMFILE}|{errno.ENFILE})\)")

BatchesT = TypeVar("BatchesT", bound=Sampler[list[Key]])


@dataclass(frozen=True)
class LoaderOptions:
    """How a process reads its share of the images.

    Args:
    - `rank`, `world_size`: rank of the process, and number of processes that share the images.
    - `workers`: number of worker processes; 0 loads in this process.
    - `pin_memory`: as for torch's DataLoader.
    - `replicas`: number of replicas that share the images, see `TrainBatches`; None for one per process.
    """

    rank: int = 0
    world_size: int = 1
    workers: int = 0
    pin_memory: bool = False
    replicas: int | None = None

    @property
    def own_replicas(self) -> range:
        """The replicas of this process. The loader yields a batch for each."""
        return replicas_of(self.rank, self.world_size, self.replicas)


DEFAULT_OPTIONS = LoaderOptions()


class Loader(DataLoader[Sample], Generic[BatchesT]):
    """A DataLoader that yields `Batch` tuples and raises errors of its workers as one-line DataErrors.

    Args:
    - `dataset`: the images.
    - `batches`: the sampler; available as the attribute ``batch_sampler``.
    - `options`: workers and pin_memory.
    """

    dataset: ImageDataset
    batch_sampler: BatchesT

    def __init__(self, dataset: ImageDataset, batches: BatchesT, options: LoaderOptions) -> None:
        super().__init__(
            dataset,
            batch_sampler=batches,
            num_workers=options.workers,
            collate_fn=_collate_or_fault,
            pin_memory=options.pin_memory,
            prefetch_factor=PREFETCHED * len(options.own_replicas) if options.workers else None,
            worker_init_fn=_leave_process_group,
            # DataLoader draws the workers' base seed from this generator instead of the global one. The base seed is
            # unused, because the key of an image seeds its random numbers.
            generator=torch.Generator(),
            persistent_workers=options.workers > 0,
        )

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        """Return an iterator over the batches; this call starts prefetching."""
        try:
            return _raise_faults(super().__iter__())
        except OSError as error:  # the first iterator creates queues and processes
            raise DataError(f"the data workers cannot start: {error.strerror}; {shortage(str(error))}") from error
        except (PicklingError, AttributeError, TypeError) as error:  # pickle raises all of these
            if multiprocessing.get_start_method() == "fork" or "pickle" not in str(error):
                raise
            raise DataError(
                f"the data set cannot be sent to a worker ({truncate(error)})",
                remedy="define what it uses at the top level of a module, without lambdas, or use no workers",
            ) from error

    def stop_workers(self) -> None:
        """Terminate the worker processes, even hung ones; the next iterator starts new ones."""
        iterator: Any = self._iterator  # exists with persistent workers
        self._iterator = None
        if iterator is not None:
            end_workers(iterator, WORKER_GRACE_S)


def build_train_loader(
    data: DataPath | Datasets,
    config: Experiment,
    options: LoaderOptions = DEFAULT_OPTIONS,
) -> Loader[TrainBatches]:
    """Return the loader of ``data``/train, or of ``data.train``, for one process.

    Its ``batch_sampler`` holds the epoch and the position.

    Raises DataError if the folder is unusable, has more classes than the network, or does not support
    ``input.shuffle_shards``; and for ``input.sampling_train`` if the labels of a data set are not known.
    """
    transform = TrainTransform(config.input)
    if isinstance(data, Datasets):
        num_classes = config.network.num_classes
        own = MapDataset(data.train, transform, num_classes, seed=config.seed)
        return loader_of_crops(own, config, options, order=_weighted_order(own, config))
    images = ImageFolder(data / "train", transform, seed=config.seed)
    check_num_classes(images, config.network.num_classes)
    order = _weighted_order(images, config) or partial(images.source.order, window=config.input.shuffle_shards)
    order(torch.Generator())  # raises for an invalid window before the workers start
    return loader_of_crops(images, config, options, order=order)


def _weighted_order(images: ImageDataset, config: Experiment) -> Callable[[torch.Generator], Tensor] | None:
    """Return the function that draws the images of an epoch by ``input.sampling_train``; None if it is not set."""
    setting = config.input.sampling_train
    if setting is None:
        return None
    return weighted_order(setting, images.targets(), config.network.num_classes, images.root)


def loader_of_crops(
    dataset: ImageDataset,
    config: Experiment,
    options: LoaderOptions,
    order: Callable[[torch.Generator], Tensor] | None = None,
) -> Loader[TrainBatches]:
    """Return the training loader of ``dataset`` for one process; ``order`` is for `TrainBatches`."""
    batches = TrainBatches(
        len(dataset),
        config.optimizer.batch_size,
        rank=options.rank,
        world_size=options.world_size,
        replicas=options.replicas,
        accumulate_steps=config.optimizer.accumulate_steps,
        seed=config.seed,
        repeats=config.input.repeats_train,
        order=order,
    )
    return Loader(dataset, batches, options)


def build_val_loader(
    data: DataPath | Datasets,
    transform: ValTransform,
    batch_size: int,
    options: LoaderOptions = DEFAULT_OPTIONS,
    *,
    split: str = "val",
    limit: int | None = None,
    num_classes: int | None = None,
) -> Loader[ValBatches]:
    """Return the loader of ``data``/``split`` or ``data.val``, for one process, with ``batch_size`` images per batch.

    ``batch_sampler.num_images`` counts the images of all processes. ``num_classes`` is checked for data sets, see
    `MapDataset`. Raises DataError if the folder is unusable.
    """
    images: ImageDataset
    if isinstance(data, Datasets):
        assert data.val is not None
        images = MapDataset(data.val, transform, num_classes)
    else:
        images = ImageFolder(data / split, transform, allow_empty_classes=True)
    return Loader(images, val_batches(images, batch_size, options, limit), options)


def val_batches(images: ImageDataset, batch_size: int, options: LoaderOptions, limit: int | None) -> ValBatches:
    """Return the validation batches of one process."""
    share: dict[str, Any] = {"rank": options.rank, "world_size": options.world_size, "replicas": options.replicas}
    return ValBatches(len(images), batch_size, **share, limit=limit)


def _leave_process_group(worker: int) -> None:
    """Move a worker into its own process group.

    Ctrl-C and a launcher's SIGTERM go to whole groups. On a signal, the main process finishes its step and needs its
    workers for it. Workers still exit with the main process, because torch's workers watch their parent.
    """
    if hasattr(os, "setpgid"):  # not on Windows
        os.setpgid(0, 0)


def _collate_or_fault(samples: list[Sample] | DataError) -> Batch | DataError:
    """Collate ``samples``; return a DataError in a worker if its shared memory has no room for the batch."""
    try:
        return collate(samples)
    except RuntimeError as error:
        if isinstance(samples, DataError) or get_worker_info() is None or not NO_SHARED_MEMORY.search(str(error)):
            raise
        size = sum(sample.drawn.pixels.nbytes for sample in samples)
        what = f"a data worker cannot share its batch of {size / 1e6:,.1f} MB ({truncate(error)})"
        return DataError(f"{what}; {shortage(str(error))}")


def shortage(reason: str) -> str:
    """Return what data workers lack by the text of an error, file descriptors or shared memory, and the remedy."""
    if TOO_MANY_FILES.search(reason):
        return "--workers: use fewer workers, or allow more open files with ulimit -n"
    try:
        size = shutil.disk_usage(SHARED_MEMORY)
        room = f"{SHARED_MEMORY} has {size.total / 1e6:,.1f} MB, of which {size.free / 1e6:,.1f} MB are free"
    except OSError as error:
        room = f"{SHARED_MEMORY} cannot be used ({error.strerror})"
    return f"{room}; --workers: use fewer workers, or a larger {SHARED_MEMORY} (docker run --shm-size 8g)"


def _raise_faults(batches: Iterator[Batch | DataError]) -> Iterator[Batch]:
    for batch in _concise(batches):
        if isinstance(batch, DataError):
            # Raising the local variable would create a reference cycle of the exception, this frame and the workers.
            # When the garbage collector finds workers in a cycle, torch waits 5 s for each.
            raise DataError(*batch.args)
        yield batch


def _concise(batches: Iterator[Batch | DataError]) -> Iterator[Batch | DataError]:
    """Yield ``batches``, replacing torch's RuntimeError about too many open files by a one-line DataError."""
    try:
        yield from batches
    except (RuntimeError, OSError) as error:
        if not TOO_MANY_FILES.search(str(error)):
            raise
        raise DataError(f"batches cannot be received from data workers; {shortage(str(error))}") from error
