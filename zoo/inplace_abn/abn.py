"""The norm modules with the constructors of all releases of the original; modules that it pickled load as these.

Tested by tests/inplace_abn/test_init.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from zoo import layers
from zoo.inplace_abn.functions import ACT_ELU, normalize_and_activate, renamed


class ABN(layers.ABN):
    """`zoo.layers.ABN` with the arguments of all releases of inplace_abn.

    Args:
    - `num_features`, `eps`, `momentum`, `affine`: as in `zoo.layers.ABN`.
    - `args`: `track_running_stats`, `activation` and `activation_param`, as in release 1.1; a string in the first place
      is `activation`, as in earlier releases.
    - `settings`: the same by name, and `device` and `dtype`. `slope` is the name of `activation_param` in releases 0.x,
      where alpha of ELU was always 1.

    The activation "none" is "identity", and leaky_relu with slope 0 is ReLU.
    """

    positional: tuple[str, ...] = ("track_running_stats", "activation", "activation_param")

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        *args: Any,
        **settings: Any,
    ) -> None:
        names = self.positional[1:] if args and isinstance(args[0], str) else self.positional
        if len(args) > len(names):
            raise TypeError(f"{type(self).__name__} takes {4 + len(names)} positional arguments, got {4 + len(args)}")
        given = dict(zip(names, args, strict=False))
        if "slope" in settings:
            if "activation_param" in {**given, **settings}:
                raise TypeError(f"{type(self).__name__} got slope and activation_param, which are the same")
            activation = settings.get("activation", given.get("activation"))
            settings["activation_param"] = _activation_param(activation, settings.pop("slope"))
        super().__init__(num_features, eps, momentum, affine, **given, **settings)

    @property
    def slope(self) -> float:
        """The name of `activation_param` in releases 0.x."""
        return self.activation_param

    def checked_activation(self) -> tuple[str, float]:
        """Return name and parameter of the activation in terms of `zoo.layers`; raises ValueError if it is unknown."""
        return renamed(self.activation, self.activation_param) or super().checked_activation()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over the attributes of a pickled module of any release, and add the attributes of later releases."""
        state = dict(state)
        if "slope" in state:
            state["activation_param"] = _activation_param(state["activation"], state.pop("slope"))
        super().__setstate__(state)
        if not hasattr(self, "num_batches_tracked"):
            mean = self.running_mean
            self.track_running_stats = mean is not None
            counter = None if mean is None else torch.zeros((), dtype=torch.long, device=mean.device)
            self.register_buffer("num_batches_tracked", counter)


class InPlaceABN(ABN, layers.InPlaceABN):
    """`zoo.layers.InPlaceABN` with the arguments of all releases of inplace_abn, see `ABN`.

    With slope 0 the norm is in place, and a ReLU follows in a new tensor: both outputs are saved for backward. The
    original's backward treats every output of such a layer as positive, so that its gradients are wrong.
    """

    def compute(self, x: Tensor, shortcut: Tensor | None = None, activation: tuple[str, float] | None = None) -> Tensor:
        """Implement `forward`, which torch.fx does not trace into."""
        norm = partial(super().compute, x, shortcut)
        return normalize_and_activate(norm, activation or (self.activation, self.activation_param))


class InPlaceABNSync(InPlaceABN, layers.InPlaceABNSync):
    """`zoo.layers.InPlaceABNSync` with the arguments of all releases of inplace_abn, see `ABN`; `group` is the last."""

    positional = (*ABN.positional, "group")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over the attributes of a pickled module, without its group, which is meaningless to another process."""
        super().__setstate__({**state, "group": None})


def _activation_param(activation: str | None, slope: float) -> float:
    """Return `activation_param` for the `slope` of releases 0.x."""
    return 1.0 if activation == ACT_ELU else slope
