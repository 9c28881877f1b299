"""The module of the norms in releases 0.x.

Tested by tests/inplace_abn/test_init.py.
"""

from zoo.inplace_abn.abn import ABN, InPlaceABN, InPlaceABNSync
from zoo.inplace_abn.functions import ACT_ELU, ACT_LEAKY_RELU, ACT_NONE, ACT_RELU

__all__ = ["ABN", "ACT_ELU", "ACT_LEAKY_RELU", "ACT_NONE", "ACT_RELU", "InPlaceABN", "InPlaceABNSync"]
