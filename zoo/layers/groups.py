"""Process groups of the synchronised norms."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

_groups: dict[tuple[Any, tuple[int, ...]], Any] = {}


def active_group(active: bool) -> Any:
    """Return the group of all processes that call this with ``active=True``; None if none does.

    Collective: every process of the default group calls it.  A group is made once and cached.  A process that is not
    active gets torch's mark for that, with which norms do not synchronise.
    """
    world_size = dist.get_world_size()
    answers: list[bool] = [False] * world_size
    dist.all_gather_object(answers, active)
    ranks = tuple(rank for rank, answer in enumerate(answers) if answer)
    if not ranks:
        return None
    if len(ranks) == world_size:
        return dist.group.WORLD
    key = (dist.group.WORLD, ranks)  # a group does not outlive the default group that it was made in
    if key not in _groups:
        _groups[key] = dist.new_group(list(ranks))
    return _groups[key]


def set_active_group(module: nn.Module, group: Any) -> None:
    """Make every synchronised norm in ``module`` (every submodule with ``set_group``) use ``group``."""
    for submodule in module.modules():
        set_group = getattr(submodule, "set_group", None)
        if callable(set_group):
            set_group(group)
