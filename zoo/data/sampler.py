"""Batch samplers for one process. They yield lists of keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.utils.data import Sampler

from zoo.data.seeding import mixed_seed
from zoo.errors import ConfigError, DataError
from zoo.tables import counted

# (epoch, index), with repeated augmentation also the number of the repetition, from 0.
Key = tuple[int, ...]
MIN_PER_NORM = 2  # images per forward pass, because the variance of a single value is undefined


def replicas_of(rank: int, world_size: int, replicas: int | None) -> range:
    """Return the numbers of the replicas that a process runs; only its rank without ``replicas``."""
    return range(rank, replicas or world_size, world_size)


class TrainBatches(Sampler[list[Key]]):
    """The training batches of one process. All processes together draw each image exactly once per epoch.

    With ``repeats`` each image of the permutation is repeated, and the epoch ends after ``num_images``. The repetitions
    of an image are neighbors in a global batch, and so on different processes, as in timm's RepeatAugSampler.

    Global batch i is a slice of the epoch's permutation, which depends only on (seed, epoch). Replica r of R gets
    [r::R] of the slice, so sizes differ by at most one. By default each process is a replica. If ``replicas`` are
    given, the processes divide them, and a process yields a list for each of its `own_replicas`, batch after batch. The
    last, partial batch is used unless a replica would get fewer than two images for each of its ``accumulate_steps``.
    It is then merged into the previous batch, and ``merged`` is True. Raises DataError if there are too few images for
    one batch.

    Args:
    - `num_images`: number of images in the data set.
    - `batch_size`: images per optimizer step, over all processes.
    - `rank`: number of this process.
    - `world_size`: number of processes.
    - `replicas`: number of replicas, at least ``world_size``; None for one per process.
    - `accumulate_steps`: gradient accumulation steps per batch.
    - `seed`: seed of the permutations.
    - `repeats`: how often an image is drawn in succession, each time with its own random numbers.
    - `order`: generator -> permutation of the images, (num_images,) int64; defaults to `torch.randperm`.
    """

    def __init__(
        self,
        num_images: int,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        replicas: int | None = None,
        accumulate_steps: int = 1,
        seed: int = 0,
        repeats: int = 1,
        order: Callable[[torch.Generator], torch.Tensor] | None = None,
    ) -> None:
        self.num_images = num_images
        self.batch_size = batch_size
        self.own_replicas = replicas_of(rank, world_size, replicas)
        self._num_replicas = replicas or world_size
        self.seed = seed
        self.repeats = repeats
        self._order = order
        self.epoch = 0
        self.first_batch = 0
        full, rest = divmod(num_images, batch_size)
        min_images = MIN_PER_NORM * accumulate_steps * self._num_replicas
        if full == 0 and rest < min_images:
            divided = counted(world_size, "process") if replicas is None else f"optimizer.replicas {replicas}"
            where = f"training data with {divided} and optimizer.accumulate_steps {accumulate_steps}"
            what = f"only {counted(num_images, 'image')}, too few for one optimizer step"
            raise DataError(what, where, f"give at least {counted(min_images, 'image')}")
        self.merged = 0 < rest < min_images
        self._num_batches = full + (rest >= min_images)

    def __len__(self) -> int:
        """The number of batches of an epoch, the same on all processes and independent of ``first_batch``."""
        return self._num_batches

    def global_size(self, batch: int) -> int:
        """Return the number of images of global batch ``batch`` over all processes."""
        start, end = self._bounds(batch)
        return end - start

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (from 0) of the next iteration, which starts at its first batch."""
        self.epoch = epoch
        self.first_batch = 0

    def skip_to(self, batch: int) -> None:
        """Resume the current epoch at ``batch``. Raises DataError if the epoch has no such batch."""
        if not 0 <= batch <= len(self):
            epoch = f"{counted(len(self), 'batch')} ({counted(self.num_images, 'image')})"
            what = f"there is no batch {batch} in an epoch of {epoch}"
            raise DataError(what, "training data", "use the data and batch size that the run was started with")
        self.first_batch = batch

    def __iter__(self) -> Iterator[list[Key]]:
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.epoch))
        order = torch.randperm(self.num_images, generator=generator) if self._order is None else self._order(generator)
        if self.repeats > 1:
            order = order.repeat_interleave(self.repeats)[: self.num_images]
        return self._batches(order, self.epoch, self.first_batch)

    def _batches(self, order: torch.Tensor, epoch: int, first_batch: int) -> Iterator[list[Key]]:
        for batch in range(first_batch, len(self)):
            start, end = self._bounds(batch)
            for replica in self.own_replicas:
                positions = range(start + replica, end, self._num_replicas)
                indices = order[positions.start : end : positions.step].tolist()
                if self.repeats == 1:
                    yield [(epoch, index) for index in indices]
                else:
                    yield [
                        (epoch, index, position % self.repeats)
                        for index, position in zip(indices, positions, strict=True)
                    ]

    def _bounds(self, batch: int) -> tuple[int, int]:
        start = batch * self.batch_size
        return start, self.num_images if batch == len(self) - 1 else start + self.batch_size


class ValBatches(Sampler[list[Key]]):
    """The validation batches of one process. All processes together draw each image exactly once, in order.

    Replica r of R gets images r, r + R, r + 2R and so on, see `TrainBatches`. A process may have fewer batches than
    another, or none; rank 0 has the most. The attribute ``num_images`` counts the images of all processes. The epoch of
    all keys is 0. Raises ConfigError for a limit below 1.

    Args:
    - `num_images`: number of images in the data set.
    - `batch_size`: images per batch.
    - `rank`: number of this process.
    - `world_size`: number of processes.
    - `replicas`: number of replicas, at least ``world_size``; None for one per process.
    - `limit`: number of images to draw, spread evenly over the data set; None for all.
    """

    def __init__(
        self,
        num_images: int,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        replicas: int | None = None,
        limit: int | None = None,
    ) -> None:
        if limit is not None and limit < 1:
            raise ConfigError(f"the number of images is limited to {limit}", "--limit", "give 1 or more")
        self.num_images = num_images if limit is None else min(limit, num_images)
        self.batch_size = batch_size
        self._all = num_images
        self._rank, self._world_size, self._replicas = rank, world_size, replicas

    def num_batches(self, rank: int) -> int:
        """Return the number of batches of a process."""
        return sum(-(-len(positions) // self.batch_size) for positions in self._positions(rank))

    def __len__(self) -> int:
        """The number of batches of this process."""
        return self.num_batches(self._rank)

    def __iter__(self) -> Iterator[list[Key]]:
        for positions in self._positions(self._rank):
            for start in range(0, len(positions), self.batch_size):
                chosen = positions[start : start + self.batch_size]
                yield [(0, position * self._all // self.num_images) for position in chosen]

    def _positions(self, rank: int) -> list[range]:
        """Return the positions of the images of each replica that a process runs."""
        step = self._replicas or self._world_size
        own = replicas_of(rank, self._world_size, self._replicas)
        return [range(replica, self.num_images, step) for replica in own]
