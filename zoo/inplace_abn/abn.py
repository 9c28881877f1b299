"""Norm modules with the constructors of all releases of the original. Modules pickled by the original load as these."""

from __future__ import annotations

from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from zoo import layers
from zoo.inplace_abn.functions import (
    ACT_ELU,
    ACT_LEAKY_RELU,
    activation_arguments,
    normalize_and_activate,
    rename_activation,
)


class ABN(layers.ABN):
    """`zoo.layers.ABN` with the arguments of all releases of inplace_abn.

    Args:
    - `num_features`: as in `zoo.layers.ABN`.
    - `args`: `eps`, `momentum`, `affine`, `track_running_stats`, `activation`, `activation_param`, as in release 1.1.
      In earlier releases, `activation` follows `affine`. In release 0.0.1, it is a module and the only one of them.
    - `settings`: the same arguments by name, and `device` and `dtype`. Releases 0.x call `activation_param` `slope`;
      there, alpha of ELU is always 1.

    The activation may be a module LeakyReLU, ELU, ReLU or Identity of torch.nn, whose slope or alpha is then
    `activation_param`. "none" and None are "identity", and leaky_relu with slope 0 is ReLU.
    """

    positional: tuple[str, ...] = (
        "eps", "momentum", "affine", "track_running_stats", "activation", "activation_param",
    )  # fmt: skip

    def __init__(self, num_features: int, *args: Any, **settings: Any) -> None:
        names = self.positional
        if args and isinstance(args[0], nn.Module):
            names = ("activation",)
        elif len(args) > 3 and (args[3] is None or isinstance(args[3], (str, nn.Module))):
            names = tuple(name for name in names if name != "track_running_stats")
        if len(args) > len(names):
            raise TypeError(f"{type(self).__name__} takes {1 + len(names)} positional arguments, got {1 + len(args)}")
        given = dict(zip(names, args, strict=False))
        if twice := given.keys() & settings.keys():
            raise TypeError(f"{type(self).__name__} got multiple values for {', '.join(sorted(twice))}")
        super().__init__(num_features, **self._current({**given, **settings}))

    def _current(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Convert the arguments of any release to those of `zoo.layers`. Raises TypeError for a wrong type."""
        kind = type(self).__name__
        for name in ("eps", "momentum"):
            value = settings.get(name, 0.0)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not is_number and (name != "momentum" or value is not None):
                raise TypeError(f"{kind} got {name}={value!r}, which is not a number")
        parameters = [name for name in ("slope", "activation_param") if name in settings]
        if len(parameters) == 2:
            raise TypeError(f"{kind} got slope and activation_param, which are the same")
        activation = settings.get("activation", ACT_LEAKY_RELU)
        if isinstance(activation, nn.Module) and parameters:
            raise TypeError(f"{kind} got activation={activation!r} and {parameters[0]}: leave {parameters[0]} out")
        if "slope" in settings:
            settings["activation_param"] = _activation_param(activation, settings.pop("slope"))
        return {**settings, **activation_arguments(activation)}

    @property
    def slope(self) -> float:
        """The name of `activation_param` in releases 0.x."""
        return self.activation_param

    @slope.setter
    def slope(self, value: float) -> None:
        self.activation_param = _activation_param(self.activation, value)

    def checked_activation(self) -> tuple[str, float]:
        """Return the name in `zoo.layers` and the parameter of the activation. Raises ValueError if it is unknown."""
        return rename_activation(self.activation, self.activation_param) or super().checked_activation()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the attributes of a module pickled by any release; add the attributes of later releases."""
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
    original treats every output of such a layer as positive in backward, which makes gradients wrong.
    """

    def compute(self, x: Tensor, shortcut: Tensor | None = None, activation: tuple[str, float] | None = None) -> Tensor:
        """Implement `forward`, which torch.fx does not trace into."""
        norm = partial(super().compute, x, shortcut)
        return normalize_and_activate(norm, activation or (self.activation, self.activation_param))


class InPlaceABNSync(InPlaceABN, layers.InPlaceABNSync):
    """`zoo.layers.InPlaceABNSync` with the arguments of all releases of inplace_abn, see `ABN`; `group` is the last.

    `devices`, the second argument of releases 0.x, is a list or None. It is ignored, since a process has one device.
    Alpha of ELU is then 1, as in these releases.
    """

    positional = (*ABN.positional, "group")

    def __init__(self, num_features: int, *args: Any, **settings: Any) -> None:
        has_devices = "devices" in settings
        settings.pop("devices", None)
        if args and (args[0] is None or isinstance(args[0], (list, tuple, range))):
            has_devices, args = True, args[1:]
        super().__init__(num_features, *args, **settings)
        if has_devices:
            self.slope = self.activation_param

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the attributes of a pickled module, except its group, which is meaningless in another process."""
        super().__setstate__({**state, "group": None})


def _activation_param(activation: str | None, slope: float) -> float:
    """Return `activation_param` for the `slope` of releases 0.x."""
    return 1.0 if activation == ACT_ELU else slope
