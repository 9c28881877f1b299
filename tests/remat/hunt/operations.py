"""The operations of random programs, by kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.remat import Rematerializer

SHAPE = (2, 4, 4, 4)  # shape of the inputs x, y, u and f


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


class Made(Tensor):
    """A subclass with a constructor that takes a tensor."""

    @staticmethod
    def __new__(cls, data: Tensor) -> Made:
        return Tensor._make_subclass(cls, data)


class Weight(nn.Parameter):
    """A subclass of parameters."""


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
    """Base class of networks of programs: parameters, buffers, and the steps of the program in ``forward``."""

    def __init__(self, weights: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in weights.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor.clone())
        self.body: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
        self.arrays: list[Any] = []  # numpy arrays that share the memory of u and f
        self.regions: list[AbstractContextManager[Any]] = []  # contexts that steps have entered, innermost last
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
        """Return the outputs of the program for its inputs."""
        try:
            return self.body(tensors)
        finally:
            while self.regions:
                self.leave()


class At(NamedTuple):
    """Arguments of an operation: the network, two tensors, and a small number."""

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
    """Return a context without the reference's hooks, which torch.func rejects."""
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
    """Norm, softmax and product in float32 between convolutions in bfloat16, as in mixed precision training."""
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
    """Return eight channels, enough for the package's kernels."""
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
    """Return the sum of a chain of gates; each gate resets the values that it passes."""
    v, total = _float(at.a), torch.zeros(())
    for _ in range((12, 50, 200)[at.k]):
        v = 0.8 * v + 0.3 * at.b
        gate = (4 * v - 2).sigmoid()
        v = v * (1 - gate)
        total = total + gate
    return total


def _frozen_relu(at: At, has_norm: bool = False) -> Tensor:
    """Return the result of a frozen layer and an in-place ReLU."""
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
    """Convolve with the signs of a weight, then restore the weight."""
    weight = at.net.w3
    before = weight.data
    weight.data = before.sign()
    out = F.conv2d(at.a, weight, padding=1)
    weight.data = before
    return out


def _codebook(at: At) -> Tensor:
    """Return entries of a codebook, then update the codebook."""
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
    """Update a running mean without a norm of torch."""
    with torch.no_grad():
        at.net.scale.mul_(0.9).add_(at.a.detach().float().mean((0, 2, 3)).view(4, 1, 1), alpha=0.1)


def _refill(array: Any) -> None:
    array[...] = array[::-1].copy()


def _halve(array: Any) -> None:
    array[...] = array // 2


def _swap(at: At) -> None:
    at.net.w3.data = at.net.w3.data * 1.1


def _embedded(at: At) -> Tensor:
    return F.embedding(torch.arange(2), at.net.p.flatten(1)).view(SHAPE)


def _sparse_mm(at: At) -> Tensor:
    rows = at.a.flatten(1)
    return torch.sparse.mm((rows * (rows > 0.5)).to_sparse(), rows.T)


def _padded(at: At, layout: torch.layout) -> Tensor:
    """Return rows of different lengths that went through a linear layer and an activation."""
    rows = at.a.flatten(2)
    nested = torch.nested.as_nested_tensor([rows[0, :, :9].T, rows[1].T], layout=layout)
    nested = F.silu(F.linear(nested, at.net.w1[:, :, 0, 0]))
    return torch.nested.to_padded_tensor(nested, 0.0).transpose(1, 2).reshape_as(at.a)


def _random_depth(at: At) -> Tensor:
    x = at.a
    for _ in range(1 + int(torch.randint(3, ()))):
        x = F.gelu(F.conv2d(x, at.net.w1)).sigmoid()
    return x


def _inference_data(at: At) -> Tensor:
    """Return an inference tensor with other data. It has no version counter and cannot be viewed or written."""
    with torch.inference_mode():
        x = torch.ones(at.a.shape)
    x.data = at.a.detach() * 0.5
    return x


@contextmanager
def _double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


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
#: What torch.compile does not capture, or not as eager torch runs it.
EAGER = {"layout", "replaced data", "cast", "region", "gradient inside", "chain", "subclass", "higher order", "frozen"}
#: Operations of programs that were written by hand, which random programs do not draw, by kind.
SPECIAL: dict[str, Operations] = {
    "elementwise": {
        "times_k": lambda at: at.a * (1.0 + at.k), "add_k": lambda at: torch.add(at.a, at.b, alpha=1 + at.k),
        "times_item": lambda at: at.a * at.b.detach().mean().item(),
        "times_array": lambda at: at.a * torch.from_numpy(np.full((4, 4), 1.0 + at.k, dtype=np.float32)),
        "conj": lambda at: at.a.conj(), "resolved": lambda at: at.a.resolve_conj(),
        "complex_exp": lambda at: at.a.exp(),
        "quotient": lambda at: at.a / (at.b + 3), "to_complex": lambda at: torch.complex(at.a, at.b),
    },
    "shape": {
        "roll_k": lambda at: at.a.roll((at.k, 1), (1, 2)), "gather_k": lambda at: at.a[:, [at.k, 1, 0, at.k]],
        "positive_columns": lambda at: at.a[:, (at.a.detach().sum((0, 2, 3)) > 0).nonzero().flatten()].sum(1, True),
        "pinv": lambda at: torch.linalg.pinv(at.a), "embedded": _embedded,
        "stft": lambda at: torch.stft(
            torch.view_as_real(at.a).flatten(), 16, window=torch.hann_window(16), return_complex=True
        ),
        "sparse": lambda at: (at.a.flatten(1).to_sparse() * 2).to_dense(), "sparse_mm": _sparse_mm,
        "jagged": lambda at: _padded(at, torch.jagged), "nested": lambda at: _padded(at, torch.strided),
        "complex_conv": lambda at: F.conv2d(at.a, torch.complex(at.net.w1, at.net.w1)),
    },
    "view": {"mH": lambda at: at.a.mH, "imag": lambda at: at.a.imag},
    "random": {
        "random_mask": lambda at: torch.where(torch.rand(at.a.shape[-1]) < 0.5, at.a, at.b),
        "random_depth": _random_depth,
        "dropout_k": lambda at: F.dropout(at.a, 0.1 * (1 + at.k)),
    },
    "region": {
        "onednn_off_": lambda at: at.net.enter(torch.backends.mkldnn.flags(enabled=False, allow_tf32=None)),
        "double_on_": lambda at: at.net.enter(_double_by_default()),
        "hooks_on_": lambda at: at.net.enter(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)),
    },
    "write behind autograd": {
        "numpy_half_": lambda at: _halve(_half(at.a.detach(), at.k).numpy()),
        "share_": lambda at: at.a.detach().share_memory_(),
    },
    "replaced data": {
        "parameter_replaced_": lambda at: setattr(at.net.p, "data", at.net.p.data.clamp(-1, 1) * 1.5),
        "inference_data": _inference_data,
    },
    "parameter": {
        "renormed": lambda at: F.embedding(
            torch.arange(32).flip(0) % (32 - at.k), at.net.p.flatten(0, 2), max_norm=1.0
        ).view(SHAPE),
    },
    "subclass": {
        "made": lambda at: Tensor._make_subclass(Made, at.a), "as_weight": lambda at: Weight(at.a),
    },
    "frozen": {
        "frozen_reentrant": lambda at: checkpoint(_head(at), _frozen_relu(at, at.k == 1), use_reentrant=True),
    },
}  # fmt: skip
_ALL = [*KINDS.items(), *SPECIAL.items()]
OPERATIONS: Operations = {name: call for _, operations in _ALL for name, call in operations.items()}
KIND_OF = {name: kind for kind, operations in _ALL for name in operations}
#: What overwrites memory, where a RecipeError may be right.
WRITES = {
    "in place", "write", "write into a view", "write through an alias", "write behind autograd", "buffer", "parameter",
    "function", "operator", "norm", "random", "refill", "parameter behind autograd", "replaced data",
}  # fmt: skip
#: What no version tells of.
HIDES = {"write behind autograd", "parameter behind autograd"}
