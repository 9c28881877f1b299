"""Process groups of the synchronised norms."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

_groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}


def active_group(active: bool) -> dist.ProcessGroup | None:
    """Return the group of all processes that call this with ``active=True``; None if none does, or to one that did not.

    Collective: every process of the default group calls it.  A group is made once and cached.
    """
    world_size = dist.get_world_size()
    answers: list[bool] = [False] * world_size
    dist.all_gather_object(answers, active)
    ranks = tuple(rank for rank, answer in enumerate(answers) if answer)
    if not ranks:
        return None
    if len(ranks) == world_size:
        return dist.group.WORLD
    if ranks not in _groups:
        group = dist.new_group(list(ranks))
        # The others get a mark that is no group; to them the group is as little use as to a caller without one.
        _groups[ranks] = group if isinstance(group, dist.ProcessGroup) else None
    return _groups[ranks]


def set_active_group(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Make every synchronised norm in ``module`` (every submodule with ``set_group``) use ``group``."""
    for submodule in module.modules():
        set_group = getattr(submodule, "set_group", None)
        if callable(set_group):
            set_group(group)
