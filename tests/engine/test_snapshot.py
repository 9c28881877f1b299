"""A snapshot makes the same file as the state it was taken of, even if the state changes later."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from zoo.engine.snapshot import Snapshots


def _tree() -> dict[str, Any]:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4))
    module[2].weight.data = module[2].weight.data.half()
    tied = torch.arange(12.0).view(3, 4)
    return {
        "state_dict": module.to(memory_format=torch.channels_last).state_dict(),
        "views": [tied, tied.t(), tied[1:, 2]],
        "empty": (torch.zeros(0, 3), torch.tensor(7)),
        "plain": {"step": 3, "betas": (0.9, 0.999), "none": None},
    }


def _bytes(tree: Any) -> bytes:
    file = io.BytesIO()
    torch.save(tree, file)
    return file.getvalue()


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else []
    return [tensor for value in values for tensor in _tensors(value)]


def test_a_snapshot_makes_the_same_file_also_after_the_state_has_changed() -> None:
    tree = _tree()
    before = _bytes(tree)
    taken = Snapshots().take(tree)
    for tensor in _tensors(tree):
        tensor.zero_()
    tree["plain"]["step"] = 4
    assert _bytes(tree) != before
    assert _bytes(taken) == before


def test_state_dicts_keep_the_versions_of_their_modules() -> None:
    state_dict = nn.BatchNorm2d(2).state_dict()
    taken = Snapshots().take(state_dict)
    assert type(taken) is OrderedDict
    assert taken._metadata == state_dict._metadata  # type: ignore[attr-defined]


def test_what_shares_memory_in_the_state_does_in_the_snapshot() -> None:
    first, second, third = Snapshots().take(_tree())["views"]
    first[2, 2] = -1.0
    assert (second[2, 2], third[1]) == (-1.0, -1.0)


def test_the_next_snapshot_has_the_memory_of_the_one_before_where_sizes_are_the_same() -> None:
    snapshots = Snapshots()
    first = snapshots.take([torch.zeros(5), torch.zeros(6), torch.zeros(7)])
    second = snapshots.take([torch.ones(5), torch.ones(4)])
    third = snapshots.take([torch.ones(5), torch.ones(4), torch.ones(7)])
    places = [[tensor.data_ptr() for tensor in _tensors(tree)] for tree in (first, second, third)]
    assert places[0][0] == places[1][0] == places[2][0]
    assert places[1][1] == places[2][1]
    assert [tensor.tolist() for tensor in third] == [[1.0] * 5, [1.0] * 4, [1.0] * 7]
