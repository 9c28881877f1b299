"""The ``network`` section: which architecture, with which norm and activation, and how it is initialised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, PositiveFloat, PositiveInt

from zoo.config.section import Section

# What networks keep for backward: family -> the values of `memory` that it has.
_RESIDUAL = ("auto", "plain", "checkpoint", "unwind", "unwind_3x3", "checkpoint_norms", "checkpoint_xhat")
MEMORY = {
    "resnet": ("auto", "plain", "fused", "checkpoint"),
    "resnext": _RESIDUAL,
    "wider_resnet": _RESIDUAL,
    "densenet": ("auto", "plain", "checkpoint"),
    "preact": ("auto", "plain", "checkpoint"),
    "revnet": ("auto", "plain"),
    "revnext": ("auto", "plain"),
    "irevnet": ("auto", "plain"),
}
NEEDS_INPLACE = ("fused", "unwind", "unwind_3x3", "checkpoint_norms", "checkpoint_xhat")


def family_of(arch: str) -> str | None:
    """Return the key of `MEMORY` that an architecture's name belongs to; None for a name of no family."""
    if arch.startswith("resnet") and arch.endswith(("_cifar", "_preact")):
        return "preact"
    return next((family for family in MEMORY if arch.startswith(family)), None)


def _check_dilation(value: Any) -> Any:
    """Return ``value`` if it is a whole number >= 1, or a list of such, or of lists of such."""

    def is_rate(item: Any) -> bool:
        return type(item) is int and item >= 1

    def is_entry(item: Any) -> bool:
        return is_rate(item) or (isinstance(item, list) and bool(item) and all(map(is_rate, item)))

    if is_rate(value) or (isinstance(value, list) and value and all(map(is_entry, value))):
        return value
    raise ValueError("should be a whole number >= 1, or a list with one entry (or list) per module")


class Network(Section):
    """Architecture, norm layers and initial weights."""

    arch: Annotated[str, Field(min_length=1)] = "resnet101"
    activation: Literal["relu", "leaky_relu", "elu", "identity"] = "relu"
    activation_param: float = 0.01  # slope of leaky_relu, alpha of elu
    input_3x3: bool = False
    bn_mode: Literal["standard", "inplace", "sync"] = "standard"
    classes: PositiveInt = 1000
    dilation: Annotated[int | list[int | list[int]], PlainValidator(_check_dilation)] = 1
    memory: Literal[
        "auto", "plain", "fused", "checkpoint", "unwind", "unwind_3x3", "checkpoint_norms", "checkpoint_xhat"
    ] = "auto"
    weight_init: Literal[
        "xavier_normal",
        "xavier_uniform",
        "kaiming_normal",
        "kaiming_uniform",
        "orthogonal",
        "truncated_normal",
        "torch",
    ] = "xavier_normal"
    weight_gain_multiplier: PositiveFloat = 1.0  # used by the xavier and orthogonal initialisations
    options: dict[str, Any] = Field(default_factory=dict)  # further ones of the architecture, as `zoo.get` has them

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield the combinations that no network can be built from."""
        if self.activation == "relu" and self.bn_mode != "standard":
            yield (
                ("activation", "bn_mode"),
                f'cannot be undone from its output, which bn_mode "{self.bn_mode}" needs; '
                'use leaky_relu, elu or identity, or bn_mode "standard"',
            )
        if self.activation in ("leaky_relu", "elu") and self.activation_param <= 0:
            yield (
                ("activation_param", "activation"),
                f"should be greater than 0 for {self.activation}, which has no inverse otherwise",
            )
        if self.input_3x3 and self.arch.startswith(("resnet", "revnet")):
            yield (
                ("input_3x3", "arch"),
                f"{self.arch} has no 3x3 stem; remove the key, or use a resnext* or densenet*",
            )
        if self.dilation != 1 and self.arch.startswith("wider") and not self.arch.endswith("_a2"):
            yield (
                ("dilation", "arch"),
                f"{self.arch} cannot be dilated; remove the key, or use {self.arch}_a2",
            )
        for option in sorted({"norm", *Network.model_fields} & self.options.keys()):
            yield ("options",), f"{option!r} has a key of its own in this section; set that"
        allowed = MEMORY.get(family_of(self.arch) or "", (self.memory,))
        if self.memory not in allowed:
            yield ("memory", "arch"), f"{self.arch} has no such strategy; use one of {', '.join(allowed)}"
        elif self.memory in NEEDS_INPLACE and self.bn_mode == "standard":
            yield (
                ("memory", "bn_mode"),
                'needs norms that work in place; use bn_mode "inplace" or "sync", or remove the key',
            )
