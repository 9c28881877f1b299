"""In-place activated batch norm: kernels, autograd, synchronization, and the public function."""

from zoo.ops.abn.functional import inplace_abn

__all__ = ["inplace_abn"]
