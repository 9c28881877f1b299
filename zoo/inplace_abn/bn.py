"""The module ``bn`` with the norms of releases 0.x, as also found in copies in other repositories."""

from typing import Any

from torch import Tensor, nn

from zoo.inplace_abn import abn
from zoo.inplace_abn.functions import ACT_ELU, ACT_LEAKY_RELU, ACT_NONE, ACT_RELU, inplace_abn, inplace_abn_sync

__all__ = [
    "ABN",
    "ACT_ELU",
    "ACT_LEAKY_RELU",
    "ACT_NONE",
    "ACT_RELU",
    "InPlaceABN",
    "InPlaceABNSync",
    "InPlaceABNSyncWrapper",
    "InPlaceABNWrapper",
    "inplace_abn",
    "inplace_abn_sync",
]


class ABN(abn.ABN):
    """`zoo.inplace_abn.abn.ABN` whose alpha of ELU is 1."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.slope = self.activation_param


class InPlaceABN(ABN, abn.InPlaceABN):
    """`zoo.inplace_abn.abn.InPlaceABN` whose alpha of ELU is 1."""


class InPlaceABNSync(InPlaceABN, abn.InPlaceABNSync):
    """`zoo.inplace_abn.abn.InPlaceABNSync` whose alpha of ELU is 1."""


class InPlaceABNWrapper(nn.Module):
    """`InPlaceABN` as the submodule ``bn``, as in release 0.0.1. Takes the same arguments."""

    norm: type[ABN] = InPlaceABN

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__()
        self.bn = self.norm(*args, **settings)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized and activated x."""
        out: Tensor = self.bn(x)
        return out


class InPlaceABNSyncWrapper(InPlaceABNWrapper):
    """`InPlaceABNSync` as the submodule ``bn``, as in release 0.0.1. Takes the same arguments."""

    norm = InPlaceABNSync
