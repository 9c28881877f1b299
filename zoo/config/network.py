"""The ``network`` section: which architecture, with which norm and activation, and how it is initialised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, model_validator

from zoo.config.options import MAX_DILATION, check_dilation, check_option
from zoo.config.section import MAX_CLASSES, MAX_RATE, MAX_SLOPE, Section
from zoo.errors import ConfigError

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
LEAKY_RELU_ONLY = ("revnext", "revnext_flat")  # whose layers are undone one by one
NEEDS_INPLACE = ("fused", "unwind", "unwind_3x3", "checkpoint_norms", "checkpoint_xhat")

_DilationRate = Annotated[int, Field(ge=1, le=MAX_DILATION)]
Dilation = _DilationRate | list[_DilationRate | list[_DilationRate]]


def family_of(arch: str) -> str | None:
    """Return the key of `MEMORY` that an architecture's name belongs to; None for a name of no family."""
    if arch.startswith("resnet") and arch.endswith(("_cifar", "_preact")):
        return "preact"
    return next((family for family in MEMORY if arch.startswith(family)), None)


class Network(Section):
    """The network and its initial weights."""

    arch: Annotated[str, Field(min_length=1)] = "resnet101"
    """Name of the architecture; zoo list shows them."""
    activation: Literal["relu", "leaky_relu", "elu", "identity"] = "relu"
    """Activation behind the norms. Left out it is relu with bn_mode standard, as in the original's files, and
    leaky_relu where relu is impossible: with bn_mode inplace or sync, and in revnext and revnext_flat."""
    activation_param: Annotated[float, Field(ge=-MAX_SLOPE, le=MAX_SLOPE)] = 0.01
    """Slope of leaky_relu, alpha of elu."""
    input_3x3: bool = False
    """Whether the stem is three 3x3 convolutions instead of one 7x7 (resnext*, densenet*)."""
    bn_mode: Literal["standard", "inplace", "sync"] = "standard"
    """Norm: standard batch norm, in place, or in place with the statistics of all processes."""
    classes: Annotated[int, Field(gt=0, le=MAX_CLASSES)] = 1000
    """Number of classes, which is the number of the network's outputs."""
    dilation: Annotated[Dilation, PlainValidator(check_dilation, Dilation)] = 1
    """Dilation of the modules, as zoo.get takes it; 1: none."""
    memory: Literal[
        "auto", "plain", "fused", "checkpoint", "unwind", "unwind_3x3", "checkpoint_norms", "checkpoint_xhat"
    ] = "auto"
    """What is kept for backward; zoo show NAME lists what a network has."""
    weight_init: Literal[
        "xavier_normal",
        "xavier_uniform",
        "kaiming_normal",
        "kaiming_uniform",
        "orthogonal",
        "truncated_normal",
        "torch",
    ] = "xavier_normal"
    """Initial weights of convolutions; truncated_normal is RevNet's, torch is PyTorch's own."""
    weight_gain_multiplier: Annotated[float, Field(gt=0, le=MAX_RATE)] = 1.0
    """Factor of the initial weights, used by the xavier and orthogonal initialisations."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further options of the architecture, as zoo.get takes them; zoo show NAME explains them."""

    @model_validator(mode="before")
    @classmethod
    def _complete_activation(cls, content: Any) -> Any:
        """Set the activation that is left out where the original's, relu, is impossible."""
        if not isinstance(content, dict) or "activation" in content:
            return content
        impossible = content.get("bn_mode") in ("inplace", "sync") or content.get("arch") in LEAKY_RELU_ONLY
        return {**content, "activation": "leaky_relu"} if impossible else content

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
        for option, value in self.options.items():
            try:
                check_option(option, value)
            except ConfigError as error:
                yield ("options",), str(error)
        allowed = MEMORY.get(family_of(self.arch) or "", (self.memory,))
        if self.memory not in allowed:
            yield ("memory", "arch"), f"{self.arch} has no such strategy; use one of {', '.join(allowed)}"
        elif self.memory in NEEDS_INPLACE and self.bn_mode == "standard":
            yield (
                ("memory", "bn_mode"),
                'needs norms that work in place; use bn_mode "inplace" or "sync", or remove the key',
            )
