"""Random programs that are trained plainly, with recipes, and with a clone of whatever autograd saves.

The third run is the truth: a write into a tensor after autograd saved it never reaches its clone, so that the
gradients belong to the values of the forward pass. A program is *silently wrong* if its results with recipes are not
the truth, and plain training has the truth or an error.

    python -m tests.remat.hunt --programs 20000 --seed 0

With ``--inductor``, torch.compile compiles the programs with the lean rule, which takes seconds each. They must have
the results of Inductor without the rule, up to rounding, and the same random numbers and side effects.

    python -m tests.remat.hunt --inductor --programs 100
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import zoo
from zoo.remat import Rematerializer, inductor_options
from zoo.remat.budget import Budget
from zoo.remat.inductor import cut
from zoo.remat.recipes import RecipeError

SHAPE = (2, 4, 4, 4)
NUM_STEPS = 3  # of training: later steps follow a plan that was made from the first one
MORE_STEPS = 5  # if one of them is another: a pass that leaves its plan is recorded again
#: Names of the tensors of a program: x, y and e require gradients, u (uint8) and f are views of numpy arrays.
INPUTS = "xyeuf"
RESULTS = "abcdghkl"
NAMES = INPUTS + RESULTS


class Saves(torch.autograd.Function):
    """y = x^2 / 2 + x, which saves x and y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * x / 2 + x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return dy * (1 + x) + 0 * y


class Overwrites(torch.autograd.Function):
    """y = x^2 / 2, whose backward writes into the x that it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x / 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.mul_(dy)


class OverwritesOutput(torch.autograd.Function):
    """y = exp(x / 4), whose backward writes into the y that it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = (x / 4).exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y.mul_(dy).div_(4)


class Dirty(torch.autograd.Function):
    """Doubles x in place, and saves it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * dy + 0 * x


class Side(torch.autograd.Function):
    """Returns x |x|, and |x| as an output without gradients; it saves both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        size = x.abs()
        y = x * size
        ctx.mark_non_differentiable(size)
        ctx.save_for_backward(size, y)
        return y, size

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> Tensor:
        size, y = ctx.saved_tensors
        return 2 * dy * size + 0 * y


class Middle(torch.autograd.Function):
    """y = x sigmoid(x), which saves sigmoid(x) and x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate = x.sigmoid()
        ctx.save_for_backward(gate, x)
        return gate * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        gate, x = ctx.saved_tensors
        return dy * (gate + x * gate * (1 - gate))


class Shows(torch.autograd.Function):
    """Returns a view of x, and saves x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return dy * (1 + x.sign())


class Tagged(torch.Tensor):
    """A subclass that survives operations, without a tensor inside of it."""


@torch.library.custom_op("hunt::half_square", mutates_args=())
def half_square(x: Tensor) -> Tensor:
    return x * x / 2


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, output)


half_square.register_autograd(
    lambda ctx, dy: dy * ctx.saved_tensors[0] + 0 * ctx.saved_tensors[1], setup_context=_setup
)


@torch.library.custom_op("hunt::grow_", mutates_args=("x",))
def grow_(x: Tensor, by: float) -> None:
    x.mul_(by)


def _shrink(x: Tensor) -> None:
    x.mul_(0.5)


_library = torch.library.Library("hunt_quiet", "DEF")
_library.define("shrink_(Tensor(a!) x) -> ()")
_library.impl("shrink_", _shrink, "CPU")


class Network(nn.Module):
    """What layers of programs share: parameters, buffers, and the steps of the program in ``forward``."""

    def __init__(self, weights: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in weights.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor.clone())
        self.body: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
        self.arrays: list[Any] = []  # numpy arrays that share the memory of u and f
        self.regions: list[AbstractContextManager[Any]] = []  # that steps have entered, the innermost last
        self.hooks: Any = nullcontext()  # the hooks for saved tensors that the truth needs

    def enter(self, region: AbstractContextManager[Any]) -> None:
        """Run the steps that follow in a context, until `leave` or the end of the forward pass."""
        region.__enter__()
        self.regions.append(region)

    def leave(self) -> None:
        """Leave the innermost context."""
        if not self.regions:
            raise RuntimeError("no region")
        self.regions.pop().__exit__(None, None, None)

    def forward(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what the program returns, of its inputs."""
        try:
            return self.body(tensors)
        finally:
            while self.regions:
                self.leave()


class At(NamedTuple):
    """What an operation is given: the network, two tensors, and a small number."""

    net: Any
    a: Tensor
    b: Tensor
    k: int


def _function(function: Any) -> Callable[[At], Any]:
    return lambda at: function.apply(_float(at.a))


def _float(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        raise TypeError("no floating type")
    return x


def _without(change: Callable[[At], Any]) -> Callable[[At], None]:
    def run(at: At) -> None:
        with torch.no_grad():
            change(at)

    return run


def _half(x: Tensor, k: int) -> Tensor:
    return x.narrow(1 % x.ndim, k % 2, max(1, x.shape[1 % x.ndim] // 2))


def _inference(at: At) -> Tensor:
    with torch.inference_mode():
        return at.a.detach() * 0.5


@contextmanager
def _without_hooks(net: Network) -> Iterator[None]:
    """Return a context without the hooks of the truth, which torch.func refuses."""
    if net.regions:
        raise RuntimeError("hooks of a region may be the innermost")
    net.hooks.__exit__(None, None, None)
    try:
        yield
    finally:
        net.hooks.__enter__()


def _func_grad(at: At) -> Tensor:
    weight = at.net.w1[:, :, 0, 0]
    with _without_hooks(at.net):
        return torch.func.grad(lambda x: (x @ weight).tanh().sum())(_float(at.a))


def _func_vjp(at: At) -> Tensor:
    with _without_hooks(at.net):
        out, pull = torch.func.vjp(lambda x: F.silu(x) * x, _float(at.a))
        return pull(out)[0]


def _vmap(at: At) -> Tensor:
    return torch.vmap(lambda x: F.silu(x) * x.sum())(_float(at.a))


def _jvp(at: At) -> Tensor:
    return torch.func.jvp(lambda x: x.tanh() * x, (_float(at.a),), (torch.ones_like(at.a),))[1]


def _nested(at: At) -> Tensor:
    with Rematerializer(smallest_bytes=0):
        return _float(at.a).sigmoid() * at.a.tanh()


def _autocast(at: At) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.silu(F.conv2d(at.a, at.net.w3, at.net.b3, padding=1))


def _cast(enabled: bool = True) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def _islands(at: At) -> Tensor:
    """Norm, softmax and product in float32 inside of convolutions in bfloat16, as mixed precision training does."""
    with _cast():
        y = F.silu(F.conv2d(at.a, at.net.w3, at.net.b3, padding=1))
        with _cast(enabled=False):
            y = F.layer_norm(y.float(), (4,), at.net.gamma, at.net.beta).softmax(-1) * at.a
        return F.gelu(F.conv2d(y, at.net.w1))


def _spatial_transformer(at: At) -> Tensor:
    with _cast():
        y = F.conv2d(at.a, at.net.w1)
        theta = at.net.w1.view(-1)[:6].view(1, 2, 3).expand(len(y), 2, 3)
        return F.grid_sample(y, F.affine_grid(theta, list(y.shape), align_corners=False), align_corners=False)


def _norm_cast(at: At, is_tracked: bool, *, has_conv: bool = True) -> Tensor:
    """Return a norm without weights, as `BatchNorm2d(affine=False)`."""
    statistics = (at.net.mean1, at.net.var1) if is_tracked else (None, None)
    with _cast():
        x = F.conv2d(at.a, at.net.w3, padding=1) if has_conv else at.a.bfloat16()
        return F.silu(F.batch_norm(x, *statistics, training=True))


def _wide(at: At) -> Tensor:
    """Return eight channels, enough for the kernels that replace kernels of torch."""
    return torch.cat([at.a, at.b], 1)


def _statistics(at: At) -> tuple[Tensor, Tensor]:
    return at.net.mean1.repeat(2), at.net.var1.repeat(2)


def _gradient_inside(at: At, *, has_graph: bool) -> Tensor:
    """Return the gradient of an energy, as force fields and samplers compute it."""
    x = _float(at.a) if has_graph else _float(at.a).detach().requires_grad_()
    energy = F.silu(F.conv2d(x, at.net.w3, at.net.b3, padding=1)).square().sum()
    (gradient,) = torch.autograd.grad(energy, x, create_graph=has_graph)
    return 0.1 * gradient


def _inner_steps(at: At, *, is_second_order: bool) -> Tensor:
    """Return a convolution with a weight that was adapted by gradient descent."""
    weight, data = at.net.w3, _float(at.a) if is_second_order else _float(at.a).detach()
    for _ in range(at.k + 1):
        loss = (F.silu(F.conv2d(data, weight, padding=1)) - at.b.detach()).square().mean()
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=is_second_order)
        weight = weight - 0.1 * gradient
    return F.conv2d(at.a, weight, padding=1)


def _langevin(at: At) -> Tensor:
    x = _float(at.a).detach()
    for _ in range(at.k + 1):
        x.requires_grad_()
        energy = F.conv2d(x, at.net.w1).tanh().sum()
        x = (x - 0.1 * torch.autograd.grad(energy, x)[0]).detach() + 0.01 * torch.randn_like(x)
    return x * at.a


def _integrate(at: At) -> Tensor:
    """Return the mean output of leaky integrators."""
    h, outputs = _float(at.a), []
    for _ in range((12, 50, 200)[at.k]):
        h = 0.9 * h + at.b
        outputs.append(h.tanh())
    return torch.stack(outputs).mean(0)


def _spike(at: At) -> Tensor:
    """Return how much a chain of gates passes, which reset what they pass."""
    v, total = _float(at.a), torch.zeros(())
    for _ in range((12, 50, 200)[at.k]):
        v = 0.8 * v + 0.3 * at.b
        gate = (4 * v - 2).sigmoid()
        v = v * (1 - gate)
        total = total + gate
    return total


def _frozen_relu(at: At, has_norm: bool = False) -> Tensor:
    """Return what a frozen layer and a ReLU in place give."""
    y = F.conv2d(at.a * 1.0, at.net.w3.detach(), padding=1)
    if has_norm:
        y = F.batch_norm(y, at.net.mean1, at.net.var1, at.net.gamma.detach(), at.net.beta.detach())
    return F.relu_(y)


def _head(at: At) -> Callable[[Tensor], Tensor]:
    return lambda y: F.silu(F.conv2d(y, at.net.w1)) * y


def _on_cpu(at: At, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return _head(at)(x)


def _replaced(at: At, function: Callable[[Tensor], Tensor]) -> None:
    at.a.data = function(at.a.data)


def _binary(at: At) -> Tensor:
    """Return a convolution with the signs of a weight, which then has its own numbers again."""
    weight = at.net.w3
    before = weight.data
    weight.data = before.sign()
    out = F.conv2d(at.a, weight, padding=1)
    weight.data = before
    return out


def _codebook(at: At) -> Tensor:
    """Return entries of a codebook, which then moves."""
    big = at.net.big
    out = at.a * big.sigmoid()
    big.data = 0.9 * big.data + 0.1 * _float(at.a).data.float()
    return out


def _cond(at: At) -> Tensor:
    return torch.ops.higher_order.cond(
        at.a.sum() > 0, lambda x: (x.sin(),), lambda x: (F.silu(x),), (_float(at.a).clone(),)
    )[0]


def _while_loop(at: At) -> Tensor:
    start = _float(at.a).detach().clone(), torch.tensor(0)
    end = torch.ops.higher_order.while_loop(lambda x, i: i < 3, lambda x, i: (0.9 * x, i + 1), start, ())
    return end[0] * at.a


def _norm(net: Any, x: Tensor, which: str, training: bool = True) -> Tensor:
    return F.batch_norm(
        x, getattr(net, f"mean{which}"), getattr(net, f"var{which}"), net.gamma, net.beta, training, 0.3
    )


def _track(at: At) -> None:
    """Move a running mean as code without a norm of torch's does."""
    with torch.no_grad():
        at.net.scale.mul_(0.9).add_(at.a.detach().float().mean((0, 2, 3)).view(4, 1, 1), alpha=0.1)


def _refill(array: Any) -> None:
    array[...] = array[::-1].copy()


def _halve(array: Any) -> None:
    array[...] = array // 2


def _swap(at: At) -> None:
    at.net.w3.data = at.net.w3.data * 1.1


Operations = dict[str, Callable[[At], Any]]
#: By kind: operations that return one tensor or several. What one with a name in "_" returns is not used.
KINDS: dict[str, Operations] = {
    "layer": {
        "conv": lambda at: F.conv2d(at.a, at.net.w3, at.net.b3, padding=1),
        "conv1": lambda at: F.conv2d(at.a, at.net.w1),
        "conv_depthwise": lambda at: F.conv2d(at.a, at.net.wd, padding=1, groups=4),
        "conv_transposed": lambda at: F.conv_transpose2d(at.a, at.net.w3, at.net.b3, padding=1),
        "conv_frozen": lambda at: F.conv2d(at.a, at.net.w3.detach(), padding=1),
        "linear": lambda at: F.linear(at.a, at.net.w1[:, :, 0, 0], at.net.b3),
        "matmul": lambda at: 0.3 * (at.a @ at.b),
        "attention": lambda at: F.scaled_dot_product_attention(at.a, at.a * 0.5, at.a),
    },
    "norm": {
        "norm": lambda at: _norm(at.net, at.a, "1"),
        "norm2": lambda at: _norm(at.net, at.a, "2"),
        "norm_eval": lambda at: _norm(at.net, at.a, "1", training=False),
        "norm_frozen": lambda at: F.batch_norm(at.a, at.net.mean1, at.net.var1, training=False),
        "norm_plain": lambda at: F.batch_norm(at.a, None, None, training=True),
        "layer_norm": lambda at: F.layer_norm(at.a, (4,), at.net.gamma, at.net.beta),
        "group_norm": lambda at: F.group_norm(at.a, 2, at.net.gamma, at.net.beta),
        "instance_norm": lambda at: F.instance_norm(at.a),
    },
    "activation": {
        "relu": lambda at: F.relu(at.a), "silu": lambda at: F.silu(at.a), "gelu": lambda at: F.gelu(at.a),
        "sigmoid": lambda at: at.a.sigmoid(), "tanh": lambda at: at.a.tanh(), "hardswish": lambda at: F.hardswish(at.a),
        "leaky": lambda at: F.leaky_relu(at.a, 0.1), "softplus": lambda at: F.softplus(at.a),
        "elu": lambda at: F.elu(at.a), "mish": lambda at: F.mish(at.a), "softmax": lambda at: at.a.softmax(1),
        "logsigmoid": lambda at: F.logsigmoid(at.a), "glu": lambda at: F.glu(at.a, 1),
        "quick_gelu": lambda at: at.a * (1.7 * at.a).sigmoid(), "prelu": lambda at: F.prelu(at.a, at.net.b3),
        "log_softmax": lambda at: at.a.log_softmax(1),
    },
    "elementwise": {
        "add": lambda at: at.a + at.b, "sub": lambda at: at.a - at.b, "mul": lambda at: 0.5 * at.a * at.b,
        "product": lambda at: at.a * at.b, "div": lambda at: at.a / (2 + at.b * at.b), "half": lambda at: at.a * 0.5,
        "shift": lambda at: at.a + 0.5, "square": lambda at: 0.1 * at.a.square(), "pow": lambda at: 0.1 * at.a**3,
        "exp": lambda at: at.a.clamp(-2, 2).exp(), "abs": lambda at: at.a.abs(), "clamp": lambda at: at.a.clamp(-1, 1),
        "clamp_by": lambda at: at.a.clamp(min=at.b), "sqrt": lambda at: (at.a.square() + 1).sqrt(),
        "maximum": lambda at: torch.maximum(at.a, at.b), "lerp": lambda at: torch.lerp(at.a, at.b, 0.3),
        "where": lambda at: torch.where(at.a > 0, at.a, 2 * at.b), "greater": lambda at: at.a > at.b,
        "addcmul": lambda at: torch.addcmul(at.a, at.a, at.b, value=0.3), "neg": lambda at: -at.a,
        "sin": lambda at: at.a.sin(), "cumsum": lambda at: 0.3 * at.a.cumsum(-1),
        "masked_fill": lambda at: at.a.masked_fill(at.b > 0, 0.5), "logit": lambda at: at.a.sigmoid().logit(),
    },
    "promotion": {
        "float": lambda at: at.a.float(), "double": lambda at: at.a.double(), "bfloat16": lambda at: at.a.bfloat16(),
        "scaled": lambda at: at.a / 255, "normalized": lambda at: (at.a.float() / 255 - 0.5) / 0.25,
        "signs": lambda at: at.a.sign().to(torch.int8), "type_as": lambda at: at.a.type_as(at.b),
        "integers": lambda at: at.a.to(torch.int64),
    },
    "shape": {
        "cat": lambda at: torch.cat([at.a, at.b], 1), "stack": lambda at: torch.stack([at.a, at.b]).sum(0),
        "flip": lambda at: at.a.flip(-1), "roll": lambda at: at.a.roll(1, 1), "pad": lambda at: F.pad(at.a, (1, 1)),
        "avg_pool": lambda at: F.avg_pool2d(at.a, 2), "max_pool": lambda at: F.max_pool2d(at.a, 3, 1, 1),
        "upsample": lambda at: F.interpolate(at.a, scale_factor=2), "resize": lambda at: F.interpolate(at.a, size=4),
        "pooled": lambda at: at.a.mean((2, 3), keepdim=True), "sum": lambda at: at.a.sum(1, keepdim=True),
        "amax": lambda at: at.a.amax(1, keepdim=True), "var": lambda at: torch.var_mean(at.a, 1, keepdim=True),
        "channels_last": lambda at: at.a.contiguous(memory_format=torch.channels_last),
        "contiguous": lambda at: at.a.transpose(-1, -2).contiguous(), "clone": lambda at: at.a.clone(),
        "gather": lambda at: at.a[:, [1, 0, 3, 2]], "max": lambda at: at.a.max(1, keepdim=True)[0],
        "repeat": lambda at: at.a[:, :1].repeat(1, 4, 1, 1),
        "enlarge": lambda at: F.interpolate(at.a.mean(1, True), size=8),
        "index_select": lambda at: at.a.index_select(1, torch.tensor([1, 0, 1, 0])),
    },
    "view": {
        "view": lambda at: at.a.view(2, -1), "unflatten": lambda at: at.a.view(SHAPE),
        "transpose": lambda at: at.a.transpose(-1, -2), "permute": lambda at: at.a.permute(0, 2, 1, 3),
        "slice": lambda at: _half(at.a, at.k), "select": lambda at: at.a.select(1, at.k % 2),
        "unsqueeze": lambda at: at.a.unsqueeze(1), "squeeze": lambda at: at.a.squeeze(1), "row": lambda at: at.a[:1],
        "diagonal": lambda at: at.a.diagonal(0, -2, -1), "unfold": lambda at: at.a.unfold(-1, 2, 1 + at.k % 2),
        "strided": lambda at: at.a.as_strided((2, 4, 4, 4), (64, 16, 4, 1)), "movedim": lambda at: at.a.movedim(1, 3),
        "swapped": lambda at: at.a.swapaxes(0, 0), "bits": lambda at: at.a.detach().view(torch.int32),
        "complex": lambda at: torch.view_as_complex(at.a.unflatten(-1, (2, 2))),
        "real": lambda at: torch.view_as_real(at.a).flatten(-2),
    },
    "several views": {
        "chunk": lambda at: at.a.chunk(2, 1), "split": lambda at: at.a.split(2, at.k % at.a.ndim),
        "split_sizes": lambda at: at.a.split([1, 3], 1), "unbind": lambda at: at.a.unbind(0),
        "unbind1": lambda at: at.a.unbind(1), "tensor_split": lambda at: at.a.tensor_split(2, at.k % at.a.ndim),
        "hsplit": lambda at: at.a.hsplit(2), "iterate": lambda at: tuple(at.a),
    },
    "alias": {
        "detach": lambda at: at.a.detach(), "data": lambda at: at.a.data, "view_as": lambda at: at.a.view_as(at.a),
        "reshape": lambda at: at.a.reshape(at.a.shape), "all": lambda at: at.a[:], "same": lambda at: at.a,
        "expand": lambda at: at.a[:, :1].expand(-1, 4, *at.a.shape[2:]), "expand_as": lambda at: at.a.expand_as(at.b),
        "detached_clone": lambda at: at.a.detach().clone(), "alias": lambda at: torch.ops.aten.alias(at.a),
    },
    "in place": {
        "relu_": lambda at: F.relu_(at.a), "add_": lambda at: at.a.add_(0.5), "mul_": lambda at: at.a.mul_(0.7),
        "sigmoid_": lambda at: at.a.sigmoid_(), "tanh_": lambda at: at.a.tanh_(), "exp_": lambda at: at.a.exp_(),
        "silu_": lambda at: F.silu(at.a, inplace=True), "leaky_": lambda at: F.leaky_relu_(at.a, 0.1),
        "clamp_": lambda at: at.a.clamp_(0, 1), "neg_": lambda at: at.a.neg_(), "add2_": lambda at: at.a.add_(at.b),
        "mul2_": lambda at: at.a.mul_(at.b), "sub2_": lambda at: at.a.sub_(at.b, alpha=2),
        "lerp_": lambda at: at.a.lerp_(at.b, 0.3), "sqrt_": lambda at: at.a.abs_().sqrt_(),
        "addcmul_": lambda at: at.a.addcmul_(at.b, at.b, value=0.1), "pow_": lambda at: at.a.pow_(2),
        "cumsum_": lambda at: at.a.cumsum_(-1), "sin_": lambda at: at.a.sin_(),
        "clamp_by_": lambda at: at.a.clamp_(at.b),
        "foreach_": lambda at: torch._foreach_mul_([at.a, at.b], 1.1),
        "transpose_": lambda at: at.a.transpose_(-1, -2), "unsqueeze_": lambda at: at.a.unsqueeze_(0),
    },
    "write": {
        "copy_": lambda at: at.a.copy_(at.b), "fill_": lambda at: at.a.fill_(0.5 * at.k),
        "zero_": lambda at: at.a.zero_(),
        "masked_fill_": lambda at: at.a.masked_fill_(at.b > 0, 0.5),
        "index_put_": lambda at: at.a.index_put_((torch.tensor([0]),), at.b[1:]),
        "set": lambda at: at.a.__setitem__((slice(None), 1), at.b[:, 0]),
        "set_all": lambda at: at.a.__setitem__(slice(None), at.b),
        "set_masked": lambda at: at.a.__setitem__(at.a > 1, 1),
        "index_add_": lambda at: at.a.index_add_(1, torch.tensor([1]), at.b[:, :1]),
        "scatter_": lambda at: at.a.scatter_(1, torch.zeros(at.a.shape, dtype=torch.int64), at.b),
        "out": lambda at: torch.add(at.b.detach(), 1.0, out=at.a.detach()),
        "out_mul": lambda at: torch.mul(at.a.detach(), at.b.detach(), out=at.a.detach()),
        "cat_out": lambda at: torch.cat([at.b.detach()], out=at.a.detach()),
    },
    "write into a view": {
        "relu_row_": lambda at: at.a[:1].relu_(), "fill_row_": lambda at: at.a[0].fill_(0.5 * at.k),
        "mul_flat_": lambda at: at.a.view(-1)[:9].mul_(0.7), "add_column_": lambda at: at.a[..., 0].add_(0.5),
        "copy_half_": lambda at: _half(at.a, at.k).copy_(_half(at.b, 0).clone()),
        "mul_t_": lambda at: at.a.mT.mul_(0.7),
        "tanh_half_": lambda at: _half(at.a, at.k).tanh_(),
        "zero_diagonal_": lambda at: at.a.diagonal(0, -2, -1).zero_(),
        "add_to_half_": lambda at: _half(at.a, at.k).add_(_half(at.b, 1)),
        "mul_part_": lambda at: at.a.unbind(0)[0].detach().mul_(0.5),
    },
    "write through an alias": {
        "detach_mul_": lambda at: at.a.detach().mul_(0.7), "detach_fill_": lambda at: at.a.detach().fill_(0.5 * at.k),
        "no_grad_add_": _without(lambda at: at.a.add_(0.5)), "no_grad_copy_": _without(lambda at: at.a.copy_(at.b)),
        "no_grad_half_": _without(lambda at: _half(at.a, at.k).mul_(0.5)),
        "set_": _without(lambda at: at.a.detach().set_(at.b.detach().clone())),
        "shrink_": lambda at: torch.ops.hunt_quiet.shrink_(at.a.detach()),
    },
    "write behind autograd": {
        "data_mul_": lambda at: at.a.data.mul_(0.7), "data_half_": lambda at: _half(at.a.data, at.k).zero_(),
        "data_copy_": lambda at: at.a.data.copy_(at.b), "numpy_": lambda at: _halve(at.a.detach().numpy()),
    },
    "refill": {"refill_u_": lambda at: _refill(at.net.arrays[0]), "refill_f_": lambda at: _refill(at.net.arrays[1])},
    "buffer": {
        "read_scale": lambda at: at.net.scale, "read_mean": lambda at: at.net.mean1.view(4, 1, 1),
        "times_scale": lambda at: at.a * at.net.scale, "minus_mean": lambda at: at.a - at.net.mean1.view(4, 1, 1),
        "plus_scale": lambda at: at.a + at.net.scale, "scale_mul_": lambda at: at.net.scale.mul_(0.9),
        "track_": _track, "big_copy_": lambda at: at.net.big.copy_(at.a.detach()), "read_big": lambda at: at.net.big,
        "times_big": lambda at: at.a * at.net.big, "plus_big": lambda at: at.a + at.net.big,
        "big_add_": lambda at: at.net.big.add_(0.1),
        "replace_scale_": lambda at: setattr(at.net, "scale", at.net.scale * 0.9),
    },
    "parameter": {
        "times_parameter": lambda at: at.a * at.net.p, "plus_parameter": lambda at: at.a + at.net.p,
        "parameter": lambda at: at.net.p, "parameter_by_channel": lambda at: at.a * at.net.gamma.view(4, 1, 1),
        "normed_weight": lambda at: F.conv2d(at.a, F.normalize(at.net.w3.flatten(1), dim=1).view_as(at.net.w3)),
        "parameter_mul_": _without(lambda at: at.net.p.mul_(0.9)),
        "vector_mul_": _without(lambda at: at.net.gamma.mul_(0.9)),
    },
    "parameter behind autograd": {
        "parameter_data_": lambda at: at.net.p.data.mul_(0.9),
        "scale_data_": lambda at: at.net.scale.data.mul_(0.9),
    },
    "function": {
        "saves": _function(Saves), "overwrites": _function(Overwrites), "dirty": _function(Dirty),
        "overwrites_output": _function(OverwritesOutput), "side": _function(Side), "middle": _function(Middle),
        "shows": _function(Shows),
    },
    "inference": {"inference": _inference},
    "random": {
        "dropout": lambda at: F.dropout(_float(at.a), 0.3), "dropout2d": lambda at: F.dropout2d(_float(at.a), 0.3),
        "dropout_": lambda at: F.dropout(_float(at.a), 0.3, inplace=True),
        "rand": lambda at: torch.rand_like(_float(at.a)),
        "noise": lambda at: at.a + torch.randn_like(_float(at.a)),
        "normal_": lambda at: _float(at.a).detach().normal_(),
        "bernoulli": lambda at: torch.bernoulli(_float(at.a).sigmoid()),
        "alpha_dropout": lambda at: F.alpha_dropout(_float(at.a), 0.3, True),
        "drop_path": lambda at: at.a.div(0.7) * at.a.new_empty(_float(at.a).shape[0], 1, 1, 1).bernoulli_(0.7),
        "bernoulli_": lambda at: _float(at.a).detach().bernoulli_(0.7),
    },
    "operator": {
        "half_square": lambda at: half_square(_float(at.a)), "grow_": lambda at: grow_(_float(at.a).detach(), 1.1),
    },
    "context": {
        "checkpoint": lambda at: checkpoint(lambda x: F.silu(F.conv2d(x, at.net.w1)) * x, at.a, use_reentrant=False),
        "nested": _nested, "autocast": _autocast,
        "no_grad_mean": torch.no_grad()(lambda at: at.a.sigmoid() * at.a.mean()),
    },
    "transform": {"func_grad": _func_grad, "func_vjp": _func_vjp, "vmap": _vmap, "jvp": _jvp},
    "layout": {
        "rows": lambda at: at.a.view(at.a.size(0), -1), "flat": lambda at: at.a.view(-1),
        "by_stride": lambda at: at.a * (1 + sum(stride % 7 for stride in at.a.stride())),
        "by_layout": lambda at: at.a * (2 if at.a.is_contiguous(memory_format=torch.channels_last) else 1),
        "wide": _wide, "wide_max_pool": lambda at: F.max_pool2d(_wide(at), 2, ceil_mode=at.k == 1),
        "wide_max_pool_1": lambda at: F.max_pool2d(_wide(at), at.a.shape[-2:]),
        "wide_norm": lambda at: F.batch_norm(_wide(at), None, None, training=True),
        "wide_norm_tracked": lambda at: F.batch_norm(_wide(at), *_statistics(at), training=True),
        "adaptive_max_pool": lambda at: F.adaptive_max_pool2d(at.a, at.k + 1),
        "adaptive_avg_pool": lambda at: F.adaptive_avg_pool2d(at.a, at.k + 2),
        "max_pool_1": lambda at: F.max_pool2d(at.a, at.a.shape[-2:]),
        "avg_pool_1": lambda at: F.avg_pool2d(at.a, at.a.shape[-2:]),
        "first_channels_last": lambda at: at.a[:1].contiguous(memory_format=torch.channels_last),
        "pooled_rows": lambda at: F.adaptive_avg_pool2d(F.max_pool2d(_wide(at), at.a.shape[-2:]), 4).view(2, -1),
        "one_channel": lambda at: at.a[:, :1].contiguous(), "one_row": lambda at: at.a[:, :, :1],
        "other_strides": lambda at: at.a[:1].as_strided((1, *at.a.shape[1:]), (7, *at.a.stride()[1:])),
    },
    "replaced data": {
        "binarized_": lambda at: _replaced(at, torch.sign), "halved_": lambda at: _replaced(at, lambda x: 0.5 * x),
        "replaced_by_": lambda at: setattr(at.a, "data", at.b.data.clone()), "binary_conv": _binary,
        "scale_replaced_": lambda at: setattr(at.net.scale, "data", at.net.scale * 0.9), "codebook": _codebook,
        "parameter_swap_": _swap,
    },
    "cast": {
        "islands": _islands, "spatial_transformer": _spatial_transformer,
        "norm_cast": lambda at: _norm_cast(at, False), "norm_cast_tracked": lambda at: _norm_cast(at, True),
        "norm_of_bfloat16": lambda at: _norm_cast(at, True, has_conv=False),
    },
    "region": {
        "autocast_on_": lambda at: at.net.enter(_cast()), "autocast_off_": lambda at: at.net.enter(_cast(False)),
        "no_grad_on_": lambda at: at.net.enter(torch.no_grad()), "leave_": lambda at: at.net.leave(),
        "save_on_cpu_": lambda at: at.net.enter(torch.autograd.graph.save_on_cpu()),
    },
    "gradient inside": {
        "gradient": lambda at: _gradient_inside(at, has_graph=False),
        "force": lambda at: _gradient_inside(at, has_graph=True), "langevin": _langevin,
        "maml": lambda at: _inner_steps(at, is_second_order=True),
        "maml1": lambda at: _inner_steps(at, is_second_order=False),
    },
    "chain": {"integrate": _integrate, "spike": _spike},
    "subclass": {
        "tag": lambda at: at.a.as_subclass(Tagged), "untag": lambda at: at.a.as_subclass(Tensor),
        "tagged_silu": lambda at: F.silu(F.conv2d(at.a.as_subclass(Tagged), at.net.w1)) * at.b,
    },
    "higher order": {"cond": _cond, "while_loop": _while_loop},
    "frozen": {
        "frozen_relu": _frozen_relu, "frozen_norm_relu": lambda at: _frozen_relu(at, True),
        "frozen_checkpoint": lambda at: checkpoint(_head(at), _frozen_relu(at, at.k == 1), use_reentrant=False),
        "frozen_on_cpu": lambda at: _on_cpu(at, _frozen_relu(at, at.k == 1)),
        "frozen_saves": lambda at: Saves.apply(_frozen_relu(at, at.k == 1)),
        "frozen_middle": lambda at: Middle.apply(_frozen_relu(at, at.k == 1)),
        "frozen_shows": lambda at: Shows.apply(_frozen_relu(at, at.k == 1)),
        "frozen_operator": lambda at: half_square(_frozen_relu(at, at.k == 1)), "on_cpu": lambda at: _on_cpu(at, at.a),
    },
}  # fmt: skip
#: How often a kind is drawn.
WEIGHTS: dict[str, float] = {
    "layer": 16, "norm": 10, "activation": 14, "elementwise": 22, "promotion": 4, "shape": 10, "view": 10,
    "several views": 9, "alias": 9, "in place": 10, "write": 6, "write into a view": 6, "write through an alias": 3,
    "write behind autograd": 0.2, "refill": 0.3, "buffer": 6, "parameter": 4, "parameter behind autograd": 0.2,
    "function": 4, "inference": 1, "random": 4, "operator": 1.5, "context": 2, "transform": 1,
    "layout": 6, "replaced data": 1, "cast": 1.5, "region": 3, "gradient inside": 1, "chain": 1, "subclass": 0.8,
    "higher order": 0.6, "frozen": 2,
}  # fmt: skip
ORDINARY = (
    "layer", "norm", "activation", "elementwise", "shape", "view", "several views", "alias", "layout", "cast", "frozen",
)  # fmt: skip
#: What torch.compile does not capture, or not as eager torch runs it.
EAGER = {"layout", "replaced data", "cast", "region", "gradient inside", "chain", "subclass", "higher order", "frozen"}
#: The same between forward and backward.
BETWEEN: dict[str, float] = {
    "in place": 8, "write": 6, "write into a view": 5, "write through an alias": 4, "write behind autograd": 1,
    "refill": 4, "buffer": 5, "parameter": 1, "parameter behind autograd": 0.2, "norm": 2, "random": 1, "operator": 1,
    "layer": 1, "alias": 2, "several views": 1, "view": 1,
}  # fmt: skip
OPERATIONS: Operations = {name: call for operations in KINDS.values() for name, call in operations.items()}
KIND_OF = {name: kind for kind, operations in KINDS.items() for name in operations}
#: What overwrites memory, where a RecipeError may be right.
WRITES = {
    "in place", "write", "write into a view", "write through an alias", "write behind autograd", "buffer", "parameter",
    "function", "operator", "norm", "random", "refill", "parameter behind autograd", "replaced data",
}  # fmt: skip


#: What no version tells of.
HIDES = {"write behind autograd", "parameter behind autograd"}


class Step(NamedTuple):
    """An operation of two tensors and a small number; it replaces the tensors of these names, as many as it returns."""

    to: str
    name: str
    a: str
    b: str
    k: int

    def __str__(self) -> str:
        arguments = [self.a, *([self.b] if self.b != self.a else []), *([str(self.k)] if self.k else [])]
        return f"{self.to} = {self.name}({', '.join(arguments)})"

    @classmethod
    def parse(cls, line: str) -> Step:
        """Return the step of a line as `str` writes it: the second tensor defaults to the first, the number to 0."""
        to, _, rest = line.partition(" = ")
        name, _, arguments = rest.strip().rstrip(")").partition("(")
        a, *others = arguments.split(", ")
        k = int(others.pop()) if others and others[-1].isdigit() else 0
        return cls(to.strip(), name, a, others[0] if others else a, k)


@dataclass(frozen=True)
class Program:
    """A training step: a forward pass, writes before backward, and backward.

    Args:
    - `forward`: steps of the forward pass.
    - `between`: steps after it, of the inputs and of what it returned.
    - `later`: steps between two backward passes.
    - `returns`: the names of what forward returns.
    - `loss`: of them, those that the loss is made of.
    - `backward`: "once", "retained" (twice), "double" (of a gradient), "penalty" (of a gradient, with the loss) or
      "parts" (one for each output).
    - `is_early`: whether the loss is computed before the steps between.
    - `forwards`: passes before the first backward.
    - `is_module`: whether the network itself is made lean, instead of running inside of a `Rematerializer`.
    - `is_inside`: whether backward runs in a `Rematerializer` too.
    - `smallest_bytes`: of the recording.
    - `budget`: within which the steps are trained; None without one.
    - `turn`: index of the training step in which the program is another; 0 for none.
    - `other`: the steps of its forward pass then; none for the same steps.
    - `turns`: what else is other then: "frozen" (half of the parameters), "narrow" (half of the inputs is left),
      "fails" (forward, at its end), "budget" (from then on); "" for nothing.
    - `knows_parameters`: whether the `Rematerializer` gets the parameters.
    - `seed`: of inputs and random numbers.
    """

    forward: tuple[Step, ...]
    returns: str
    loss: str
    between: tuple[Step, ...] = ()
    later: tuple[Step, ...] = ()
    backward: str = "once"
    is_early: bool = True
    forwards: int = 1
    is_module: bool = False
    is_inside: bool = False
    smallest_bytes: int = 0
    budget: float | None = None
    turn: int = 0
    other: tuple[Step, ...] = ()
    turns: str = ""
    knows_parameters: bool = False
    seed: int = 0

    @property
    def steps(self) -> tuple[Step, ...]:
        return (*self.forward, *self.other, *self.between, *self.later)

    def __str__(self) -> str:
        """Return the program as an expression of Python, with a line per step."""
        text = 'program("""' + "".join(f"\n    {step}" for step in self.forward)
        for name in ("between", "later", "other"):
            if steps := getattr(self, name):
                text += f'\n""", {name}="""' + "".join(f"\n    {step}" for step in steps)
        settings = ", ".join(f"{name}={value!r}" for name, value in self._settings())
        return f'{text}\n""", {settings})'

    def _settings(self) -> Iterator[tuple[str, Any]]:
        for name, each in self.__dataclass_fields__.items():
            value = getattr(self, name)
            default = self.returns if name == "loss" else each.default
            if name not in ("forward", "between", "later", "other") and value != default:
                yield name, value


def program(
    forward: str, *, between: str = "", later: str = "", other: str = "", returns: str, **settings: Any
) -> Program:
    """Return the program that `Program.__str__` writes; the loss is made of all that it returns by default."""
    texts = forward, between, later, other
    parts = [tuple(Step.parse(line) for line in text.strip().splitlines()) for text in texts]
    return Program(parts[0], returns, settings.pop("loss", returns), *parts[1:3], other=parts[3], **settings)


def _templates(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return inputs, parameters and buffers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inputs = {
            "x": torch.randn(SHAPE), "y": torch.randn(SHAPE), "e": torch.randn(2, 4, 1, 1),
            "u": torch.randint(0, 256, SHAPE, dtype=torch.uint8), "f": torch.randn(SHAPE),
        }  # fmt: skip
        weights = {
            "w3": 0.2 * torch.randn(4, 4, 3, 3), "b3": torch.randn(4), "w1": 0.5 * torch.randn(4, 4, 1, 1),
            "wd": 0.3 * torch.randn(4, 1, 3, 3), "gamma": 1 + 0.1 * torch.randn(4), "beta": torch.randn(4),
            "p": torch.randn(SHAPE),
        }  # fmt: skip
        buffers = {
            "mean1": torch.randn(4), "var1": torch.rand(4) + 0.5, "mean2": torch.randn(4), "var2": torch.rand(4) + 0.5,
            "scale": torch.rand(4, 1, 1) + 0.5, "big": torch.randn(SHAPE),
        }  # fmt: skip
    return inputs, weights, buffers


OTHER_BUDGET = 0.45  # from the turn of a program on
TEMPLATES = [_templates(seed) for seed in range(4)]
_weights: dict[Any, Tensor] = {}


def _weight_of(x: Tensor) -> Tensor:
    """Return the gradient of the loss by a tensor."""
    key = x.shape, x.dtype
    if key not in _weights:
        _weights[key] = torch.arange(1, x.numel() + 1).view(x.shape).to(torch.float64).cos().to(x.dtype)
    return _weights[key]


def copied(tensor: Tensor) -> Tensor:
    """Return a copy that lies in memory in the same way."""
    tensor = tensor.detach()
    if tensor.is_contiguous() or tensor.layout is not torch.strided:
        return tensor.clone()
    storage = tensor.untyped_storage().clone()
    return tensor.new_empty(0).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def clones_of_saved() -> AbstractContextManager[Any]:
    """Return a context in which autograd saves a clone of each tensor, and unpacks another clone each time."""
    return torch.autograd.graph.saved_tensors_hooks(copied, copied)


@contextmanager
def smallest(size: int) -> Iterator[None]:
    """Set the default size in bytes below which recordings keep a tensor itself."""
    defaults = Rematerializer.__init__.__kwdefaults__
    before = defaults["smallest_bytes"]
    defaults["smallest_bytes"] = size
    try:
        yield
    finally:
        defaults["smallest_bytes"] = before


@torch.no_grad()
def _descend(net: Network) -> None:
    """Change the parameters by a step of gradient descent, and cut the history of the buffers."""
    for each in net.parameters():
        if each.grad is not None:
            each -= 0.05 * each.grad.nan_to_num().clamp(-1, 1)
        each.grad = None
    for name, buffer in list(net.named_buffers()):
        if buffer.requires_grad:
            setattr(net, name, buffer.detach())


@dataclass
class Result:
    """What a run computed, in order, or its error and where it was raised."""

    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    error: Exception | None = None
    stage: str = ""

    def add(self, name: str, tensor: Tensor | None) -> None:
        if tensor is not None:
            self.tensors.append((name, copied(tensor)))


def execute(step: Step, net: Network, tensors: dict[str, Tensor]) -> None:
    """Run a step."""
    out = OPERATIONS[step.name](At(net, tensors[step.a], tensors[step.b], step.k))
    store(tensors, step.to, step.name.endswith("_"), out)


def store(tensors: dict[str, Tensor], names: Sequence[str], is_unused: bool, out: Any) -> None:
    """Give what a step returned its names."""
    if isinstance(out, Tensor):
        if not is_unused:
            tensors[names[0]] = out
    elif isinstance(out, (tuple, list)):
        tensors.update(zip(names, out, strict=False))


class DoNothing(TorchDispatchMode):
    """Runs operations unchanged."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operation(*args, **(kwargs or {}))


class FailedForwardError(Exception):
    """Raised at the end of a forward pass, as by a user who interrupts it."""


class Runner:
    """Runs a program in one of the three ways: "plain", "lean" or "truth"."""

    def __init__(self, program: Program, way: str) -> None:
        self.program, self.way = program, way
        self.result = Result()
        self.number = 0  # of the training step

    def forward(self, net: Network, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors, program = dict(tensors), self.program
        for step in program.other if self.is_turn and program.other else program.forward:
            execute(step, net, tensors)
        if self.is_turn and program.turns == "fails":
            raise FailedForwardError
        return {name: tensors[name] for name in program.returns if name in tensors}

    @property
    def is_turn(self) -> bool:
        """Whether the program is another in this training step."""
        return 0 < self.program.turn == self.number

    def change(self, net: Network, tensors: dict[str, Tensor], stage: str) -> None:
        for step in getattr(self.program, stage):
            execute(step, net, tensors)

    def run(self) -> Result:
        self.hooks = clones_of_saved() if self.way == "truth" else nullcontext()
        try:
            with warnings.catch_warnings(), self.hooks:
                warnings.simplefilter("ignore")
                self._run()
        except Exception as error:
            self.result.error = error.with_traceback(None)
        return self.result

    @property
    def num_steps(self) -> int:
        """How many training steps run."""
        return MORE_STEPS if self.program.turn > 0 else NUM_STEPS

    def _run(self) -> None:
        self.result.stage = "forward"
        seed = self.program.seed
        inputs, weights, buffers = TEMPLATES[seed % len(TEMPLATES)]
        torch.default_generator.manual_seed(seed)  # manual_seed() notes a traceback for each kind of device
        net = Network(weights, buffers)
        net.hooks = self.hooks
        self.budget = Budget.parse(self.program.budget)
        if self.way == "lean" and self.program.is_module:
            zoo.lean(net, self.program.budget)
        for number in range(self.num_steps):
            if number > 0:
                self.result.stage = "forward"
                _descend(net)
            self.number = number
            if self.is_turn and self.program.turns == "budget":
                self.budget = Budget.parse(OTHER_BUDGET)
                if self.way == "lean" and self.program.is_module:
                    zoo.lean(net, OTHER_BUDGET)
            is_frozen = self.is_turn and self.program.turns == "frozen"
            for each in list(net.parameters())[::2]:
                each.requires_grad_(not is_frozen)
            try:
                self._step(net, inputs, number)
            except FailedForwardError:
                self.result.add("random numbers", torch.rand(1))
        self.result.stage = ""

    def _step(self, net: Network, inputs: dict[str, Tensor], number: int) -> None:
        """Run a training step with inputs that differ from step to step."""
        result = self.result
        given = {name: tensor.roll(number, 1) for name, tensor in inputs.items()}
        if self.is_turn and self.program.turns == "narrow":
            given = {name: tensor[:1].clone() for name, tensor in given.items()}
        for name in "xye":
            given[name].requires_grad_()
        net.arrays = [given[name].numpy() for name in "uf"]
        given |= {name: torch.from_numpy(array) for name, array in zip("uf", net.arrays, strict=True)}
        leaves = [(name, given[name]) for name in "xye"] + list(net.named_parameters())
        passes = [self._pass(net, given) for _ in range(self.program.forwards)]
        for outputs in passes:
            for name, tensor in outputs.items():
                result.add(f"output {name}", tensor)
        losses = [self._losses(outputs) for outputs in passes] if self.program.is_early else []
        result.stage = "between"
        for outputs in passes:
            tensors = {**given, **outputs}
            self.change(net, tensors, "between")
        if not self.program.is_early:
            losses = [self._losses(outputs) for outputs in passes]
        del outputs, passes
        result.stage = "backward"
        self._backward([loss for each in losses for loss in each], leaves, net, given)
        for name, leaf in leaves:
            result.add(f"gradient of {name}", leaf.grad)
        for name, buffer in net.named_buffers():
            result.add(f"buffer {name}", buffer)
        result.add("random numbers", torch.rand(1))

    def _context(self, net: Network) -> AbstractContextManager[Any]:
        if self.way != "lean" or self.program.is_module:
            return nullcontext()
        program = self.program
        parameters = net.parameters() if program.knows_parameters else ()
        return Rematerializer(self.budget, smallest_bytes=program.smallest_bytes, parameters=parameters)

    def _pass(self, net: Network, given: dict[str, Tensor]) -> dict[str, Tensor]:
        net.body = lambda tensors: self.forward(net, tensors)
        with self._context(net), smallest(self.program.smallest_bytes) if self.program.is_module else nullcontext():
            return net(given)

    def _losses(self, outputs: dict[str, Tensor]) -> list[Tensor]:
        return [(outputs[name] * _weight_of(outputs[name])).sum() for name in self.program.loss if name in outputs]

    def _backward(
        self, losses: list[Tensor], leaves: list[tuple[str, Tensor]], net: Network, given: dict[str, Tensor]
    ) -> None:
        how = self.program.backward
        # torch takes other kernels in backward while any dispatch mode is active.
        inside = self._context(net) if self.way == "lean" else DoNothing()
        with inside if self.program.is_inside else nullcontext():
            if how == "once":
                torch.autograd.backward(losses)
            elif how == "retained":
                torch.autograd.backward(losses, retain_graph=True)
                for name, leaf in leaves:
                    self.result.add(f"first gradient of {name}", leaf.grad)
                self.change(net, given, "later")
                torch.autograd.backward(losses)
            elif how == "parts":
                for loss in losses:
                    loss.backward(retain_graph=True)
            elif how == "penalty":
                of = [given[name] for name in "xy"]
                gradients = torch.autograd.grad(losses, of, create_graph=True, allow_unused=True)
                penalties = [
                    (each.square().sum((1, 2, 3)) - 1).square().sum() for each in gradients if each is not None
                ]
                torch.autograd.backward([*losses, *(each for each in penalties if each.requires_grad)])
            else:
                gradients = torch.autograd.grad(
                    losses, [leaf for _, leaf in leaves], create_graph=True, allow_unused=True
                )
                found = [each for each in gradients if each is not None]
                for each in found:
                    self.result.add("gradient", each)
                self.change(net, given, "later")
                torch.autograd.backward([each.sin().sum() for each in found if each.requires_grad])


def _as_function(program: Program) -> Callable[[Network, dict[str, Tensor]], dict[str, Tensor]]:
    """Return the forward pass as a function with a line per step, as a user would write it.

    torch.compile continues in the line after a step that it cannot capture. It gives up a loop with such a step.
    """
    lines = ["def forward(net, tensors):", "    tensors = dict(tensors)"]
    for step in program.forward:
        names = ", ".join(f'"{name}"' for name in step.to)
        call = f'OPERATIONS["{step.name}"](At(net, tensors["{step.a}"], tensors["{step.b}"], {step.k}))'
        lines += [f"    out = {call}", f"    store(tensors, [{names}], {step.name.endswith('_')}, out)"]
    lines.append(f"    return {{name: tensors[name] for name in {program.returns!r} if name in tensors}}")
    scope = {"OPERATIONS": OPERATIONS, "At": At, "store": store}
    exec("\n".join(lines), scope)
    return scope["forward"]


class Compiled(Runner):
    """Runs a program that Inductor compiles, with the lean rule ("lean rule") or without it ("inductor")."""

    def __init__(self, program: Program, way: str) -> None:
        super().__init__(program, way)
        self.compiled: Any = None

    @property
    def num_steps(self) -> int:
        return 1

    def _pass(self, net: Network, given: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.compiled is None:
            options = (
                inductor_options(self.program.budget) if self.way == "lean rule" else {"layout_optimization": False}
            )
            self.compiled = torch.compile(_as_function(self.program), options=options)
        net.body = lambda tensors: self.compiled(net, tensors)
        return net.body(given)

    def run(self) -> Result:
        torch.compiler.reset()
        before, cut.MIN_BYTES = cut.MIN_BYTES, self.program.smallest_bytes
        try:
            with (
                torch._inductor.config.patch(fallback_random=True, fx_graph_cache=False),
                torch.inference_mode(False),  # an error of Dynamo's own may leave it on
            ):
                return super().run()
        finally:
            cut.MIN_BYTES = before


def same(a: Result, b: Result) -> str:
    """Return "" if two results have the same bits, NaNs being equal; the name of the first tensor that differs."""
    if len(a.tensors) != len(b.tensors):
        return "number of gradients"
    return next((name for (name, x), (_, y) in zip(a.tensors, b.tensors, strict=True) if not same_bits(x, y)), "")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same bits, NaNs being equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    is_same = a == b
    if a.is_floating_point():
        is_same = is_same & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()
    return bool(is_same.all())


#: HIDDEN: wrong where plain training is right, after a write through ``.data`` or numpy into what was computed, which
#: nothing can see. INVALID: without a truth.
RIGHT, BOTH_RAISE, ALLOWED, FAILS, WRONG, HIDDEN, LIKE_PLAIN, OTHERWISE, INVALID = (
    "right", "both raise", "raises RecipeError", "fails when lean", "silently wrong", "hidden write",
    "wrong like plain", "wrong, not like plain", "invalid",
)  # fmt: skip
FAILURES = (FAILS, WRONG)


class Verdict(NamedTuple):
    """A verdict, and what was wrong."""

    verdict: str
    detail: str

    @property
    def is_failure(self) -> bool:
        return self.verdict in FAILURES

    @property
    def reason(self) -> str:
        """What distinguishes failures of different causes, as far as it is known without shrinking."""
        return self.detail if self.verdict == FAILS else self.verdict


def judge(program: Program, truth: Result | None = None) -> Verdict:
    """Return whether a program trains rightly with recipes."""
    plain = Runner(program, "plain").run()
    lean = Runner(program, "lean").run()
    truth = truth or Runner(program, "truth").run()
    if truth.error is not None:
        return Verdict(INVALID, _told(truth)) if plain.error is not None else Verdict(INVALID, "only the truth raises")
    if lean.error is not None:
        if plain.error is not None:
            return Verdict(BOTH_RAISE, _told(lean))
        if isinstance(lean.error, RecipeError) and lean.stage == "backward" and _may_raise(program):
            return Verdict(ALLOWED if not same(plain, truth) else LIKE_PLAIN, _told(lean))
        return Verdict(FAILS, _told(lean))
    wrong = same(lean, truth)
    if not wrong:
        return Verdict(RIGHT, "")
    kinds = {"write behind autograd" if step.name == "data" else KIND_OF[step.name] for step in program.steps}
    if plain.error is not None:
        # If it had gone on, a refill or other data could have made it wrong, and so could statistics that move: torch's
        # norm in evaluation saves them, and its norm in training moves them without a version.
        has_unseen = bool(kinds & {*HIDES, "refill", "replaced data"}) or any(
            step.name in ("norm_eval", "norm_frozen") or (step.name.startswith("frozen_") and step.k == 1)
            for step in program.steps
        )
        return Verdict(HIDDEN if has_unseen else WRONG, f"{wrong}; plain: {_told(plain)}")
    if not same(plain, truth):
        return Verdict(HIDDEN if kinds & HIDES else WRONG, wrong)
    return Verdict(OTHERWISE if same(lean, plain) else LIKE_PLAIN, wrong)


def judge_compiled(program: Program) -> Verdict:
    """Return whether a program has the results of Inductor when Inductor uses the lean rule.

    Fusion rounds otherwise. A result is wrong if it is close neither to Inductor's nor to the one of plain training.
    """
    program = replace(program, is_module=False, is_inside=False)
    torchs = Compiled(program, "inductor").run()
    lean = Compiled(program, "lean rule").run()
    if torchs.error is not None:
        return Verdict(BOTH_RAISE if lean.error is not None else OTHERWISE, _told(torchs))
    if lean.error is not None:  # torch itself fails now and then where operators are traced, with the rule and without
        return Verdict(OTHERWISE if "INTERNAL ASSERT FAILED" in str(lean.error) else FAILS, _told(lean))
    plain = Runner(replace(program, budget=None), "plain").run()
    expected = dict(zip(_numbered(torchs), (tensor for _, tensor in torchs.tensors), strict=True))
    of_plain = dict(zip(_numbered(plain), (tensor for _, tensor in plain.tensors), strict=True))
    is_low = {"bfloat16", "autocast", "type_as"} & {step.name for step in program.steps}
    tolerance = 0.05 if is_low else 1e-3
    for key, (name, tensor) in zip(_numbered(lean), lean.tensors, strict=True):
        other = expected.pop(key, None)
        if other is None:
            return Verdict(WRONG, f"{name}: Inductor has none")
        if not _is_close(tensor, other, tolerance) and not _is_close(tensor, of_plain.get(key, other), tolerance):
            return Verdict(WRONG, name)
    return Verdict(RIGHT, "") if not expected else Verdict(WRONG, f"{next(iter(expected))[0]}: missing")


def _numbered(result: Result) -> list[tuple[str, int]]:
    """Return the names of the tensors of a result, each with the number of its earlier occurrences."""
    names = [name for name, _ in result.tensors]
    return [(name, names[:index].count(name)) for index, name in enumerate(names)]


def _is_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a.isnan(), b.isnan()):
        return False
    if not a.is_floating_point() and not a.is_complex():
        return torch.equal(a, b)
    a, b = a.nan_to_num(posinf=1e9, neginf=-1e9), b.nan_to_num(posinf=1e9, neginf=-1e9)
    return a.numel() == 0 or bool((a - b).abs().max() <= tolerance * max(1e-3, b.abs().max()))


def _told(result: Result) -> str:
    line = re.sub(r" object at 0x\w+", "", str(result.error).splitlines()[0])
    return f"{type(result.error).__name__} in {result.stage}: {line[:160]}"


def _may_raise(program: Program) -> bool:
    """Return whether a program overwrites anything after forward, or behind autograd."""
    steps = program.between + program.later
    if program.forwards > 1:
        steps += program.forward
    return (
        any(KIND_OF[step.name] in WRITES for step in steps)
        or any("behind" in KIND_OF[step.name] or KIND_OF[step.name] == "refill" for step in program.forward)
        or any(step.name.startswith("overwrites") for step in program.forward)
    )


class Writer(Runner):
    """Writes a program while it runs it for its truth: steps that torch refuses are left out."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        r = self.random
        backward = r.choices(["once", "retained", "parts", "double", "penalty"], [12, 3, 3, 2, 2])[0]
        is_module = r.random() < 0.25
        program = Program(
            (), "", "", backward=backward, is_early=r.random() < 0.6, forwards=2 if r.random() < 0.12 else 1,
            is_module=is_module, is_inside=not is_module and r.random() < 0.08,
            smallest_bytes=r.choices([0, 100, 300, 600, 2**16], [8, 3, 3, 1, 1])[0],
            budget=r.choices([None, 0.6, 0.3, 0.05], [6, 2, 2, 1])[0],
            turn=r.choice([0, 0, 0, 1, 2, 3]), turns=r.choice(["", "", "", "frozen", "narrow", "fails", "budget"]),
            knows_parameters=r.random() < 0.5, seed=r.randrange(1000),
        )  # fmt: skip
        super().__init__(program, "truth")
        self.count = r.choice([4, 6, 8, 10, 12, 16, 24, 32])
        # Each program has a few kinds more often. A third of them does what most networks do and writes nothing.
        favorites = r.sample(list(WEIGHTS), 3)
        self.weights = {kind: weight * (3 if kind in favorites else 1) for kind, weight in WEIGHTS.items()}
        if r.random() < 0.35:
            self.weights = {kind: self.weights[kind] for kind in ORDINARY}
        self.last = ""
        self.between_count = r.choice([0, 0, 0, 1, 1, 2])
        self.num_written = 0  # steps of training

    def _draw(self, weights: dict[str, float], tensors: dict[str, Tensor]) -> Step:
        r = self.random
        kind = r.choices(list(weights), list(weights.values()))[0]
        name = r.choice(list(KINDS[kind]))
        to = r.sample(RESULTS, 4 if kind == "several views" or name in ("side", "var") else 1)
        own = [name for name in tensors if name in RESULTS]
        names = own * 3 + [name for name in INPUTS if name in tensors]
        a, b = r.choice(names), r.choice(names)
        if self.last in tensors and r.random() < 0.3:  # tensors with several readers are where faults are
            a = self.last
        self.last = a
        if r.random() < 0.7:  # most pairs of other shapes would be refused
            b = r.choice([name for name in names if tensors[name].shape == tensors[a].shape])
        return Step("".join(to), name, a, b, r.randrange(3))

    def _grow(
        self, count: int, weights: dict[str, float], net: Network, tensors: dict[str, Tensor]
    ) -> tuple[Step, ...]:
        steps: list[Step] = []
        for _ in range(6 * count):
            if len(steps) == count:
                break
            step = self._draw(weights, tensors)
            try:
                execute(step, net, tensors)
            except (RuntimeError, TypeError, IndexError, ValueError):
                continue
            steps.append(step)
        return tuple(steps)

    def _step(self, net: Network, inputs: dict[str, Tensor], number: int) -> None:
        super()._step(net, inputs, number)
        self.num_written += 1

    def _turned(self) -> tuple[Step, ...]:
        """Return the forward pass with another number, argument, operation, order, or number of steps."""
        r, steps = self.random, list(self.program.forward)
        index = r.randrange(len(steps))
        step = steps[index]
        how = r.choice(["number", "argument", "swap", "order", "less", "repeat", "name"])
        if how == "less":
            del steps[index]
        elif how == "repeat":
            steps.insert(index, step)
        elif how == "order" and index > 0:
            steps[index - 1 : index + 1] = reversed(steps[index - 1 : index + 1])
        elif how == "argument":
            steps[index] = step._replace(a=r.choice([each.to[0] for each in steps[:index]] + ["x", "y"]))
        elif how == "swap":
            steps[index] = step._replace(a=step.b, b=step.a)
        elif how == "name":
            steps[index] = step._replace(name=r.choice(list(KINDS[KIND_OF[step.name]])))
        else:
            steps[index] = step._replace(k=(step.k + 1) % 3)
        return tuple(steps)

    def forward(self, net: Network, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.program.forward:
            return super().forward(net, tensors)
        tensors = dict(tensors)
        steps = self._grow(self.count, self.weights, net, tensors)
        own = [name for name in tensors if name in RESULTS]
        returns = [name for name in own if self.random.random() < 0.6] or own[-1:]
        differentiable = [name for name in own if tensors[name].requires_grad and tensors[name].is_floating_point()]
        loss = [name for name in returns if name in differentiable]
        if len(loss) > 1:
            loss = [name for name in loss if self.random.random() < 0.8] or loss[:1]
        elif not loss and differentiable:
            loss = differentiable[-1:]
            returns += loss
        self.program = replace(self.program, forward=steps, returns="".join(returns), loss="".join(loss))
        if not loss:
            raise RuntimeError("nothing has a gradient")
        if self.program.turn > 0 and not self.program.turns:
            self.program = replace(self.program, other=self._turned())
        return {name: tensors[name] for name in returns}

    def change(self, net: Network, tensors: dict[str, Tensor], stage: str) -> None:
        steps = getattr(self.program, stage)
        if steps or self.between_count == 0 or self.num_written > 0:
            return super().change(net, tensors, stage)
        steps = self._grow(self.between_count, BETWEEN, net, tensors)
        self.program = replace(self.program, **{stage: steps})


def write(seed: int) -> tuple[Program, Result]:
    """Return a random program, and its truth."""
    writer = Writer(seed)
    truth = writer.run()
    return writer.program, truth


def programs(count: int, seed: int) -> Iterator[tuple[Program, Verdict]]:
    """Yield random programs and their verdicts."""
    for index in range(count):
        program, truth = write(seed * 10**9 + index)
        if truth.error is not None:
            yield program, Verdict(INVALID, _told(truth))
            continue
        verdict = judge(program, truth)
        if verdict.is_failure:
            verdict = judge(program)  # on its own
        yield program, verdict


def compiled_programs(count: int, seed: int) -> Iterator[tuple[Program, Verdict]]:
    """Yield random programs and their verdicts when Inductor compiles them."""
    for index in range(count):
        program, truth = write(seed * 10**9 + index)
        # Dynamo does not know that an array shares its memory with a tensor.
        writes_array = any(KIND_OF[step.name] == "refill" for step in program.forward)
        kinds = {KIND_OF[step.name] for step in program.steps}
        if truth.error is None and not writes_array and not kinds & (HIDES | EAGER):
            is_double = program.backward in ("double", "penalty")
            program = replace(program, backward="once" if is_double else program.backward)
            yield program, judge_compiled(program)


def _smaller(program: Program) -> Iterator[Program]:
    """Yield programs that are a little simpler."""
    for name in ("later", "between", "other", "forward"):
        steps = getattr(program, name)
        for size in (len(steps) // 2, len(steps) // 4, 2, 1):
            if size > 0:
                for start in range(len(steps) - size, -1, -1):
                    yield replace(program, **{name: steps[:start] + steps[start + size :]})
    for name, _ in program._settings():
        if name not in ("returns", "loss"):
            yield replace(program, **{name: Program.__dataclass_fields__[name].default})
    for name in ("returns", "loss"):
        letters = getattr(program, name)
        for letter in letters:
            left = letters.replace(letter, "")
            if left:
                yield replace(program, **{name: left})
    for name in ("forward", "between", "later", "other"):
        steps = getattr(program, name)
        for position, step in enumerate(steps):
            simpler = [step._replace(k=0)] if step.k else []
            simpler += [step._replace(b=step.a)] if step.b != step.a else []
            simpler += [step._replace(to=step.to[:-1])] if len(step.to) > 1 else []
            simpler += [step._replace(a=other) for other in "xa" if step.a not in ("x", other)]
            simpler += [step._replace(name="shift", b=step.a)] if KIND_OF[step.name] not in ("elementwise",) else []
            simpler += [step._replace(name="sigmoid", b=step.a)] if step.name not in ("sigmoid", "shift") else []
            for each in simpler:
                yield replace(program, **{name: (*steps[:position], each, *steps[position + 1 :])})


def _size(program: Program) -> tuple[int, ...]:
    return (len(program.steps), sum(len(step.to) for step in program.steps), len(program.returns))


def shrink(program: Program, seconds: float = 20.0, judge: Callable[[Program], Verdict] = judge) -> Program:
    """Return the simplest program found that fails in the same way."""
    wanted = judge(program).reason
    seen: set[str] = set()
    end = time.monotonic() + seconds
    is_smaller = True
    while is_smaller and time.monotonic() < end:
        is_smaller = False
        for each in _smaller(program):
            if str(each) in seen or _size(each) > _size(program):
                continue
            seen.add(str(each))
            if judge(each).reason == wanted:
                program, is_smaller = each, True
                break
    return program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run programs, print small ones of those that fail, and count the verdicts; returns 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inductor", action="store_true", help="let Inductor compile the programs")
    options = parser.parse_args(arguments)
    judged: Callable[[Program], Verdict] = judge_compiled if options.inductor else judge
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    found = set()
    for program, verdict in (compiled_programs if options.inductor else programs)(options.programs, options.seed):
        counts[verdict.verdict] += 1
        failures[verdict.reason] += verdict.is_failure
        if not verdict.is_failure or failures[verdict.reason] > (40 if verdict.verdict == WRONG else 3):
            continue
        program = shrink(program, 120.0 if options.inductor else 20.0, judged)
        names = frozenset(step.name for step in program.steps)
        if names not in found:
            found.add(names)
            verdict = judged(program)
            print(f"# {verdict.verdict}: {verdict.detail[:150]}\n{program}\n", flush=True)
    print(*(f"{count:6}  {verdict}" for verdict, count in counts.most_common()), sep="\n")
    return 1 if failures.total() else 0


if __name__ == "__main__":
    sys.exit(main())
