"""Invertible layers: backward reconstructs each layer's input in the memory of its output (Hascoet et al. 2023).

A chain (`zoo.ops.chain.run_chain`) inverts such layers one by one, from the last to the first. A layer's ``forward`` is
ordinary torch, ``record_`` computes the same in place, and ``undo_`` turns output and output gradient into input and
input gradient, also in place. Reversible blocks, which need no inverse of f and g, are in `zoo.layers.reversible`.

Source: Hascoet et al., EURASIP JIVP 2023:1, section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import ConfigError
from zoo.layers.conv import conv2d
from zoo.layers.norm import ABN, InPlaceABN, InPlaceABNSync, call_norm
from zoo.layers.reversible import subtract_branch
from zoo.ops.abn.functional import normalize
from zoo.ops.abn.reference import NormSettings
from zoo.ops.abn.statistics import Statistics
from zoo.ops.chain import Gradients, Tensors, add_gradients
from zoo.ops.context import are_gradients_needed
from zoo.ops.convolution import is_plain_convolution
from zoo.ops.inverse import (
    batch_pool,
    batch_unpool_,
    channel_pool,
    channel_unpool_,
    convolve,
    convolve_gradients,
    couple_,
    global_max,
    global_max_gradient,
    halves,
    invert_coupling_,
    invert_leaky_relu_,
    invert_norm_,
    normalize_,
)
from zoo.ops.operators import at_least_float32
from zoo.ops.recomputation import pause_statistics
from zoo.torch_internals.data import changed_methods, has_own_hooks, has_own_parameters

torch.fx.wrap("call_norm")


class BypassedLayerError(ConfigError):
    """An invertible layer bypasses a changed layer, so it would not compute what a call of that layer computes.

    Args:
    - `layer`: the changed layer.
    - `what`, `remedy`: see `ZooError`.
    - `name`: the qualified name of the layer, if known.
    """

    def __init__(self, layer: nn.Module, what: str, remedy: str, name: str = "") -> None:
        self.layer, self.what, self.remedy = layer, what, remedy
        super().__init__(what, f"{name} ({type(layer).__name__})" if name else type(layer).__name__, remedy)

    def within(self, network: nn.Module) -> BypassedLayerError:
        """Return a copy of the error that names the layer within ``network``."""
        name = next((name for name, module in network.named_modules() if module is self.layer), "")
        return BypassedLayerError(self.layer, self.what, self.remedy, name)


def _changes(layer: nn.Module) -> str:
    """Describe what changes the call of a layer, or return "". Global hooks do not: they see only called layers."""
    return (
        ("it has hooks" if has_own_hooks(layer) else "")
        or " and ".join(f"its {name} is replaced" for name in changed_methods(layer))
        or ""
    )


def _check_link(layer: nn.Module) -> None:
    """Raise BypassedLayerError if an invertible layer was changed. A chain does not call such layers."""
    if what := _changes(layer):
        raise BypassedLayerError(
            layer,
            f"{what}, but a chain of invertible layers computes its output in place, without calling it",
            'save activations (memory="plain", or store=True for a chain of your own), or undo the change',
        )


class Invertible(nn.Module):
    """Base class of layers that map x of shape (N, C, H, W) to y and can be inverted.

    `record` and `record_` also return ``saved``, the state that `reverse` and `undo_` need in addition to y.
    """

    def record_(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return y in the memory of the contiguous x, and ``saved``."""
        raise NotImplementedError

    def undo_(self, y: Tensor, dy: Tensor, saved: Any) -> tuple[Tensor, Tensor, Gradients]:
        """Return x in the memory of y, dx in the memory of dy, and the gradients of the parameters."""
        raise NotImplementedError

    def record(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return y in a new tensor, and ``saved``."""
        return self.record_(x.clone(memory_format=torch.contiguous_format))

    def reverse(
        self, y: Tensor, dy: Tensor, may_overwrite: bool, saved: Any
    ) -> tuple[Tensor, Tensor | None, Gradients]:
        """Return x, dx and the gradients of the parameters; overwrites y and dy only if ``may_overwrite``."""
        if not may_overwrite:
            y, dy = (tensor.clone(memory_format=torch.contiguous_format) for tensor in (y, dy))
        return self.undo_(y, dy, saved)

    def as_links(self) -> tuple[LayerCall]:
        """Return a link for one call of the layer."""
        return (LayerCall(self),)


class LayerCall:
    """One call of a layer in a chain: a link that holds the call's ``saved`` state."""

    def __init__(self, layer: Invertible) -> None:
        self.layer = layer
        self.saved: Any = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output in a new tensor; autograd records nothing."""
        _check_link(self.layer)
        y, self.saved = self.layer.record(x)
        return y

    def modules(self) -> Iterable[nn.Module]:
        """Return the modules of the layer."""
        return self.layer.modules()

    def reverse(self, ys: Tensors, grads: Tensors, may_overwrite: bool) -> tuple[Tensors, Any, Gradients]:
        """Return the input, its gradient, and the gradients of the parameters."""
        x, dx, gradients = self.layer.reverse(ys[0], grads[0], may_overwrite, self.saved)
        return (x,), (dx,), gradients


class _Pool(Invertible):
    """Base class of the pools. Subclasses set ``pool`` and ``unpool_``, its inverse in place."""

    pool: Callable[[Tensor], Tensor]
    unpool_: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """Return y in a new tensor."""
        return self.pool(x)

    def record(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return y in a new tensor; ``saved`` is None."""
        return self.pool(x), None

    def undo_(self, y: Tensor, dy: Tensor, saved: Any) -> tuple[Tensor, Tensor, Gradients]:
        """Return x and dx in the memory of y and dy."""
        return self.unpool_(y), self.unpool_(dy), {}


class ChannelPool(_Pool):
    """Moves 2x2 windows into channels: (N, C, H, W) -> (N, 4 C, H/2, W/2), see `zoo.ops.inverse.channel_pool`."""

    pool = staticmethod(channel_pool)
    unpool_ = staticmethod(channel_unpool_)


class BatchPool(_Pool):
    """Moves 2x2 windows into the batch: (N, C, H, W) -> (4 N, C, H/2, W/2), see `zoo.ops.inverse.batch_pool`."""

    pool = staticmethod(batch_pool)
    unpool_ = staticmethod(batch_unpool_)


class InvertibleLeakyReLU(Invertible):
    """Leaky ReLU; its inverse is a leaky ReLU with slope 1 / ``slope``."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        """Return y in a new tensor."""
        return F.leaky_relu(x, self.slope)

    def record_(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return y in the memory of x; ``saved`` is None."""
        return F.leaky_relu_(x, self.slope), None

    def undo_(self, y: Tensor, dy: Tensor, saved: Any) -> tuple[Tensor, Tensor, Gradients]:
        """Return x and dx in the memory of y and dy."""
        invert_leaky_relu_(y, dy, self.slope)
        return y, dy, {}


class InvertibleNorm(Invertible):
    """Batch norm y = (|weight| + eps_i) (x - mean) / sqrt(var + eps) + bias, inverted with the same statistics.

    Args:
    - `norm`: holds parameters and running statistics and computes batch statistics, over all processes if it is
      synchronized. Its activation is not used.
    - `eps_i`: minimum gain; bounds the error amplification of the inverse.

    In evaluation without gradients, the layer is torch's batch norm with the scale |weight| + eps_i, also in exported
    programs.

    Source: Hascoet et al. 2023, section 4.2.1; in their code ``eps_i`` did not reach the layers.
    """

    def __init__(self, norm: ABN, eps_i: float) -> None:
        super().__init__()
        self.norm = norm if isinstance(norm, InPlaceABN) else InPlaceABN(norm.num_features, norm.eps, norm.momentum)
        self.eps_i = eps_i

    def forward(self, x: Tensor) -> Tensor:
        """Return y in a new tensor; updates the running statistics in training."""
        return call_norm(self, x)

    def compute(self, x: Tensor) -> Tensor:
        """Implement `forward`, which torch.fx does not trace into."""
        self._check_norm(x)
        norm = self.norm
        mean, var = norm.running_mean, norm.running_var
        if norm.training or mean is None or var is None or are_gradients_needed(x, norm.weight, norm.bias):
            return normalize(x, norm.take_statistics(x), self._settings(), inplace=False)
        return F.batch_norm(x, mean, var, norm.weight.abs() + self.eps_i, norm.bias, eps=norm.eps)

    def record_(self, x: Tensor) -> tuple[Tensor, Statistics]:
        """Return y in the memory of x, and the statistics; updates the running statistics in training."""
        self._check_norm(x)
        statistics = self.norm.take_statistics(x)
        normalize_(x, statistics, self._settings())
        return x, statistics

    def undo_(self, y: Tensor, dy: Tensor, saved: Statistics) -> tuple[Tensor, Tensor, Gradients]:
        """Return x and dx in the memory of y and dy, and the gradients of weight and bias."""
        weight, bias = self.norm.weight, self.norm.bias
        dgain, dbias = invert_norm_(y, dy, saved, self._settings())
        return y, dy, {weight: torch.where(weight < 0, -dgain, dgain), bias: dbias}

    def _check_norm(self, x: Tensor) -> None:
        """Raise BypassedLayerError if the norm was changed: this layer reads its parameters and does not call it."""
        norm = self.norm
        what = _changes(norm)
        if not what and type(norm) not in (InPlaceABN, InPlaceABNSync):
            what = "it is not an InPlaceABN or InPlaceABNSync itself"
        if not what and not has_own_parameters(norm, x):
            what = "its parameters are on the meta device or not its own"
        if what:
            raise BypassedLayerError(
                norm,
                f"{what}, but an invertible norm reads its parameters without calling it",
                "undo the change (remove hooks, parametrizations and offloading of the norms of this network)",
            )

    def _settings(self) -> NormSettings:
        """Return settings with a shifted weight, so that their |weight| + eps is the gain |weight| + eps_i."""
        norm = self.norm
        return NormSettings(norm.weight.abs() + (self.eps_i - norm.eps), norm.bias, norm.eps, "identity", 0.0)


class Coupling(Invertible):
    """Additive coupling of the halves of the channels, y1 = x1 + f(x2), y2 = x2 + g(y1); base class."""

    f: Any  # modules
    g: Any

    def forward(self, x: Tensor) -> Tensor:
        """Return y in a new tensor."""
        x1, x2 = halves(x)
        y1 = x1 + self.f(x2)
        return torch.cat([y1, x2 + self.g(y1)], 1)


class InvertibleConv(Coupling):
    """Additive coupling whose f and g are 3x3 convolutions without bias.

    Raises ValueError for an odd number of channels. Source: Hascoet et al. 2023, section 4.2.3.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        if channels % 2:
            raise ValueError(f"an invertible convolution needs an even number of channels, got {channels}")
        self.f = conv2d(channels // 2, channels // 2, 3)
        self.g = conv2d(channels // 2, channels // 2, 3)

    def record_(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return y, in the memory of x if f and g are plain convolutions; ``saved`` is None."""
        if not self._are_plain(x):
            return Coupling.forward(self, x).contiguous(), None  # hooks may hold on to the inputs of f and g
        couple_(x, self.f, self.g)
        return x, None

    def undo_(self, y: Tensor, dy: Tensor, saved: Any) -> tuple[Tensor, Tensor, Gradients]:
        """Return x and dx in the memory of y and dy, and the gradients of the weights."""
        if self._are_plain(y):
            return y, dy, invert_coupling_(y, dy, self.f, self.g)
        (y1, y2), (dy1, dy2) = halves(y), halves(dy)
        gradients: Gradients = {}
        for branch, source, target, dsource, dtarget in ((self.g, y1, y2, dy1, dy2), (self.f, y2, y1, dy2, dy1)):
            copy = source.clone()  # autograd saves it; writes to the other half would change the version of a view
            add_gradients(gradients, subtract_branch(branch, (copy,), target, (dsource,), dtarget, True, None)[2])
        return y, dy, gradients

    def _are_plain(self, x: Tensor) -> bool:
        """Return whether f and g may be bypassed: unchanged convolutions without bias."""
        return all(is_plain_convolution(conv, x) and conv.bias is None for conv in (self.f, self.g))


class LayerwiseBlock(Coupling):
    """Reversible block whose branches f and g consist of invertible layers.

    Backward recomputes a branch, subtracts its output, and inverts the branch layer by layer. Inside a branch only one
    map and its gradient exist at a time. The branch runs on a copy of its input, half of the map, so that rounding
    errors of its inverse stay inside the block.

    Args:
    - `f`, `g`: layers of the branches; each preserves the shape.

    Source: Hascoet et al. 2023, section 4.4.
    """

    def __init__(self, f: Sequence[Invertible], g: Sequence[Invertible]) -> None:
        super().__init__()
        self.f = nn.Sequential(*f)
        self.g = nn.Sequential(*g)

    def record_(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return y in the memory of x; ``saved`` is None."""
        x1, x2 = halves(x)
        for source, branch, target in ((x2, self.f, x1), (x1, self.g, x2)):
            target.add_(_record_layers_(branch, source.clone(memory_format=torch.contiguous_format))[0])
        return x, None

    def undo_(self, y: Tensor, dy: Tensor, saved: Any) -> tuple[Tensor, Tensor, Gradients]:
        """Return x and dx in the memory of y and dy, and parameter gradients; does not update running statistics."""
        (y1, y2), (dy1, dy2) = halves(y), halves(dy)
        with pause_statistics(self):
            gradients = _subtract_layers_(self.g, y1, y2, dy1, dy2)
            add_gradients(gradients, _subtract_layers_(self.f, y2, y1, dy2, dy1))
        return y, dy, gradients


def _record_layers_(layers: Iterable[Any], x: Tensor) -> tuple[Tensor, list[Any]]:
    """Return the layers' output in the memory of x, and the ``saved`` state of each layer."""
    saved_by_layers = []
    for layer in layers:
        _check_link(layer)
        x, saved = layer.record_(x)
        saved_by_layers.append(saved)
    return x, saved_by_layers


def _subtract_layers_(
    branch: nn.Sequential, source: Tensor, target: Tensor, dsource: Tensor, dtarget: Tensor
) -> Gradients:
    """Subtract ``branch(source)`` from target, add its gradient to dsource; return the gradients of the parameters."""
    z, saved_by_layers = _record_layers_(branch, source.clone(memory_format=torch.contiguous_format))
    target.sub_(z)
    dz = dtarget.clone(memory_format=torch.contiguous_format)
    gradients: Gradients = {}
    for layer, saved in zip(reversed(list(branch)), reversed(saved_by_layers), strict=True):
        z, dz, of_layer = layer.undo_(z, dz, saved)  # type: ignore[operator]
        add_gradients(gradients, of_layer)
    dsource.add_(dz)
    return gradients


class Stem(Invertible):
    """The first convolution; saves its input, the images, instead of inverting the convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = conv2d(3, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve the images. The result is at least float32, since later layers accumulate into it."""
        return at_least_float32(self.conv(x))

    def record(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, int]]:
        """Return the convolution, at least in float32, and as ``saved`` the images with their version counter."""
        y = convolve(x, self.conv) if self._is_plain(x) else Stem.forward(self, x).contiguous()
        return y, (x, x._version)

    def reverse(
        self, y: Tensor, dy: Tensor, may_overwrite: bool, saved: tuple[Tensor, int]
    ) -> tuple[Tensor, Tensor | None, Gradients]:
        """Return the images, their gradient if they require one, and the gradient of the weight.

        Raises RuntimeError if the images have been overwritten.
        """
        x, version = saved
        if x._version != version:
            raise RuntimeError(
                f"the images of shape {tuple(x.shape)} were overwritten between the forward and the backward pass of "
                "an invertible network, which needs them; pass it a copy"
            )
        if not self._is_plain(x):
            zeros = torch.zeros_like(x)
            _, (dimages,), gradients, _ = subtract_branch(
                self.conv, (x,), y, (zeros,), dy, may_overwrite=False, grid_bits=None
            )
            return x, dimages if x.requires_grad else None, gradients
        dx, dweight = convolve_gradients(x, dy, self.conv)
        return x, dx, {self.conv.weight: dweight}

    def _is_plain(self, x: Tensor) -> bool:
        """Return whether the convolution may be bypassed: unchanged and without bias."""
        return is_plain_convolution(self.conv, x) and self.conv.bias is None


class GlobalMax(Invertible):
    """Global max pooling over the maps of ``images`` images: (N images, C, H, W) -> (N, C).

    Backward can run only once: it passes the saved map to the layers before, and they overwrite it.

    Args:
    - `images`: number of parts into which the batch pools split each image.
    """

    def __init__(self, images: int) -> None:
        super().__init__()
        self.images = images

    def forward(self, x: Tensor) -> Tensor:
        """Return the features (N, C)."""
        return global_max(x, self.images)

    def record(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the features, and the map."""
        return self(x), [x]

    def reverse(
        self, y: Tensor, dy: Tensor, may_overwrite: bool, saved: list[Tensor]
    ) -> tuple[Tensor, Tensor, Gradients]:
        """Return the map and its gradient. Raises RuntimeError in a second backward pass."""
        if not saved:
            raise RuntimeError("backward through an invertible network can run only once: it overwrites what it saved")
        x = saved.pop()
        return x, global_max_gradient(x, y, dy, self.images), {}
