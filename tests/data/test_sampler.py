"""All processes together draw every image exactly once, and a run can be continued anywhere in an epoch."""

from __future__ import annotations

import itertools

import pytest
import torch

from zoo.data.sampler import TrainBatches, ValBatches

SIZES = (4, 5, 7, 16, 17, 31, 33, 64, 97)
BATCHES = (4, 8, 12, 48)
WORLDS = (1, 2, 3, 5)
ACCUMULATE = (1, 2, 3)


def _ranks(num: int, batch: int, world: int, accumulate: int = 1, seed: int = 0) -> list[TrainBatches]:
    options = {"world_size": world, "accumulate_steps": accumulate, "seed": seed}
    return [TrainBatches(num, batch, rank=rank, **options) for rank in range(world)]


def _valid_cases() -> list[tuple[int, int, int, int]]:
    cases = itertools.product(SIZES, BATCHES, WORLDS, ACCUMULATE)
    return [(n, b, w, a) for n, b, w, a in cases if n >= b or n // w >= 2 * a]


@pytest.mark.parametrize("epoch", [0, 3])
def test_each_epoch_draws_every_image_exactly_once_in_equal_shares(epoch: int) -> None:
    for num, batch, world, accumulate in _valid_cases():
        ranks = _ranks(num, batch, world, accumulate)
        for sampler in ranks:
            sampler.set_epoch(epoch)
        drawn = [list(sampler) for sampler in ranks]
        keys = [key for batches in drawn for keys in batches for key in keys]
        assert sorted(keys) == [(epoch, index) for index in range(num)], (num, batch, world, accumulate)
        assert {len(batches) for batches in drawn} == {len(ranks[0])}
        for index, shares in enumerate(zip(*drawn, strict=True)):
            sizes = [len(share) for share in shares]
            assert max(sizes) - min(sizes) <= 1
            assert sum(sizes) == ranks[0].global_size(index)


@pytest.mark.parametrize(
    ("num", "batch", "world", "accumulate", "merged", "sizes"),
    [
        (9, 4, 1, 1, True, [4, 5]),
        (10, 4, 1, 1, False, [4, 4, 2]),
        (19, 8, 2, 1, True, [8, 11]),
        (20, 8, 2, 1, False, [8, 8, 4]),
        (15, 8, 2, 2, True, [15]),
        (16, 8, 2, 2, False, [8, 8]),
        (6, 8, 3, 1, False, [6]),
    ],
)
def test_merged_images_equal_manual_merge(
    num: int, batch: int, world: int, accumulate: int, merged: bool, sizes: list[int]
) -> None:
    sampler = _ranks(num, batch, world, accumulate)[0]
    assert sampler.merged == merged
    assert [sampler.global_size(index) for index in range(len(sampler))] == sizes


def test_skipping_gives_tail_of_the_same_sequence() -> None:
    sampler = TrainBatches(97, 12, rank=1, world_size=2, seed=1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        whole = list(sampler)
        for first in range(len(sampler) + 1):
            sampler.skip_to(first)
            assert list(sampler) == whole[first:]
            assert len(sampler) == len(whole)


def _interleaved(shares: list[list[tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """Return the keys of a global batch from the keys of its ranks."""
    keys: list[tuple[int, ...]] = [()] * sum(map(len, shares))
    for rank, share in enumerate(shares):
        keys[rank :: len(shares)] = share
    return keys


@pytest.mark.parametrize("world", [1, 2, 4])
def test_repetitions_are_drawn_in_the_order_of_timm(world: int) -> None:
    distributed_sampler = pytest.importorskip("timm.data.distributed_sampler")
    images, batch, order = 64, 8, torch.randperm(64, generator=torch.Generator().manual_seed(3))
    for rank in range(world):
        batches = TrainBatches(images, batch, rank=rank, world_size=world, repeats=3, order=lambda _: order)
        reference = distributed_sampler.RepeatAugSampler(range(images), world, rank, num_repeats=3, shuffle=False)
        # The reference repeats images 0 to 63, and drops the last incomplete 256 of a larger data set.
        expected = [int(order[index]) for index in reference]
        assert [index for keys in batches for _, index, _ in keys] == expected


def test_repetitions_have_different_keys_and_epoch_keeps_its_length() -> None:
    for world in (1, 2, 3):
        ranks = [TrainBatches(20, 6, rank=rank, world_size=world, repeats=3, seed=1) for rank in range(world)]
        for batches in ranks:
            batches.set_epoch(2)
        keys = [key for shares in zip(*ranks, strict=True) for key in _interleaved(list(shares))]
        assert len(keys) == len(set(keys)) == 20
        assert [key[2] for key in keys] == [0, 1, 2] * 6 + [0, 1]
        assert len({key[1] for key in keys}) == 7
        if world == 1:
            expected = keys
            continued = TrainBatches(20, 6, repeats=3, seed=1)
            continued.set_epoch(2)
            continued.skip_to(2)
            assert [key for batch in continued for key in batch] == keys[12:]
        assert keys == expected


def test_order_is_function_of_seed_and_epoch() -> None:
    orders = set()
    for seed in range(3):
        first, second = (TrainBatches(97, 12, seed=seed) for _ in range(2))
        for epoch in range(3):
            first.set_epoch(epoch)
            second.set_epoch(epoch)
            order, running = list(first), iter(second)
            second.set_epoch(epoch + 1)  # does not change the running iteration
            assert list(running) == order
            orders.add(tuple(key[1] for keys in order for key in keys))
    assert len(orders) == 9


@pytest.mark.parametrize("limit", [None, 1, 2, 6, 16, 97, 1000])
@pytest.mark.parametrize("world", WORLDS)
def test_validation_draws_every_image_exactly_once_unpadded(world: int, limit: int | None) -> None:
    for num, batch in itertools.product(SIZES, (1, 3, 8, 200)):
        ranks = [ValBatches(num, batch, rank=rank, world_size=world, limit=limit) for rank in range(world)]
        drawn = [list(sampler) for sampler in ranks]
        indices = sorted(index for batches in drawn for keys in batches for _, index in keys)
        expected = num if limit is None else min(num, limit)
        assert len(indices) == len(set(indices)) == expected == ranks[0].num_images
        assert set(indices) <= set(range(num))
        assert [len(sampler) for sampler in ranks] == [len(batches) for batches in drawn]
        for batches in drawn:
            assert all(len(keys) == batch for keys in batches[:-1])
            assert all(0 < len(keys) <= batch for keys in batches)


def test_limit_is_spread_evenly_over_data_set() -> None:
    for num, limit in itertools.product((16, 97, 1000), (3, 7, 16)):
        indices = [index for keys in ValBatches(num, 4, limit=limit) for _, index in keys]
        gaps = [after - before for before, after in itertools.pairwise([*indices, num])]
        assert indices[0] == 0
        assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("replicas", [1, 3, 4, 8])
def test_replica_has_same_images_on_any_number_of_processes(replicas: int) -> None:
    for num, size, repeats in itertools.product((17, 64, 97), (8, 24), (1, 3)):
        if num < 2 * replicas:
            continue
        expected = [
            list(TrainBatches(num, size, rank=r, world_size=replicas, repeats=repeats)) for r in range(replicas)
        ]
        scored = [list(ValBatches(num, 4, rank=r, world_size=replicas)) for r in range(replicas)]
        for world in range(1, replicas + 1):
            for rank in range(world):
                share = {"rank": rank, "world_size": world, "replicas": replicas}
                batches, own = TrainBatches(num, size, repeats=repeats, **share), range(rank, replicas, world)
                assert len(batches) == len(expected[0])
                drawn = list(batches)
                assert batches.own_replicas == own
                assert drawn == [keys for step in zip(*[expected[r] for r in own], strict=True) for keys in step]
                val_batches = ValBatches(num, 4, **share)
                assert list(val_batches) == [keys for r in own for keys in scored[r]]
                assert len(val_batches) <= val_batches.num_batches(rank=0)


def test_last_batch_is_merged_alike_on_any_number_of_processes() -> None:
    for num in range(8, 40):
        sizes = {
            tuple(batches.global_size(batch) for batch in range(len(batches)))
            for batches in (TrainBatches(num, 16, rank=0, world_size=world, replicas=4) for world in (1, 2, 3, 4))
        }
        assert len(sizes) == 1
        assert min(sizes.pop()) >= 8
    assert len(TrainBatches(8, 16, world_size=2, accumulate_steps=2)) == 1
