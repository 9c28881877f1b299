"""The interface of norm back ends: the kernels of the fused activated batch norm, their shapes and dtypes.

Notation, per channel: mean m and biased variance v of x, scale g, bias b, activation f, and

    x_hat = (x - m) / sqrt(v + eps),    y = g x_hat + b + s,    z = f(y)

where s is the optional shortcut of a residual sum, of the shape and dtype of x, and g = |weight| + eps, which makes y
invertible (Rota Bulo et al., CVPR 2018, section 3; the absolute value is from the published code). Without weight
g = 1, without bias b = 0. csrc/README.md derives the backward formulas.

A back end is a module with these functions: reference.py (plain torch), native.py (C++, CPU; only shapes on the meta
device) and triton.py (CUDA). Kernels neither record autograd nor communicate between processes.

Tested by tests/ops/abn/test_native.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor


class NormSettings(NamedTuple):
    """The parameters of z = f(g x_hat + b): weight and bias, (C,) or None, eps, activation and its parameter."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    activation: str
    activation_param: float


Backward = Callable[[Tensor, Tensor, Tensor, bool, NormSettings], tuple[Tensor, Tensor, Tensor]]
Means = tuple[Tensor, Tensor] | None  # the means of dy and dy x_hat per channel
TrackStatistics = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
ReduceGradients = Callable[
    [Tensor, Tensor, int, NormSettings, Tensor | None], tuple[Tensor, Tensor | None, Tensor | None]
]
LocalStatistics = Callable[[Tensor], Tensor]
GroupStatistics = Callable[[Tensor, torch.dtype, Tensor | None, Tensor | None, float], tuple[Tensor, Tensor, Tensor]]


class Kernels(Protocol):
    """The kernels of one back end. The properties are optional kernels, None where a back end has no such kernel.

    x, z, their gradients and the shortcut are (N, C, ...) tensors of one shape and dtype, of any strides; vectors are
    (C,). Statistics, sums and means are computed in the accumulation dtype (`accumulate_dtype`).
    """

    __name__: str

    def unavailable_reason(self) -> str | None:
        """Return why these kernels are unavailable here, or None if they are available."""

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and biased variance per channel, (C,); zeros for a tensor without elements."""

    def apply(
        self, x: Tensor, mean: Tensor, var: Tensor, settings: NormSettings, shortcut: Tensor | None = None
    ) -> Tensor:
        """Return z in a new tensor of the shape and dtype of x."""

    def apply_(
        self, x: Tensor, mean: Tensor, var: Tensor, settings: NormSettings, shortcut: Tensor | None = None
    ) -> None:
        """Overwrite x with z."""

    def backward_reduce(
        self, z: Tensor, dz: Tensor, settings: NormSettings, shortcut: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return sum(dy) and sum(dy x_hat) per channel, (C,)."""

    def backward_apply(
        self, z: Tensor, dz: Tensor, var: Tensor, means: Means, settings: NormSettings, shortcut: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return dL/dx = g / sqrt(v + eps) (dy - mean(dy) - x_hat mean(dy x_hat)), and dL/ds = dy with a shortcut.

        Both are new tensors of the shape and dtype of z. ``means`` are the two means, (C,). None means that the
        statistics do not depend on x: dL/dx = g / sqrt(v + eps) dy.
        """

    @property
    def backward(self) -> Backward | None:
        """backward(z, dz, var, batch, settings): the backward pass of one process without a shortcut, in one kernel.

        Returns dL/dx, like z, and dL/dweight and dL/dbias, (C,), in the accumulation dtype. ``batch`` is True if the
        statistics are the statistics of x, and False if they do not depend on x.
        """

    @property
    def track_statistics(self) -> TrackStatistics | None:
        """track_statistics(x, running_mean, running_var, momentum): `statistics` and running averages in one kernel.

        Returns the result of `statistics`, and updates the running statistics, (C,), in place: r becomes
        r + momentum (batch - r), with the unbiased variance.
        """

    @property
    def reduce_gradients(self) -> ReduceGradients | None:
        """reduce_gradients(z, dz, divisor, settings, shortcut): `backward_reduce` and the gradients of the parameters.

        Returns the two sums divided by ``divisor``, (2, C), and dL/dweight and dL/dbias, (C,), in the dtypes of weight
        and bias, or None without weight or bias.
        """

    @property
    def local_statistics(self) -> LocalStatistics | None:
        """local_statistics(x): `statistics` and the number of values per channel as one float64 tensor, (2 C + 1,)."""

    @property
    def group_statistics(self) -> GroupStatistics | None:
        """group_statistics(gathered, dtype, running_mean, running_var, momentum): the statistics of a process group.

        ``gathered`` is (processes, 2 C + 1), a row of `local_statistics` per process. Returns mean and biased variance,
        (C,), and the number of values per channel, zero-dimensional, in ``dtype``. Running statistics that are not None
        are updated as by `track_statistics`. A back end has both this kernel and `local_statistics`, or neither.
        """


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the statistics and sums of tensors of ``dtype``: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def new_vectors(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return two uninitialized vectors with a value per channel of x, in the accumulation dtype."""
    dtype = accumulate_dtype(x.dtype)
    return x.new_empty(x.shape[1], dtype=dtype), x.new_empty(x.shape[1], dtype=dtype)


MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


def laid_out(x: MaybeTensor, like: Tensor) -> MaybeTensor:
    """Return x in the layout of ``like``, a tensor of the same shape; copies if needed. None for None."""
    return x if x is None or x.stride() == like.stride() else torch.empty_like(like).copy_(x)
