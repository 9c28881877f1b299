"""Maps back ends to their kernels of the fused activated batch norm."""

from __future__ import annotations

from torch import Tensor

from zoo.ops.abn.native import NativeKernels
from zoo.ops.abn.reference import ReferenceKernels
from zoo.ops.abn.triton import TritonKernels
from zoo.ops.backend import back_end_for

KERNELS: dict[str, ReferenceKernels] = {
    "reference": ReferenceKernels(),
    "native": NativeKernels(),
    "triton": TritonKernels(),
}


def kernels_for(x: Tensor) -> ReferenceKernels:
    """Return the kernels of the back end for the device of x."""
    return KERNELS[back_end_for(x)]
