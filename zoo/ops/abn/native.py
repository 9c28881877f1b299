"""The kernels for the CPU: operators of the compiled library. They equal reference.py up to rounding.

Contiguous and channels_last tensors are read in place. Tensors of other layouts are first copied to contiguous ones;
`apply_` copies the result back, and the other kernels then return contiguous tensors. ``dz`` and ``shortcut`` are
copied unless they have the layout of z. Results are reproducible bit for bit with the same number of threads. On the
meta device the operators return tensors without values.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zoo.ops.abn.reference import Means, NormSettings, ReferenceKernels, of_dtype

# Activation codes, as in csrc/numbers.h.
ACTIVATIONS = {"leaky_relu": 0, "elu": 1, "identity": 2}


class NativeKernels(ReferenceKernels):
    """The kernels of the CPU."""

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.zoo.abn_statistics.default(x)

    def track_statistics(
        self, x: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float
    ) -> tuple[Tensor, Tensor]:
        mean, var = torch.ops.zoo.abn_track_statistics.default(x, running_mean, running_var, momentum)
        increment_version((running_mean, running_var))  # the operator does not tell autograd that it has modified them
        return mean, var

    def apply(
        self, x: Tensor, mean: Tensor, var: Tensor, settings: NormSettings, shortcut: Tensor | None = None
    ) -> Tensor:
        return torch.ops.zoo.abn_apply.default(x, mean, var, *_operator_arguments(settings), shortcut)

    def apply_(
        self, x: Tensor, mean: Tensor, var: Tensor, settings: NormSettings, shortcut: Tensor | None = None
    ) -> None:
        torch.ops.zoo.abn_apply_.default(x, mean, var, *_operator_arguments(settings), shortcut)

    def backward(
        self, z: Tensor, dz: Tensor, var: Tensor, num_values: int | None, settings: NormSettings
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        arguments = z, dz, var, num_values is not None, *_operator_arguments(settings)
        dx, dweight, dbias = torch.ops.zoo.abn_backward.default(*arguments)
        return dx, of_dtype(dweight, settings.weight), of_dtype(dbias, settings.bias)

    def backward_reduce(
        self, z: Tensor, dz: Tensor, settings: NormSettings, shortcut: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return torch.ops.zoo.abn_backward_reduce.default(z, dz, *_operator_arguments(settings), shortcut)

    def backward_apply(
        self, z: Tensor, dz: Tensor, var: Tensor, means: Means, settings: NormSettings, shortcut: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        mean_dy, mean_dy_xhat = (None, None) if means is None else means
        arguments = (z, dz, var, mean_dy, mean_dy_xhat, *_operator_arguments(settings))
        if shortcut is None:
            return torch.ops.zoo.abn_backward_apply.default(*arguments), None
        return torch.ops.zoo.abn_backward_apply_shortcut.default(*arguments, shortcut)


def _operator_arguments(settings: NormSettings) -> tuple[Tensor | None, Tensor | None, float, int, float]:
    """Return the settings as arguments of the operators, with the activation as its code."""
    weight, bias, eps, activation, activation_param = settings
    return weight, bias, eps, ACTIVATIONS[activation], activation_param
