"""Groups over which a norm is synchronized: processes, or replicas of a network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

import torch.distributed as dist
from torch import Tensor


class ReplicaGroup(ABC):
    """Replicas of a network, of which a process may run several."""

    @abstractmethod
    def gather(self, x: Tensor) -> Tensor:
        """Return the tensors x of all replicas, of one shape and dtype, as (replicas, *x.shape), in a fixed order.

        All replicas have to call it equally often.
        """


Group: TypeAlias = "dist.ProcessGroup | ReplicaGroup"
