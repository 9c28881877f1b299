"""The contract of a norm back end: the kernels of the fused activated batch norm, their shapes and their dtypes.

Notation, per channel: mean m and biased variance v of x, scale g, bias b, activation f, and

    x_hat = (x - m) / sqrt(v + eps),    y = g x_hat + b + s,    z = f(y)

where s is the shortcut of a residual sum, of the shape and dtype of x, or absent, and g = |weight| + eps, so that y
can be inverted (Rota Bulo et al., CVPR 2018, section 3; the absolute value is that of the published code). Without
weight g = 1, without bias b = 0. The derivation of the backward formulas is in csrc/README.md.

A back end is a module with these functions: reference.py (plain torch), native.py (C++, CPU), triton.py (CUDA) and
meta.py (bytes without numbers). None of them knows autograd or communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor


class NormSettings(NamedTuple):
    """What turns x_hat into z and back: weight and bias of shape (C,) or None, eps, activation and its parameter."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    activation: str
    activation_param: float


Backward = Callable[[Tensor, Tensor, Tensor, bool, NormSettings], tuple[Tensor, Tensor, Tensor]]
Means = tuple[Tensor, Tensor] | None  # of dy and dy x_hat over a channel
TrackStatistics = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
ReduceGradients = Callable[
    [Tensor, Tensor, int, NormSettings, Tensor | None], tuple[Tensor, Tensor | None, Tensor | None]
]
LocalStatistics = Callable[[Tensor], Tensor]
GroupStatistics = Callable[[Tensor, torch.dtype, Tensor | None, Tensor | None, float], tuple[Tensor, Tensor, Tensor]]
TrainingForward = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, NormSettings, Tensor | None], Tensor]


class Kernels(Protocol):
    """The kernels of one back end; the properties are optional, and None where a back end does not have them.

    x, z, their gradients and the shortcut are (N, C, ...) tensors of one shape and dtype, of any strides; vectors are
    (C,). Statistics, sums and means are computed in the accumulation dtype (`accumulate_dtype`).
    """

    __name__: str

    def unavailable_reason(self) -> str | None:
        """Return why these kernels cannot be used here; None where they can."""

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

        Both are new tensors of the shape and dtype of z. ``means`` holds the two means, (C,). None stands for
        statistics that do not depend on x: then dL/dx is g / sqrt(v + eps) dy.
        """

    @property
    def backward(self) -> Backward | None:
        """backward(z, dz, var, batch, settings): the backward pass of one process without a shortcut, in one kernel.

        It returns dL/dx, like z, and dL/dweight and dL/dbias, (C,), in the accumulation dtype. ``batch`` says that the
        statistics are those of x; otherwise they do not depend on x.
        """

    @property
    def track_statistics(self) -> TrackStatistics | None:
        """track_statistics(x, running_mean, running_var, momentum): `statistics` and the running ones, in one kernel.

        It returns what `statistics` does, and moves the running ones, (C,), in place by ``momentum`` towards those of
        the batch, the variance towards the unbiased one.
        """

    @property
    def reduce_gradients(self) -> ReduceGradients | None:
        """reduce_gradients(z, dz, divisor, settings, shortcut): `backward_reduce`, and what follows from its sums.

        It returns the two sums over ``divisor``, (2, C), and dL/dweight and dL/dbias, (C,), in the dtypes of weight and
        bias, or None for one that is not there.
        """

    @property
    def local_statistics(self) -> LocalStatistics | None:
        """local_statistics(x): `statistics` and the number of values per channel as one float64 tensor, (2 C + 1,)."""

    @property
    def group_statistics(self) -> GroupStatistics | None:
        """group_statistics(gathered, dtype, running_mean, running_var, momentum): the statistics of a process group.

        ``gathered`` is (processes, 2 C + 1), a row of `local_statistics` for each. It returns mean and biased variance,
        (C,), and the number of values per channel, without dimensions, in ``dtype``. The running ones, unless they are
        None, are moved as by `track_statistics`. A back end has either this and `local_statistics` or neither.
        """

    @property
    def forward_(self) -> TrainingForward | None:
        """forward_(x, running_mean, running_var, num_batches, momentum, settings, shortcut): training in one kernel.

        It does what `track_statistics` does, adds 1 to ``num_batches``, a number without dimensions or None, does what
        `apply_` does with these statistics, and returns the variance.
        """


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the statistics and sums of tensors of ``dtype``: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


def laid_out(x: MaybeTensor, like: Tensor) -> MaybeTensor:
    """Return x, or a copy of it, in the layout of the tensor ``like``, which is of its shape; None for None."""
    return x if x is None or x.stride() == like.stride() else torch.empty_like(like).copy_(x)
