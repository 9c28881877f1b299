"""Batch norm + activation in one module: standard (ABN), in-place (InPlaceABN) and synchronized (InPlaceABNSync)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.ops.abn.functional import INVERTIBLE_ACTIVATIONS, check_activation, group_to_synchronize, inplace_abn
from zoo.ops.abn.reference import activate
from zoo.ops.abn.replica_group import Group
from zoo.ops.abn.statistics import Statistics, check_input, check_num_values, next_momentum, take_statistics
from zoo.ops.context import are_gradients_needed, can_work_in_place
from zoo.torch_internals.data import NormBase

NormFactory = Callable[[int], nn.Module]

torch.fx.wrap("call_norm")  # a leaf call in torch.fx graphs: checks and statistics need tensors with values


def call_norm(norm: Any, *args: Any) -> Tensor:
    """Return ``norm.compute(*args)``."""
    return norm.compute(*args)


class ABN(NormBase):
    """Standard batch norm followed by an activation; not in place.

    z = f(weight (x - mean) / sqrt(var + eps) + bias); ``weight`` may be negative.

    Args:
    - `num_features`: number of channels C of the input (N, C, ...).
    - `eps`: added to the variance.
    - `momentum`: weight of a batch in the running statistics; None for a cumulative average.
    - `affine`: whether the layer has `weight` and `bias`, shape (C,), initially 1 and 0.
    - `track_running_stats`: whether the layer has `running_mean` and `running_var`, shape (C,), and
      `num_batches_tracked`. Without them, evaluation uses batch statistics too.
    - `activation`: relu, leaky_relu, elu or identity.
    - `activation_param`: negative slope of leaky_relu, or alpha of elu; positive.
    - `device`, `dtype`: of parameters and buffers, as in `torch.nn.BatchNorm2d`.

    All are plain attributes, read in each call. Training updates the running statistics and ``num_batches_tracked``
    in place, unless the layer is frozen (`freeze_norms`). Raises ValueError for an unknown activation, a slope or alpha
    that is not positive, a wrong number of channels, and batch statistics of fewer than two values per channel.
    """

    activations: tuple[str, ...] = (*INVERTIBLE_ACTIVATIONS, "relu")
    frozen = False
    statistics_paused = False  # True during a recomputation, which is not a new batch

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
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.activation = activation
        self.activation_param = activation_param
        self.checked_activation()

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized and activated x, of the same shape and dtype."""
        return call_norm(self, x)

    def checked_activation(self) -> tuple[str, float]:
        """Return name and parameter of the activation. Raises ValueError if the layer does not support it."""
        check_activation(self.activation, self.activation_param, self.activations)
        return self.activation, self.activation_param

    def compute(self, x: Tensor) -> Tensor:
        """Implement `forward`, which torch.fx does not trace into."""
        activation = self.checked_activation()
        check_input(x, [self.weight, self.running_mean])
        mean, var, momentum = self.running_mean, self.running_var, 0.0
        tracked = mean is not None and var is not None
        use_batch = self.training or not tracked
        if use_batch:
            check_num_values(x)
        if self.training and tracked and not self.statistics_paused:
            current = next_momentum(self.momentum, self.num_batches_tracked, self.get_buffer("running_mean").dtype)
            if isinstance(current, Tensor):
                return activate_(self._cumulative(x, current), *activation)
            momentum = current
        elif mean is not None and var is not None and are_gradients_needed(x, self.weight, self.bias):
            # Backward needs these vectors; later batches update the layer's own in place.
            mean, var = mean.clone(), var.clone()
        z = F.batch_norm(x, mean, var, self.weight, self.bias, use_batch, momentum, self.eps)
        return activate_(z, *activation)

    def _cumulative(self, x: Tensor, momentum: Tensor) -> Tensor:
        """Normalize x in training and update the running statistics with a momentum that is a tensor."""
        mean, var = torch.zeros_like(self.get_buffer("running_mean")), torch.ones_like(self.get_buffer("running_var"))
        z = F.batch_norm(x, mean, var, self.weight, self.bias, True, 1.0, self.eps)  # sets mean and var
        with torch.no_grad():
            self.get_buffer("running_mean").lerp_(mean, momentum)
            self.get_buffer("running_var").lerp_(var, momentum)
        return z

    def train(self, mode: bool = True) -> ABN:
        """Set training mode; a frozen layer stays in evaluation mode."""
        return super().train(mode and not self.frozen)

    def extra_repr(self) -> str:
        """Return the constructor arguments."""
        text = f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}"
        text += f", activation={self.activation}"
        return text + (f"[{self.activation_param}]" if self.activation in ("leaky_relu", "elu") else "")


class InPlaceABN(ABN):
    """Batch norm + activation. Overwrites its input and saves only its output for backward.

    z = f((|weight| + eps) (x - mean) / sqrt(var + eps) + bias), f one of leaky_relu, elu, identity.

    Arguments, attributes and state dict are the same as for `ABN`; the attribute `inplace` is added.

    Nothing else may need the input: autograd raises RuntimeError for a leaf that requires grad and for a tensor that
    its producer has saved. If x is still needed (a shortcut, a returned feature), set ``inplace = False``: the output
    is then a new tensor, and still the only tensor saved for backward. Also set it for modules with full backward
    hooks, since torch rejects them on in-place modules. Under torch.compile, x is never overwritten. Double backward
    is not supported.

    Source: Rota Bulo, Porzi, Kontschieder, In-Place Activated BatchNorm, CVPR 2018; |weight| + eps as in its code.
    """

    activations = INVERTIBLE_ACTIVATIONS
    inplace = True

    def forward(self, x: Tensor, shortcut: Tensor | None = None, activation: tuple[str, float] | None = None) -> Tensor:
        """Return f(norm(x) + shortcut); overwrites and returns x if ``inplace`` (the default).

        Args:
        - `x`: shape (N, C, ...).
        - `shortcut`: added before the activation, shape and dtype of x; saved for backward. None adds nothing.
        - `activation`: name and parameter of f; default: as in the layer.
        """
        return call_norm(self, x, shortcut, activation)

    def compute(self, x: Tensor, shortcut: Tensor | None = None, activation: tuple[str, float] | None = None) -> Tensor:
        """Implement `forward`, which torch.fx does not trace into."""
        return inplace_abn(
            x,
            self.weight,
            self.bias,
            *self._running_statistics(),
            self.training,
            self.momentum,
            self.eps,
            *(activation or (self.activation, self.activation_param)),
            # FSDP2 passes a view of the input to a module that it shards individually; autograd forbids overwriting it.
            inplace=self.inplace and not hasattr(type(self), "set_reshard_after_forward"),
            group=self._sync_group(),
            shortcut=shortcut,
            num_batches=self.num_batches_tracked,
        )

    def take_statistics(self, x: Tensor) -> Statistics:
        """Return the statistics that normalize x. Updates the running statistics in training.

        Returns copies of running statistics, because backward saves them and later batches update them in place.
        """
        tracking = self.training, self.momentum, self.num_batches_tracked
        vectors = self.weight, self.bias, *self._running_statistics()
        statistics = take_statistics(x, *vectors, *tracking, self._sync_group())
        return statistics if statistics.num_values is not None else statistics._replace(mean=statistics.mean.clone())

    def _running_statistics(self) -> tuple[Tensor | None, Tensor | None]:
        """Return running mean and variance; None for both in a recomputation, so that it does not update them."""
        paused = self.training and self.statistics_paused
        return (None, None) if paused else (self.running_mean, self.running_var)

    def _sync_group(self) -> Group | None:
        return None


class InPlaceABNSync(InPlaceABN):
    """`InPlaceABN` with batch statistics over all processes of a group.

    Args:
    - `group`: the process group; None for the default group. In evaluation, in a group of one process, and without an
      initialized process group, the layer equals `InPlaceABN`.
    - All others: see `ABN`.

    Batch sizes may differ between processes and may be 0; the group needs at least two values per channel in total.
    Forward takes one all-gather, backward one all-reduce; evaluation does not communicate. Gradients of weight and bias
    are local sums, for DistributedDataParallel to average. A deep copy shares the group; pickling sets it to None.
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
        group: Group | None = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, activation, activation_param, device, dtype
        )
        self.group = group

    def set_group(self, group: Group | None) -> None:
        """Synchronize over ``group`` from now on."""
        self.group = group

    def _sync_group(self) -> Group | None:
        return group_to_synchronize(self.group, self.training)

    def __deepcopy__(self, memo: dict[int, Any]) -> InPlaceABNSync:
        """Return a copy with the same group; process groups cannot be copied."""
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        memo[id(self.group)] = self.group
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle, without the group: it is meaningless in another process."""
        return {**self.__dict__, "group": None}


def activate_(z: Tensor, activation: str, activation_param: float) -> Tensor:
    """Overwrite z with its activation (relu, leaky_relu, elu or identity) and return it.

    Returns a new tensor in a selective checkpoint, which may have saved z, and under torch.compile, which reuses memory
    by itself and generates code several times slower for in-place activations.
    """
    return activate(z, activation, activation_param, can_work_in_place())


NORM_CLASSES: dict[str, type[ABN]] = {"standard": ABN, "inplace": InPlaceABN, "sync": InPlaceABNSync}


def norm_act(kind: str | NormFactory, activation: str = "leaky_relu", activation_param: float = 0.01) -> NormFactory:
    """Return a norm factory, ``channels -> module``, that networks build their norms with.

    Args:
    - `kind`: "standard" (`ABN`), "inplace" (`InPlaceABN`), "sync" (`InPlaceABNSync`), or a factory, which is returned
      unchanged. Its modules must not overwrite their input, or must have an attribute ``inplace`` to set to False.
    - `activation`, `activation_param`: as in `ABN`.

    Raises ValueError for an unknown kind, and for an activation that the kind does not support.
    """
    if callable(kind):
        return kind
    if not isinstance(kind, str) or kind not in NORM_CLASSES:
        raise ValueError(f"norm {kind!r} is not one of {', '.join(NORM_CLASSES)}, nor a function channels -> module")
    layer = NORM_CLASSES[kind]
    check_activation(activation, activation_param, layer.activations)
    return lambda channels: layer(channels, activation=activation, activation_param=activation_param)


def out_of_place(norm: Any) -> Any:
    """Set a norm whose input other layers read too to work out of place; return the norm."""
    if hasattr(norm, "inplace"):
        norm.inplace = False
    for layer in norm.modules():
        if isinstance(layer, InPlaceABN):
            layer.inplace = False
    return norm


def freeze_norms(module: nn.Module) -> int:
    """Freeze all norms of ``module`` in evaluation mode, without gradients; return their number.

    A frozen norm ignores ``train()`` until its attribute ``frozen`` is set to False; the state dict does not contain
    it. Raises ValueError if there is no norm, or a norm that cannot be frozen: one without running statistics, or
    one of another package, which would follow ``train()``.
    """
    norms = [norm for norm in module.modules() if isinstance(norm, ABN)]
    if not norms:
        raise ValueError(f"{type(module).__name__} has no ABN, InPlaceABN or InPlaceABNSync to freeze")
    for name, norm in module.named_modules():
        if isinstance(norm, NormBase) and (norm not in norms or norm.running_mean is None):
            reason = "is not a norm of this package" if norm not in norms else "has no running statistics"
            raise ValueError(f"{name or 'the module'} ({type(norm).__name__}) cannot be frozen: it {reason}")
    for norm in norms:
        norm.frozen = True
        norm.eval()
        norm.requires_grad_(False)
    return len(norms)


_groups: dict[tuple[Any, tuple[int, ...]], Any] = {}


def active_group(active: bool) -> Any:
    """Return the process group of all ranks that call this with ``active=True``; None if there are none.

    A collective: every rank of the default group must call it. Groups are cached. An inactive rank gets torch's
    non-member marker, for which norms do not synchronize.
    """
    world_size = dist.get_world_size()
    answers: list[bool] = [False] * world_size
    dist.all_gather_object(answers, active)
    ranks = tuple(rank for rank, answer in enumerate(answers) if answer)
    if not ranks:
        return None
    if len(ranks) == world_size:
        return dist.group.WORLD
    key = (dist.group.WORLD, ranks)  # destroying the default group invalidates the groups made in it
    if key not in _groups:
        _groups[key] = dist.new_group(list(ranks))
    return _groups[key]


def set_active_group(module: nn.Module, group: Any) -> None:
    """Set the process group of every synchronized norm in ``module`` (every submodule with ``set_group``)."""
    for submodule in module.modules():
        set_group = getattr(submodule, "set_group", None)
        if callable(set_group):
            set_group(group)
