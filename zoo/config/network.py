"""The description of a network: `NetworkSpec` for networks of this package, `ExternalSpec` for other packages'.

The ``network`` section of an experiment is a spec, weights files store one in a `zoo.config.record.NetworkRecord`,
`zoo.get` merges the settings of several, and ``zoo convert`` maps one to another. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from zoo.config.architectures import (
    ARCHITECTURES,
    EXTERNAL_MEMORY,
    LEAN,
    NETWORK_PACKAGES,
    Architecture,
    architecture,
    which_have,
)
from zoo.config.limits import MAX_CLASSES, MAX_RATE, MAX_SLOPE
from zoo.config.section import (
    UNKNOWN_KEY,
    Conflicts,
    KeyPath,
    Problem,
    Section,
    parse_section,
    problems_of,
)
from zoo.errors import ConfigError, ZooError, join_names

WITH_PARAMETER = ("leaky_relu", "elu")
# Keys of the description in a weights file besides the settings of the network, see `zoo.config.record`.
STORED_ALONE = ("preprocessing", "class_names")
# Argument of other packages' builders -> its replacement here.
_EXTERNAL_WEIGHTS = 'say "pretrained": true, or begin with a file: zoo train --weights FILE'
_EXTERNAL_OPTIONS = {
    **dict.fromkeys(("num_classes", "classes"), "set network.num_classes"),
    "memory": "set network.memory",
    "name": "set network.arch",
    **dict.fromkeys(("weights", "weights_backbone", "checkpoint_path"), _EXTERNAL_WEIGHTS),
}


def _make_plain(value: Any) -> Any:
    """Convert tuples in ``value`` to lists, as in JSON."""
    if isinstance(value, dict):
        return {key: _make_plain(item) for key, item in value.items()}
    return [_make_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _unknown_options(name: str, options: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the unknown options of a network of this package, each with a message."""
    arch = ARCHITECTURES.get(name)
    for option in options:
        if option in NetworkSpec.model_fields:
            yield option, "is a key of this section, not an option; set that key"
        elif arch is not None and option not in arch.options.model_fields:
            known = join_names(arch.options.model_fields) or "none"
            yield option, f"{name} has no such option; its options are {known}{which_have(option)}"


def _wrong_lengths(arch: Architecture, dilation: Any) -> Iterator[Problem]:
    """Yield the lists in ``dilation`` whose length differs from the number of blocks of their module."""
    for index, entry in enumerate(dilation if isinstance(dilation, list) else []):
        if isinstance(entry, list) and len(entry) != (blocks := arch.structure["structure"][index]):
            message = f"should have {blocks} numbers, one per block of mod{index + 2} of {arch.name}, got {len(entry)}"
            yield Problem(("dilation", index), entry, message)


def _default_num_classes(settings: Mapping[str, Any]) -> int:
    arch = ARCHITECTURES.get(settings.get("arch", ""))
    return 1000 if arch is None else arch.num_classes


AnySpec = TypeVar("AnySpec", bound="Spec")


class Spec(Section):
    """A network by its name, with the settings that every network has.

    This class is for networks whose norms, activation and initial weights are fixed. `NetworkSpec` has settings for
    them, and `ExternalSpec` is a network of another package. `spec_class` returns the class for an architecture.
    """

    arch: Annotated[str, Field(min_length=1)]
    """Name of the architecture; zoo list shows them. timm:NAME and torchvision:NAME are networks of other packages."""
    num_classes: Annotated[int, Field(ge=0, le=MAX_CLASSES)] = Field(
        default_factory=_default_num_classes, validation_alias=AliasChoices("num_classes", "classes")
    )
    """Number of classes, the outputs of the network; default 1000, 10 for CIFAR networks, 19 for deeplab_* and
    pyramid_*. Alias: classes."""
    memory: Literal["auto", "plain", "checkpoint", "lean"] = "auto"
    """What is saved for backward; zoo show NAME lists the strategies of a network. lean applies zoo.lean."""
    options: Annotated[dict[str, Any], AfterValidator(_make_plain)] = Field(default_factory=dict)
    """Further options of the architecture, as zoo.get takes them; zoo show NAME explains them. For a network of
    another package: arguments of its builder, and pretrained."""

    @model_validator(mode="wrap")
    @classmethod
    def _explain_unknown_keys(cls, content: Any, handler: ModelWrapValidatorHandler[Spec]) -> Spec:
        """Validate the spec. If it fails, explain why keys of other networks and of weights files are refused."""
        try:
            return handler(content)
        except ValidationError as error:
            if not isinstance(content, Mapping):
                raise
            problems = list(problems_of(error))
        refusals = {
            **dict.fromkeys(STORED_ALONE, "is stored with weights and is not a setting of experiments; remove the key"),
            **dict.fromkeys(LAYER_KEYS, cls.refuse_layers(str(content.get("arch")))),
        }
        raise Conflicts(
            [
                replace(each, message=refusals.get(str(each.path[0]), each.message))
                if each.message == UNKNOWN_KEY
                else each
                for each in problems
            ]
        )

    @field_validator("memory")
    @classmethod
    def _check_memory(cls, memory: str, info: ValidationInfo) -> str:
        name = info.data.get("arch", "")
        strategies = cls._strategies(name)
        if strategies and memory not in strategies:
            raise ValueError(f"{name} has no such strategy; use one of {', '.join(strategies)}")
        return memory

    @classmethod
    def _strategies(cls, name: str) -> tuple[str, ...]:
        return ARCHITECTURES[name].memory if name in ARCHITECTURES else ()  # unknown for a custom network

    @classmethod
    def refuse_layers(cls, name: str) -> str:
        """Return the message for a setting of layers of the network ``name``."""
        return f"is not for {name}, which has its own norms, activation and initial weights; remove it"

    @field_validator("options")
    @classmethod
    def _check_options(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Validate the options against the architecture's section; return those that were set."""
        name = info.data.get("arch", "")
        problems = [Problem((key,), options[key], message) for key, message in _unknown_options(name, options)]
        if problems:
            raise Conflicts(problems)
        arch = ARCHITECTURES.get(name)  # None for a custom network
        if arch is None:
            return options
        options = arch.options.model_validate(options).model_dump(exclude_unset=True)
        if problems := list(_wrong_lengths(arch, options.get("dilation"))):
            raise Conflicts(problems)
        return options

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield a problem if networks of this name need another class of specs."""
        if type(self) is not (section := spec_class(self.arch)):
            yield "arch", f"is described by {section.__name__}, not by {type(self).__name__}"

    def changed(self: AnySpec, **changes: Any) -> AnySpec:
        """Return the validated spec with ``changes`` applied; options are passed by their own names."""
        return parse_section(type(self), merge(self.given(), changes), f"the network {self.arch}")

    def given(self) -> dict[str, Any]:
        """Return the settings that were set explicitly."""
        return self.model_dump(exclude_unset=True)

    def without_pretrained(self: AnySpec) -> AnySpec:
        """Return the spec of the same network without weights of its package."""
        return self


class NetworkSpec(Spec):
    """The network and its initial weights."""

    arch: Annotated[str, Field(min_length=1)] = "resnet101"
    """Name of the architecture; zoo list shows them. timm:NAME and torchvision:NAME are networks of other packages."""
    norm: Literal["standard", "inplace", "sync"] = Field(
        default="standard", validation_alias=AliasChoices("norm", "bn_mode")
    )
    """Norm: standard batch norm, in-place, or in-place and synchronized over all processes. Alias: bn_mode."""
    activation: Literal["relu", "leaky_relu", "elu", "identity"] = "leaky_relu"
    """Activation after the norms."""
    activation_param: Annotated[float, Field(ge=-MAX_SLOPE, le=MAX_SLOPE)] = Field(
        default=0.01, validation_alias=AliasChoices("activation_param", "leaky_relu_slope")
    )
    """Slope of leaky_relu, alpha of elu. Alias: leaky_relu_slope."""
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
    """Factor of the initial weights, used by the xavier and orthogonal initializations."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield invalid combinations of settings."""
        yield from super().conflicts()
        if self.activation == "relu" and self.norm != "standard":
            yield (
                "activation",
                f'has no inverse, which norm "{self.norm}" needs; use leaky_relu (zoo convert relu-to-leaky-relu '
                'converts weights), elu or identity, or norm "standard"',
            )
        if self.activation in WITH_PARAMETER and self.activation_param <= 0:
            yield "activation_param", f"should be greater than 0 for {self.activation}, which has no inverse otherwise"


class ExternalSpec(Spec):
    """A network of another package, which builds and initializes it."""

    @property
    def package(self) -> str:
        """The package, such as "timm"."""
        return self.arch.partition(":")[0]

    @property
    def name(self) -> str:
        """The name of the network in its package."""
        return self.arch.partition(":")[2]

    @classmethod
    def _strategies(cls, name: str) -> tuple[str, ...]:
        return EXTERNAL_MEMORY

    @classmethod
    def refuse_layers(cls, name: str) -> str:
        """Return the message for a setting of layers of the network ``name``."""
        return (
            f"is not for {name}, which {name.partition(':')[0]} builds with its own layers and initial weights; remove "
            f'the key (network.options holds what its builder takes, and network.memory "{LEAN}" saves memory)'
        )

    @field_validator("options")
    @classmethod
    def _check_options(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Return the options unchanged, because the package checks them."""
        return options

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield options that are settings of a spec, or that would load the package's weights."""
        yield from super().conflicts()
        for option in sorted(_EXTERNAL_OPTIONS.keys() & self.options.keys()):
            yield "options", f"{option!r} is not an option here; {_EXTERNAL_OPTIONS[option]}"
        if not isinstance(self.options.get("pretrained", False), bool):
            yield "options", f"pretrained must be true or false, got {self.options['pretrained']!r}"

    def builder_arguments(self) -> dict[str, Any]:
        """Return the arguments of `zoo.models.external.build_external`.

        If the number of classes is not set, it is left to the package.
        """
        num_classes = {"num_classes": self.num_classes} if "num_classes" in self.model_fields_set else {}
        return {**self.options, **num_classes, "memory": self.memory}

    def without_pretrained(self) -> ExternalSpec:
        """Return the spec without ``pretrained``, so that the package does not load its own weights."""
        options = {key: value for key, value in self.options.items() if key != "pretrained"}
        return self.model_copy(update={"options": options})


# Keys for layers and initial weights. Only some networks have them.
LAYER_KEYS = NetworkSpec.model_fields.keys() - Spec.model_fields.keys() | {"bn_mode", "leaky_relu_slope"}


def spec_class(arch: Any) -> type[Spec]:
    """Return the spec class of an architecture; `NetworkSpec` for users' own networks."""
    if not isinstance(arch, str):
        return NetworkSpec
    package, colon, _ = arch.partition(":")
    if colon and package in NETWORK_PACKAGES:
        return ExternalSpec
    return Spec if arch in ARCHITECTURES and ARCHITECTURES[arch].fixed_layers else NetworkSpec


def validate_spec(content: Any) -> Spec:
    """Build the spec of a JSON object, with its architecture's class; return a spec unchanged. May raise ValueError."""
    if isinstance(content, Spec):
        return content
    if not isinstance(content, Mapping):
        raise ValueError("should be a JSON object")
    return spec_class(content.get("arch")).model_validate(dict(content))


def parse_spec(
    content: Mapping[str, Any], source: str, path: KeyPath = (), error: type[ZooError] = ConfigError
) -> Spec:
    """Parse ``content`` into a spec. ``source`` and ``path`` name it in messages.

    Raises ``error`` for invalid settings, and ConfigError for unknown architectures.
    """
    arch = content.get("arch")
    section = spec_class(arch)
    if isinstance(arch, str) and section is not ExternalSpec:
        architecture(arch)
    return parse_section(section, content, source, path, error)


def merge(*contents: Mapping[str, Any]) -> dict[str, Any]:
    """Merge several descriptions. Later ones win, and options are merged individually.

    Keys that are not fields of `NetworkSpec` are options.
    """
    merged: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for content in contents:
        fields = {key: value for key, value in content.items() if key in NetworkSpec.model_fields}
        options |= {key: value for key, value in content.items() if key not in fields} | fields.pop("options", {})
        merged |= fields
    return {**merged, "options": options}


def read_original_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """Move the original project's keys ``input_3x3`` and ``dilation`` of a ``network`` section to its options.

    `NetworkSpec` itself accepts the original project's keys ``bn_mode``, ``classes`` and ``leaky_relu_slope``. Does not
    validate the content.
    """
    content, options, name = dict(content), content.get("options", {}), content.get("arch", "resnet101")
    if not isinstance(name, str) or not isinstance(options, dict) or spec_class(name) is ExternalSpec:
        return content
    arch = ARCHITECTURES.get(name)
    for key, default in (("input_3x3", False), ("dilation", 1)):
        value = content.pop(key, default)
        if value is True and key == "input_3x3" and arch is not None and arch.ignores_input_3x3:
            continue  # the original project's files set a stem that its WiderResNets and ResNets lack
        if type(value) is not type(default) or value != default:
            options = {**options, key: value}
    return {**content, "options": options}
