"""The five strategies of Figure 2 of the InPlace-ABN paper for its block BN + ACT + CONV, in plain torch operations.

For comparison with each other only (Rota Bulo et al., CVPR 2018, Figure 2 and the right half of Table 1): networks use
the faster operations of zoo/ops. As in the paper, gamma keeps its sign.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

EPS, SLOPE = 1e-5, 0.01
STRATEGIES = {
    "standard": "(a) saves x and z",
    "checkpoint": "(b) saves x, recomputes norm and activation",
    "checkpoint_xhat": "(c) saves x_hat, recomputes scale, shift and activation",
    "inplace_1": "(d) saves z, inverts activation, scale and shift",
    "inplace_2": "(e) saves z, inverts the activation",
}


class Block(nn.Module):
    """The paper's block, with a 3x3 convolution with equal input and output channels.

    Args:
    - `channels`: channels of input and output.
    - `groups`: groups of the convolution.
    - `strategy`: key of `STRATEGIES`.
    """

    def __init__(self, channels: int, groups: int, strategy: str) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.weight = nn.Parameter(torch.randn(channels, channels // groups, 3, 3))
        self.groups, self.strategy = groups, strategy

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution's output, with the shape of x: (N, channels, H, W)."""
        return bn_act_conv(x, self.gamma, self.beta, self.weight, self.strategy, self.groups)


def bn_act_conv(x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, strategy: str, groups: int = 1) -> Tensor:
    """Return conv(leaky_relu(gamma x_hat + beta)), where x_hat is x normalized with batch statistics.

    The variance is increased by `EPS`; the slope of the leaky ReLU is `SLOPE`.

    Args:
    - `x`: input, (N, C, H, W); it is not modified.
    - `gamma`: scale, (C,).
    - `beta`: shift, (C,).
    - `weight`: weight of the convolution, (C_out, C / groups, K, K) with odd K and padding K // 2.
    - `strategy`: key of `STRATEGIES`: what is saved for backward, and how the rest is recomputed.
    - `groups`: groups of the convolution.
    """
    return _Block.apply(x, gamma, beta, weight, strategy, groups)


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, strategy: str, groups: int) -> Tensor:
        var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        inverse_std = torch.rsqrt(var + EPS)
        if strategy == "checkpoint_xhat":
            x_hat = _affine(x, inverse_std, -mean * inverse_std)
            z = F.leaky_relu_(_affine(x_hat, gamma, beta), SLOPE)
        else:
            x_hat, z = None, _from_input(x, mean, inverse_std, gamma, beta)
        saved = {"standard": (x, z), "checkpoint": (x,), "checkpoint_xhat": (x_hat,)}.get(strategy, (z,))
        # Backward needs the mean only to compute x_hat from x (section 3.3).
        ctx.save_for_backward(mean if x is saved[0] else None, inverse_std, gamma, beta, weight, *saved)
        ctx.strategy, ctx.groups = strategy, groups
        return F.conv2d(z, weight, padding=weight.shape[2] // 2, groups=groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        mean, inverse_std, gamma, beta, weight, *saved = ctx.saved_tensors
        if ctx.strategy == "checkpoint":
            z = _from_input(saved[0], mean, inverse_std, gamma, beta)
        elif ctx.strategy == "checkpoint_xhat":
            z = F.leaky_relu_(_affine(saved[0], gamma, beta), SLOPE)
        else:
            z = saved[-1]
        padding = [weight.shape[2] // 2] * 2
        dz, dweight, _ = torch.ops.aten.convolution_backward(
            dout, z, weight, None, [1, 1], padding, [1, 1], False, [0, 0], ctx.groups, [True, True, False]
        )
        if ctx.strategy.startswith("inplace"):
            backward = backward_1 if ctx.strategy == "inplace_1" else backward_2
            return *backward(z, dz, inverse_std, gamma, beta), dweight, None, None
        x_hat = saved[0] if mean is None else _affine(saved[0], inverse_std, -mean * inverse_std)
        dy = torch.ops.aten.leaky_relu_backward(dz, z, SLOPE, True)
        return *_backward_from_xhat(x_hat, dy, inverse_std, gamma), dweight, None, None


def backward_1(
    z: Tensor, dz: Tensor, inverse_std: Tensor, gamma: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dL/dx, dL/dgamma, dL/dbeta of variant I, which computes x_hat = (y - beta) / gamma for each element."""
    y = F.leaky_relu(z, 1 / SLOPE)
    dy = torch.ops.aten.leaky_relu_backward(dz, z, SLOPE, True)
    return _backward_from_xhat(_affine(y, 1 / gamma, -beta / gamma), dy, inverse_std, gamma)


def backward_2(
    z: Tensor, dz: Tensor, inverse_std: Tensor, gamma: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dL/dx, dL/dgamma, dL/dbeta of variant II, which uses y in place of x_hat, with coefficients per channel.

    dL/dgamma = (sum(dy y) - beta dL/dbeta) / gamma and
    dL/dx = gamma / sqrt(v + eps) (dy - y dL/dgamma / (gamma m) - (dL/dbeta - beta/gamma dL/dgamma) / m);
    the paper prints a plus before beta/gamma, where x_hat = (y - beta) / gamma gives a minus (csrc/README.md).
    """
    y = F.leaky_relu(z, 1 / SLOPE)
    dy = torch.ops.aten.leaky_relu_backward(dz, z, SLOPE, True)
    dbeta = dy.sum((0, 2, 3))
    dgamma = ((dz * z).sum((0, 2, 3)) - beta * dbeta) / gamma  # dy y = dz z for a leaky relu
    count = z.numel() // z.shape[1]
    scale = gamma * inverse_std
    rest = _affine(y, -inverse_std * dgamma / count, -scale * (dbeta - beta / gamma * dgamma) / count)
    return rest.addcmul_(dy, _per_channel(scale)), dgamma, dbeta


def _backward_from_xhat(x_hat: Tensor, dy: Tensor, inverse_std: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dL/dx, dL/dgamma, dL/dbeta: BN* of the paper's section 3.3."""
    dbeta, dgamma = dy.sum((0, 2, 3)), (dy * x_hat).sum((0, 2, 3))
    count, scale = dy.numel() // dy.shape[1], gamma * inverse_std
    rest = _affine(x_hat, -scale * dgamma / count, -scale * dbeta / count)
    return rest.addcmul_(dy, _per_channel(scale)), dgamma, dbeta


def _from_input(x: Tensor, mean: Tensor, inverse_std: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """Return z; normalization, scale and shift are one operation."""
    scale = gamma * inverse_std
    return F.leaky_relu_(_affine(x, scale, beta - mean * scale), SLOPE)


def _affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return torch.addcmul(_per_channel(shift), x, _per_channel(scale))


def _per_channel(vector: Tensor) -> Tensor:
    return vector.view(1, -1, 1, 1)
