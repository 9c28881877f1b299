"""Batch norm + activation in one module: standard (ABN), in place (InPlaceABN) and synchronised (InPlaceABNSync)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.ops.abn.functional import INVERTIBLE_ACTIVATIONS, check_activation, group_to_synchronise, inplace_abn
from zoo.ops.abn.statistics import Statistics, check_input, check_num_values, next_momentum, take_statistics
from zoo.ops.context import can_work_in_place
from zoo.torch_internals import NormBase

NormFactory = Callable[[int], nn.Module]

torch.fx.wrap("call_norm")  # one call in a traced graph: the checks and the statistics need a tensor with values


def call_norm(norm: Any, *args: Any) -> Tensor:
    """Return ``norm.compute(*args)``."""
    return norm.compute(*args)


class ABN(NormBase):
    """Standard batch norm followed by an activation; not in place.

    z = f(weight (x - mean) / sqrt(var + eps) + bias), with the sign of ``weight`` kept.

    Args:
    - `num_features`: the number of channels C of the inputs, which have shape (N, C, ...).
    - `eps`: added to the variance.
    - `momentum`: the weight of a batch in the running statistics, or None for their cumulative average.
    - `affine`: have `weight` and `bias`, shape (C,), starting at 1 and 0.
    - `track_running_stats`: have `running_mean` and `running_var`, shape (C,), and `num_batches_tracked`. Without them
      evaluation uses the statistics of the batch, too.
    - `activation`: relu, leaky_relu, elu or identity.
    - `activation_param`: the slope of leaky_relu below 0, or the alpha of elu; positive.
    - `device`, `dtype`: where and as what parameters and buffers are made, as in `torch.nn.BatchNorm2d`.

    All are plain attributes, read at each call. In training the running statistics and ``num_batches_tracked`` are
    updated in place, unless the layer is frozen (`freeze_norms`). Raises ValueError for an unknown activation, a slope
    or alpha that is not positive, a wrong number of channels, and fewer than two values per channel to take statistics
    of.
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
        self.statistics_paused = False  # True while a forward pass is repeated, which does not count as a batch

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised and activated x, same shape and dtype."""
        return call_norm(self, x)

    def compute(self, x: Tensor) -> Tensor:
        """Do the work of `forward`."""
        check_activation(self.activation, self.activation_param, self.activations)
        check_input(x, [self.weight, self.running_mean])
        mean, var, momentum = self.running_mean, self.running_var, 0.0
        tracked = mean is not None and var is not None
        use_batch = self.training or not tracked
        if use_batch:
            check_num_values(x)
        if self.training and tracked and not self.statistics_paused:
            current = next_momentum(self.momentum, self.num_batches_tracked, self.get_buffer("running_mean").dtype)
            if isinstance(current, Tensor):
                return self._cumulative(x, current)
            momentum = current
        elif mean is not None and var is not None:
            # Backward keeps these vectors, and a later batch updates the layer's own in place.
            mean, var = mean.clone(), var.clone()
        z = F.batch_norm(x, mean, var, self.weight, self.bias, use_batch, momentum, self.eps)
        return activate_(z, self.activation, self.activation_param)

    def _cumulative(self, x: Tensor, momentum: Tensor) -> Tensor:
        """Return what `forward` does in training, for a momentum that is a tensor."""
        mean, var = torch.zeros_like(self.get_buffer("running_mean")), torch.ones_like(self.get_buffer("running_var"))
        z = F.batch_norm(x, mean, var, self.weight, self.bias, True, 1.0, self.eps)  # sets mean and var
        with torch.no_grad():
            self.get_buffer("running_mean").lerp_(mean, momentum)
            self.get_buffer("running_var").lerp_(var, momentum)
        return activate_(z, self.activation, self.activation_param)

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

    The arguments are those of `ABN`; attributes and state dict as well, except for `inplace`.

    Nothing else may need the input: autograd raises RuntimeError for a leaf that requires grad and for a tensor that
    its producer has saved. Where x is still needed (a shortcut, a returned feature) set ``inplace = False``: the output
    is then a new tensor, and no more is kept for backward. Under torch.compile x is never overwritten. Gradients can be
    taken once, not twice. torch refuses full backward hooks on modules that work in place: set ``inplace = False``
    there, too.

    Source: Rota Bulo, Porzi, Kontschieder, In-Place Activated BatchNorm, CVPR 2018; |weight| + eps as in its code.
    """

    activations = INVERTIBLE_ACTIVATIONS
    inplace = True

    def forward(self, x: Tensor, shortcut: Tensor | None = None, activation: tuple[str, float] | None = None) -> Tensor:
        """Return f(norm(x) + shortcut); with ``inplace`` (the default) it is x itself, overwritten.

        Args:
        - `x`: shape (N, C, ...).
        - `shortcut`: added before the activation; it has the shape and dtype of x and is kept for backward; None adds
          nothing.
        - `activation`: name and parameter of f; None for those of the layer.
        """
        return call_norm(self, x, shortcut, activation)

    def compute(self, x: Tensor, shortcut: Tensor | None = None, activation: tuple[str, float] | None = None) -> Tensor:
        """Do the work of `forward`."""
        return inplace_abn(
            x,
            self.weight,
            self.bias,
            *self._running_statistics(),
            self.training,
            self.momentum,
            self.eps,
            *(activation or (self.activation, self.activation_param)),
            # FSDP2 hands a module that it shards by itself a view of the input, which autograd lets nobody overwrite.
            inplace=self.inplace and not hasattr(type(self), "set_reshard_after_forward"),
            group=self._group_to_synchronise(),
            shortcut=shortcut,
            num_batches=self.num_batches_tracked,
        )

    def take_statistics(self, x: Tensor) -> Statistics:
        """Return the statistics to normalise x with; in training, count the batch and update the running ones."""
        tracking = self.training, self.momentum, self.num_batches_tracked
        vectors = self.weight, self.bias, *self._running_statistics()
        return take_statistics(x, *vectors, *tracking, self._group_to_synchronise())

    def _running_statistics(self) -> tuple[Tensor | None, Tensor | None]:
        """Return mean and variance; None for a forward pass that is repeated, which leaves them as they are."""
        paused = self.training and self.statistics_paused
        return (None, None) if paused else (self.running_mean, self.running_var)

    def _group_to_synchronise(self) -> dist.ProcessGroup | None:
        return None


class InPlaceABNSync(InPlaceABN):
    """`InPlaceABN` with the batch statistics of all processes of ``group`` (None: the default process group).

    Args:
    - `group`: the process group, or None for the default one. Without an initialised process group, in a group of one
      process and in evaluation the layer is an `InPlaceABN`.
    - All others are those of `ABN`.

    Processes may hold different numbers of values, or none; the whole group needs at least two per channel. There is
    one all-gather in forward, one all-reduce in backward, and no communication in evaluation. The gradients of weight
    and bias are local sums, for DistributedDataParallel to average. A deep copy shares the group; a pickle loses it
    (None).
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

    def _group_to_synchronise(self) -> dist.ProcessGroup | None:
        return group_to_synchronise(self.group, self.training)

    def __deepcopy__(self, memo: dict[int, Any]) -> InPlaceABNSync:
        """Return a copy that synchronises over the same group; a group itself cannot be copied."""
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        memo[id(self.group)] = self.group
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: everything except the group, which means nothing to another process."""
        return {**self.__dict__, "group": None}


def activate_(z: Tensor, activation: str, activation_param: float) -> Tensor:
    """Overwrite z with its activation (relu, leaky_relu, elu or identity) and return it.

    Under torch.compile, and in a selective checkpoint, which may have saved z, the result is a new tensor. The compiler
    makes code that is several times slower of activations in place, and reuses the memory by itself.
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

    ``kind`` is "standard" (`ABN`), "inplace" (`InPlaceABN`), "sync" (`InPlaceABNSync`), or a function of this kind,
    which is returned as it is. A custom module must leave its input unchanged, or offer an attribute ``inplace`` that
    can be set to False. Raises ValueError for an unknown kind and for an activation that the kind does not have.
    """
    if callable(kind):
        return kind
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"norm {kind!r} is not one of {', '.join(KINDS)}, nor a function channels -> module")
    layer = KINDS[kind]
    check_activation(activation, activation_param, layer.activations)
    return lambda channels: layer(channels, activation=activation, activation_param=activation_param)


def out_of_place(norm: Any) -> Any:
    """Make a norm leave its input unchanged, and return the norm; for inputs that something else still needs."""
    if hasattr(norm, "inplace"):
        norm.inplace = False
    for layer in norm.modules():
        if isinstance(layer, InPlaceABN):
            layer.inplace = False
    return norm


def freeze_norms(module: nn.Module) -> int:
    """Freeze all norms of ``module`` in evaluation mode, without gradients, and return their number.

    They ignore ``train()`` until ``frozen = False`` is set on a norm; this is not part of the state dict. Raises
    ValueError where there is nothing to freeze, or a norm that cannot be frozen: one without running statistics, or one
    of another package, which would follow ``train()``.
    """
    norms = [norm for norm in module.modules() if isinstance(norm, ABN)]
    if not norms:
        raise ValueError(f"{type(module).__name__} has no ABN, InPlaceABN or InPlaceABNSync to freeze")
    for name, norm in module.named_modules():
        if isinstance(norm, NormBase) and (norm not in norms or norm.running_mean is None):
            why = "is not of this package" if norm not in norms else "has no running statistics"
            raise ValueError(f"{name or 'the module'} ({type(norm).__name__}) cannot be frozen: it {why}")
    for norm in norms:
        norm.frozen = True
        norm.eval()
        norm.requires_grad_(False)
    return len(norms)


_groups: dict[tuple[Any, tuple[int, ...]], Any] = {}


def active_group(active: bool) -> Any:
    """Return the group of all processes that call this with ``active=True``; None if none does.

    Collective: every process of the default group calls it. A group is made once and cached. A process that is not
    active gets torch's marker for processes outside a group, with which norms do not synchronise.
    """
    world_size = dist.get_world_size()
    answers: list[bool] = [False] * world_size
    dist.all_gather_object(answers, active)
    ranks = tuple(rank for rank, answer in enumerate(answers) if answer)
    if not ranks:
        return None
    if len(ranks) == world_size:
        return dist.group.WORLD
    key = (dist.group.WORLD, ranks)  # a group ends with the default group that it was made in
    if key not in _groups:
        _groups[key] = dist.new_group(list(ranks))
    return _groups[key]


def set_active_group(module: nn.Module, group: Any) -> None:
    """Make every synchronised norm in ``module`` (every submodule with ``set_group``) use ``group``."""
    for submodule in module.modules():
        set_group = getattr(submodule, "set_group", None)
        if callable(set_group):
            set_group(group)
