"""In-place activated batch norm: kernels, autograd, synchronization, and the two public functions."""

from zoo.ops.abn.functional import inplace_abn, inplace_abn_sync

__all__ = ["inplace_abn", "inplace_abn_sync"]
