"""Batch norm + activation in one module: standard (ABN), in place (InPlaceABN) and synchronised (InPlaceABNSync)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from zoo.ops.abn.autograd import Statistics
from zoo.ops.abn.functional import (
    INVERTIBLE_ACTIVATIONS,
    check_activation,
    check_count,
    check_input,
    check_overwritable,
    check_shortcut,
    normalise,
    normalising_statistics,
    synchronised_group,
)
from zoo.ops.abn.reference import Form
from zoo.ops.context import can_work_in_place

NormFactory = Callable[[int], nn.Module]


class ABN(_NormBase):
    """Standard batch norm followed by an activation; not in place.

    z = f(weight (x - mean) / sqrt(var + eps) + bias), x of shape (N, C, ...), the sign of ``weight`` kept.

    Args: ``num_features`` C; ``momentum`` of the running statistics, None for their cumulative average; ``affine``
    and ``track_running_stats`` as in `torch.nn.BatchNorm2d`; ``activation`` one of relu, leaky_relu, elu, identity;
    ``activation_param`` the slope of leaky_relu or alpha of elu.  All are plain attributes, read at each call.

    In training the running statistics and ``num_batches_tracked`` are updated in place, unless the layer is frozen
    (`freeze_norms`).  Raises ValueError for an unknown activation, a slope or alpha that is not positive, a wrong
    number of channels, and fewer than two values per channel to take statistics of.
    """

    activations: tuple[str, ...] = (*INVERTIBLE_ACTIVATIONS, "relu")

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_activation(activation, activation_param, self.activations)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.activation = activation
        self.activation_param = activation_param
        self.frozen = False
        self.statistics_paused = False  # a recomputation of the forward pass does not count as a batch

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised and activated x, same shape and dtype."""
        check_activation(self.activation, self.activation_param, self.activations)
        check_input(x, [self.weight, self.running_mean])
        mean, var, training, momentum = self.running_mean, self.running_var, self._use_batch_statistics(), 0.0
        if training:
            check_count(x)
        if self._track():
            found = self._next_momentum()
            if isinstance(found, Tensor):
                return self._cumulative(x, found)
            momentum = found
        elif mean is not None and var is not None:
            # Backward keeps them, and a later batch moves the layer's own in place. (In training they are not used.)
            mean, var = mean.clone(), var.clone()
        z = F.batch_norm(x, mean, var, self.weight, self.bias, training, momentum, self.eps)
        return activate_(z, self.activation, self.activation_param)

    def _cumulative(self, x: Tensor, momentum: Tensor) -> Tensor:
        """Return the same in training, for a momentum that is not known on the host."""
        mean, var = torch.zeros_like(self.get_buffer("running_mean")), torch.ones_like(self.get_buffer("running_var"))
        z = F.batch_norm(x, mean, var, self.weight, self.bias, True, 1.0, self.eps)  # they are the batch's now
        with torch.no_grad():
            self.get_buffer("running_mean").lerp_(mean, momentum)
            self.get_buffer("running_var").lerp_(var, momentum)
        return activate_(z, self.activation, self.activation_param)

    def _use_batch_statistics(self) -> bool:
        return self.training or self.running_mean is None or self.running_var is None

    def _track(self) -> bool:
        """Return whether this forward pass moves the running statistics."""
        tracked = self.running_mean is not None and self.running_var is not None
        return self.training and tracked and not self.statistics_paused

    def _next_momentum(self) -> float | Tensor:
        """Count the batch; return the weight of its statistics (momentum None: 1 / number of batches, a tensor)."""
        batches = cast(Tensor, self.num_batches_tracked).add_(1)
        if self.momentum is not None:
            return self.momentum
        return batches.to(self.get_buffer("running_mean").dtype).reciprocal()

    def train(self, mode: bool = True) -> ABN:
        """Set training mode; a frozen layer stays in evaluation mode."""
        return super().train(mode and not self.frozen)

    def extra_repr(self) -> str:
        """Return the settings, in the words of the constructor."""
        text = f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}"
        text += f", activation={self.activation}"
        return text + (f"[{self.activation_param}]" if self.activation in ("leaky_relu", "elu") else "")


class InPlaceABN(ABN):
    """Batch norm + activation that overwrites its input and keeps only its output for backward.

    z = f((|weight| + eps) (x - mean) / sqrt(var + eps) + bias), f one of leaky_relu, elu, identity.

    Arguments, attributes and state dict are those of `ABN`.  The input may not be needed by anything else: a leaf that
    requires grad and a tensor saved by its producer raise RuntimeError in autograd.  Where x is still needed (a
    shortcut, a returned feature) set ``inplace = False``: the output is then a new tensor, and no more is kept.
    Under torch.compile x is never overwritten.  Gradients can be taken once, not twice.  torch refuses full backward
    hooks on modules that work in place: set ``inplace = False`` there too.

    Source: Rota Bulo, Porzi, Kontschieder, In-Place Activated BatchNorm, CVPR 2018; |weight| + eps as in its code.
    """

    activations = INVERTIBLE_ACTIVATIONS

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, activation, activation_param, device, dtype
        )
        self.inplace = True

    def forward(self, x: Tensor, shortcut: Tensor | None = None, activation: tuple[str, float] | None = None) -> Tensor:
        """Return f(norm(x) + shortcut); with ``inplace`` (the default) it is x itself, overwritten.

        ``shortcut`` has the shape and dtype of x and is kept for backward; None adds nothing.  f is ``activation``,
        its name and parameter, or the layer's own.
        """
        check_shortcut(x, shortcut, self.inplace)
        check_overwritable(x, self.inplace)
        form = self.form(activation)
        return normalise(x, self.take_statistics(x), form, self.inplace, shortcut)

    def form(self, activation: tuple[str, float] | None = None) -> Form:
        """Return what makes the output of x_hat, with another activation if one is given; ValueError for a bad one."""
        name, parameter = activation or (self.activation, self.activation_param)
        check_activation(name, parameter, self.activations)
        return Form(self.weight, self.bias, self.eps, name, parameter)

    def take_statistics(self, x: Tensor) -> Statistics:
        """Return the statistics to normalise x with, and count the batch in the running ones if it is to be."""
        mean, var, group = self.running_mean, self.running_var, self._synchronised_group()
        batch = self.training or mean is None or var is None
        # All that may be refused is refused before the batch is counted; counting afterwards is no way, as a
        # recomputation stops at the last tensor it needs, with the statistics moved and the batch not counted.
        check_input(x, [self.weight, mean])
        if not batch:
            return normalising_statistics(x, mean, var, False, 0.0, group)
        if group is None:
            check_count(x)
        if mean is None or var is None or not self.training or self.statistics_paused:
            return normalising_statistics(x, None, None, True, 0.0, group)
        return normalising_statistics(x, mean, var, True, self._next_momentum(), group)

    def _synchronised_group(self) -> dist.ProcessGroup | None:
        return None


class InPlaceABNSync(InPlaceABN):
    """`InPlaceABN` with the batch statistics of all processes of ``group`` (None: the default process group).

    Processes may hold different numbers of values, none included; at least two are needed over the whole group.  One
    all-gather in forward, one all-reduce in backward, no communication in evaluation.  Weight and bias gradients are
    local sums, for DistributedDataParallel to average.  Without a process group it is `InPlaceABN`.  A deep copy shares
    the group; a pickle loses it (None).
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, activation, activation_param, device, dtype
        )
        self.group = group

    def set_group(self, group: dist.ProcessGroup | None) -> None:
        """Synchronise over ``group`` from now on."""
        self.group = group

    def _synchronised_group(self) -> dist.ProcessGroup | None:
        return synchronised_group(self.group) if self.training else None

    def __deepcopy__(self, memo: dict[int, Any]) -> InPlaceABNSync:
        """Return a copy that synchronises over the same group; a group itself cannot be copied."""
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        memo[id(self.group)] = self.group
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle holds: all but the group, which means nothing to another process."""
        return {**self.__dict__, "group": None}


def activate_(z: Tensor, activation: str, activation_param: float) -> Tensor:
    """Overwrite z with its activation (relu, leaky_relu, elu or identity) and return it.

    In a new tensor if compiled, as the compiler makes several times slower code of the forms in place and reuses the
    memory by itself; and in a selective checkpoint, which may have saved z.
    """
    inplace = can_work_in_place()
    if activation == "relu":
        return F.relu(z, inplace)
    if activation == "leaky_relu":
        return F.leaky_relu(z, activation_param, inplace)
    if activation == "elu":
        return F.elu(z, activation_param, inplace)
    return z


KINDS: dict[str, type[ABN]] = {"standard": ABN, "inplace": InPlaceABN, "sync": InPlaceABNSync}


def norm_act(kind: str | NormFactory, activation: str = "leaky_relu", activation_param: float = 0.01) -> NormFactory:
    """Return the function ``channels -> module`` that networks build their norms with.

    ``kind`` is "standard" (`ABN`), "inplace" (`InPlaceABN`), "sync" (`InPlaceABNSync`), or such a function of your own,
    which is returned as it is.  A module of your own must not overwrite its input, or have an attribute ``inplace``
    that turns this off.  Raises ValueError for an unknown kind and for an activation that the kind does not have.
    """
    if callable(kind):
        return kind
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"norm {kind!r} is not one of {', '.join(KINDS)}, nor a function channels -> module")
    layer = KINDS[kind]
    if activation == "relu" and issubclass(layer, InPlaceABN):
        raise ValueError(
            f"activation 'relu' cannot be undone from its output, which norm {kind!r} needs; use leaky_relu, elu or "
            "identity, or norm 'standard'"
        )
    check_activation(activation, activation_param, layer.activations)
    return lambda channels: layer(channels, activation=activation, activation_param=activation_param)


def out_of_place(norm: Any) -> Any:
    """Make a norm leave its input as it is, and return it; for inputs that somebody else still needs."""
    if hasattr(norm, "inplace"):
        norm.inplace = False
    for layer in norm.modules():
        if isinstance(layer, InPlaceABN):
            layer.inplace = False
    return norm


def freeze_norms(module: nn.Module) -> int:
    """Fix all norms of ``module`` (running statistics, no gradients, whatever ``train()`` says); return their number.

    Set ``frozen = False`` on a norm to let it follow ``train()`` again; the state dict does not know of it.  Raises
    ValueError where there is nothing to freeze, or a norm that cannot be: one without running statistics, or one of
    another package, which would follow ``train()``.
    """
    norms = [norm for norm in module.modules() if isinstance(norm, ABN)]
    if not norms:
        raise ValueError(f"{type(module).__name__} has no ABN, InPlaceABN or InPlaceABNSync to freeze")
    for name, norm in module.named_modules():
        if isinstance(norm, _NormBase) and (norm not in norms or norm.running_mean is None):
            why = "is not of this package" if norm not in norms else "has no running statistics"
            raise ValueError(f"{name or 'the module'} ({type(norm).__name__}) cannot be frozen: it {why}")
    for norm in norms:
        norm.frozen = True
        norm.eval()
        norm.requires_grad_(False)
    return len(norms)
