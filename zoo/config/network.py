"""The ``network`` section: which architecture, with which norm and activation, and how it is initialised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, SerializerFunctionWrapHandler, model_serializer, model_validator

from zoo.architectures import ARCHITECTURES, LEAN, MEMORY_ELSEWHERE, NEEDS_INPLACE, check_option, is_elsewhere
from zoo.config.section import Section
from zoo.errors import ConfigError
from zoo.limits import MAX_CLASSES, MAX_DILATION, MAX_RATE, MAX_SLOPE, is_dilation

# The keys of a network of another package, which has its own norms, activations and initial weights.
_KEYS_ELSEWHERE = ("arch", "bn_mode", "classes", "memory", "options")
# Arguments of other packages' builders -> what says the same here.
_WEIGHTS_ELSEWHERE = 'say "pretrained": true, or begin with a file: zoo train --weights FILE'
_OPTIONS_ELSEWHERE = {
    **dict.fromkeys(("num_classes", "classes"), "set network.classes"),
    "memory": "set network.memory",
    "name": "set network.arch",
    **dict.fromkeys(("weights", "weights_backbone", "checkpoint_path"), _WEIGHTS_ELSEWHERE),
}

_DilationRate = Annotated[int, Field(ge=1, le=MAX_DILATION)]
Dilation = _DilationRate | list[_DilationRate | list[_DilationRate]]


def _check_dilation(value: Any) -> Any:
    """Return the dilation of an experiment file; ValueError for anything else."""
    if is_dilation(value):
        return value
    raise ValueError(
        f"should be a whole number from 1 to {MAX_DILATION}, or a list with one entry (or list) per module"
    )


class Network(Section):
    """The network and its initial weights."""

    arch: Annotated[str, Field(min_length=1)] = "resnet101"
    """Name of the architecture; zoo list shows them. timm:NAME and torchvision:NAME are networks of other packages."""
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
    dilation: Annotated[Dilation, PlainValidator(_check_dilation, Dilation)] = 1
    """Dilation of the modules, as zoo.get takes it; 1: none."""
    memory: Literal["auto", "plain", "fused", "checkpoint", "unwind", "unwind_3x3", "lean"] = "auto"
    """What is kept for backward; zoo show NAME lists what a network has. lean keeps recipes as zoo.lean does."""
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
    """Further options of the architecture, as zoo.get takes them; zoo show NAME explains them. Those of another
    package's network are what its builder takes, and pretrained."""

    @model_validator(mode="before")
    @classmethod
    def _complete_activation(cls, content: Any) -> Any:
        """Set the activation that is left out where the original's, relu, is impossible."""
        if not isinstance(content, dict) or "activation" in content:
            return content
        arch = content.get("arch")
        if isinstance(arch, str) and is_elsewhere(arch):
            return content
        record = ARCHITECTURES.get(arch) if isinstance(arch, str) else None
        impossible = content.get("bn_mode") in ("inplace", "sync") or (record is not None and record.leaky_relu_only)
        return {**content, "activation": "leaky_relu"} if impossible else content

    @model_serializer(mode="wrap")
    def _leave_out_what_has_no_meaning(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the settings without those that a network of another package does not have."""
        content: dict[str, Any] = handler(self)
        if is_elsewhere(self.arch):
            return {key: value for key, value in content.items() if key in _KEYS_ELSEWHERE}
        return content

    def without_pretrained(self) -> Network:
        """Return the section of the same network whose weights come from a file, so that no package loads its own."""
        if not is_elsewhere(self.arch):
            return self
        options = {key: value for key, value in self.options.items() if key != "pretrained"}
        return self.model_copy(update={"options": options})

    @property
    def has_3x3_stem(self) -> bool:
        """Whether the network gets the stem of three 3x3 convolutions: some ignore the key (`Architecture`)."""
        record = ARCHITECTURES.get(self.arch)
        return self.input_3x3 and not (record is not None and record.ignores_input_3x3)

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield the combinations that no network can be built from."""
        if is_elsewhere(self.arch):
            yield from self._conflicts_elsewhere()
            return
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
        record = ARCHITECTURES.get(self.arch)  # None for a network of the user's own
        options = Network.model_fields if record is None else record.options
        if self.has_3x3_stem and "input_3x3" not in options:
            yield (
                ("input_3x3", "arch"),
                f"{self.arch} has no 3x3 stem; remove the key, or use a resnext* or densenet*",
            )
        if self.dilation != 1 and "dilation" not in options:
            dilated = f"{self.arch}_a2" if f"{self.arch}_a2" in ARCHITECTURES else "a resnet*, resnext* or densenet*"
            yield ("dilation", "arch"), f"{self.arch} cannot be dilated; remove the key, or use {dilated}"
        for option in sorted({"norm", *Network.model_fields} & self.options.keys()):
            yield ("options",), f"{option!r} has a key of its own in this section; set that"
        for option, value in self.options.items():
            try:
                check_option(option, value)
            except ConfigError as error:
                yield ("options",), str(error)
        allowed = (self.memory,) if record is None else record.memory
        if self.memory not in allowed:
            yield ("memory", "arch"), f"{self.arch} has no such strategy; use one of {', '.join(allowed)}"
        elif self.memory in NEEDS_INPLACE and self.bn_mode == "standard":
            yield (
                ("memory", "bn_mode"),
                'needs norms that work in place; use bn_mode "inplace" or "sync", or remove the key',
            )

    def _conflicts_elsewhere(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield the settings that a network of another package does not have."""
        package = self.arch.partition(":")[0]
        for key in sorted(self.model_fields_set.difference(_KEYS_ELSEWHERE)):
            yield (
                (key, "arch"),
                f"is not for {self.arch}, which {package} builds with its own layers and initial weights; remove the "
                "key (network.options holds what its builder takes)",
            )
        if self.bn_mode != "standard":
            yield (
                ("bn_mode", "arch"),
                f'{self.arch} keeps its own norms; remove the key, and save memory with network.memory "{LEAN}"',
            )
        if self.memory not in MEMORY_ELSEWHERE:
            yield ("memory", "arch"), f"{self.arch} has no such strategy; use one of {', '.join(MEMORY_ELSEWHERE)}"
        for option in sorted(_OPTIONS_ELSEWHERE.keys() & self.options.keys()):
            yield ("options",), f"{option!r} is not an option here; {_OPTIONS_ELSEWHERE[option]}"
        if not isinstance(self.options.get("pretrained", False), bool):
            yield ("options",), f"pretrained must be true or false, got {self.options['pretrained']!r}"
