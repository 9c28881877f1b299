"""The one description of a network: `NetworkSpec`.

The ``network`` section of an experiment is a spec, checkpoints and weights files store one, `zoo.get` merges specs and
``zoo convert`` maps one to another. Nothing here imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
)
from pydantic.json_schema import SkipJsonSchema

from zoo.config.architectures import (
    ARCHITECTURES,
    EXTERNAL_MEMORY,
    LEAN,
    Architecture,
    architecture,
    has_own_layers,
    is_external,
)
from zoo.config.limits import MAX_CLASSES, MAX_RATE, MAX_SIDE, MAX_SLOPE, CropMode, Interpolation
from zoo.config.section import Conflicts, Problem, Section, parse_section
from zoo.errors import ConfigError, DataError, escape, join_names, shorten_repr
from zoo.tables import counted

PER_CHANNEL = Field(min_length=3, max_length=3)
# File systems allow 255 characters, and `escape` may turn each into ten.
MAX_NAME_CHARS = 2550

WITH_PARAMETER = ("leaky_relu", "elu")
# Facts that are stored with weights. In an experiment they come from the section ``input`` and the data.
STORED_ALONE = ("preprocessing", "class_names")
# The keys for a network with its own norms, activations and initial weights, as external ones are.
KEYS_OF_OWN_LAYERS = ("arch", "num_classes", "memory", "options", *STORED_ALONE)
# Arguments of other packages' builders -> what to use here.
_EXTERNAL_WEIGHTS = 'say "pretrained": true, or begin with a file: zoo train --weights FILE'
_EXTERNAL_OPTIONS = {
    **dict.fromkeys(("num_classes", "classes"), "set network.num_classes"),
    "memory": "set network.memory",
    "name": "set network.arch",
    **dict.fromkeys(("weights", "weights_backbone", "checkpoint_path"), _EXTERNAL_WEIGHTS),
}


def _check_scale(value: int) -> int:
    if value == 0:
        raise ValueError("should be at least 1, or -1 for no resizing")
    return value


def _check_name(name: str) -> str:
    if not name.isprintable():
        raise ValueError("should contain only characters that a terminal can show")
    return name


def _check_unique(names: list[str]) -> list[str]:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"should have each name once; found twice: {join_names(twice)}")
    return names


def _make_plain(value: Any) -> Any:
    """Return ``value`` with tuples as lists, as JSON has them."""
    if isinstance(value, dict):
        return {key: _make_plain(item) for key, item in value.items()}
    return [_make_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


Side = Annotated[int, Field(gt=0, le=MAX_SIDE)]
Scale = Annotated[int, Field(ge=-1, le=MAX_SIDE), AfterValidator(_check_scale)]
ClassName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS), AfterValidator(_check_name)]
ClassNames = Annotated[list[ClassName], Field(max_length=MAX_CLASSES), AfterValidator(_check_unique)]


class Preprocessing(Section):
    """How validation images are preprocessed."""

    scale_val: Scale = 256
    """Validation images are resized to this length of their shorter side; -1: not resized."""
    crop_val: Side = 224
    """Side of the center crop of validation images."""
    mean: Annotated[list[Annotated[float, Field(ge=0, le=1)]], PER_CHANNEL] = Field(default=[0.485, 0.456, 0.406])
    """Mean of red, green and blue (values from 0 to 1), which is subtracted."""
    std: Annotated[list[Annotated[float, Field(gt=0, le=1)]], PER_CHANNEL] = Field(default=[0.229, 0.224, 0.225])
    """Standard deviation of red, green and blue, by which values are divided."""

    interpolation_val: Interpolation = "bilinear"
    """Interpolation of validation images, antialiased."""
    crop_mode_val: CropMode = "center"
    """How validation images are resized before the crop, as in timm. center: the shorter side to scale_val; squash:
    both sides, which changes the aspect ratio."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield problems of crops that are larger than the resized image, and of images that are not resized."""
        if self.scale_val == -1 and self.crop_mode_val != "center":
            yield "crop_mode_val", "needs a scale_val to resize to"
        if self.scale_val != -1 and self.crop_val > self.scale_val:
            yield "crop_val", f"should be at most scale_val, which is {self.scale_val}"

    def preprocessing(self) -> Preprocessing:
        """Return the settings of this class, without the settings of subclasses."""
        return Preprocessing(**{key: getattr(self, key) for key in Preprocessing.model_fields})


# Why some networks do not have an option.
MISSING_BECAUSE = {
    "drop_path_rate": "; stochastic depth drops branches of residual blocks whose activations are saved, or of "
    "revvit*, revbifpn* and revcol*",
    "grid_bits": "; only sums, as of the reversible blocks of revnet*, irevnet*, revnext_revnet, revvit* and "
    "revbifpn*, stay on a grid, but invertible layers and columns divide",
}


def _unknown_options(name: str, options: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the options that a network of this package does not have, each with a message."""
    arch = ARCHITECTURES.get(name)
    for option in options:
        if option in NetworkSpec.model_fields:
            yield option, "is a key of this section, not an option; set that key"
        elif arch is not None and option not in arch.options.model_fields:
            known = join_names(arch.options.model_fields) or "none"
            yield option, f"{name} has no such option{MISSING_BECAUSE.get(option, '')}; its options are {known}"


def _wrong_lengths(arch: Architecture, dilation: Any) -> Iterator[Problem]:
    """Yield the entries of ``dilation`` that are lists whose length is not the number of blocks of their module."""
    for index, entry in enumerate(dilation if isinstance(dilation, list) else []):
        if isinstance(entry, list) and len(entry) != (blocks := arch.structure["structure"][index]):
            message = f"should have {blocks} numbers, one per block of mod{index + 2} of {arch.name}, got {len(entry)}"
            yield Problem(("dilation", index), entry, message)


def _default_num_classes(settings: Mapping[str, Any]) -> int:
    arch = ARCHITECTURES.get(settings.get("arch", ""))
    return 1000 if arch is None else arch.num_classes


class NetworkSpec(Section):
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
    num_classes: Annotated[int, Field(ge=0, le=MAX_CLASSES)] = Field(
        default_factory=_default_num_classes, validation_alias=AliasChoices("num_classes", "classes")
    )
    """Number of classes, the outputs of the network; default 1000, 10 for CIFAR networks, 19 for deeplab_* and
    pyramid_*. Alias: classes."""
    memory: Literal["auto", "plain", "checkpoint", "lean"] = "auto"
    """What is saved for backward; zoo show NAME lists the strategies of a network. lean applies zoo.lean."""
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
    options: Annotated[dict[str, Any], AfterValidator(_make_plain)] = Field(default_factory=dict)
    """Further options of the architecture, as zoo.get takes them; zoo show NAME explains them. For a network of
    another package: arguments of its builder, and pretrained."""
    preprocessing: SkipJsonSchema[Preprocessing | None] = None
    """How images were preprocessed for the network; None if unknown."""
    class_names: SkipJsonSchema[ClassNames | None] = None
    """Names of the outputs, in order, escaped by `escape`; None if unknown. May be fewer than the outputs."""

    @field_validator("options")
    @classmethod
    def _check_options(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Return the options that are given; for an architecture as its section of options has them."""
        name = info.data.get("arch", "")
        if is_external(name):
            return options
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

    @model_serializer(mode="wrap")
    def _serialize_known(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit unknown stored facts, and settings that do not apply to a network with its own layers."""
        content: dict[str, Any] = handler(self)
        meaningless = {key for key in STORED_ALONE if not getattr(self, key) and getattr(self, key) != []}
        if self.has_own_layers:
            meaningless |= content.keys() - set(KEYS_OF_OWN_LAYERS)
        return {key: value for key, value in content.items() if key not in meaningless}

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield invalid combinations of settings."""
        if self.class_names is not None and len(self.class_names) > self.num_classes:
            yield (
                "class_names",
                f"has {counted(len(self.class_names), 'name')} for {counted(self.num_classes, 'class')}",
            )
        yield from self._external_conflicts() if is_external(self.arch) else self._own_conflicts()

    def _own_conflicts(self) -> Iterator[tuple[str, str]]:
        if self.activation == "relu" and self.norm != "standard":
            yield (
                "activation",
                f'has no inverse, which norm "{self.norm}" needs; use leaky_relu (zoo convert relu-to-leaky-relu '
                'converts weights), elu or identity, or norm "standard"',
            )
        if self.activation in WITH_PARAMETER and self.activation_param <= 0:
            yield "activation_param", f"should be greater than 0 for {self.activation}, which has no inverse otherwise"
        if self.has_own_layers:
            for key in sorted(self.model_fields_set.difference(KEYS_OF_OWN_LAYERS)):
                yield key, f"is not for {self.arch}, which has its own norms, activation and initial weights; remove it"
        arch = ARCHITECTURES.get(self.arch)  # None for a custom network
        if arch is not None and self.memory not in arch.memory:
            yield "memory", f"{self.arch} has no such strategy; use one of {', '.join(arch.memory)}"

    def _external_conflicts(self) -> Iterator[tuple[str, str]]:
        package = self.arch.partition(":")[0]
        for key in sorted(self.model_fields_set.difference(KEYS_OF_OWN_LAYERS)):
            yield (
                key,
                f"is not for {self.arch}, which {package} builds with its own layers and initial weights; remove the "
                f'key (network.options holds what its builder takes, and network.memory "{LEAN}" saves memory)',
            )
        if self.memory not in EXTERNAL_MEMORY:
            yield "memory", f"{self.arch} has no such strategy; use one of {', '.join(EXTERNAL_MEMORY)}"
        for option in sorted(_EXTERNAL_OPTIONS.keys() & self.options.keys()):
            yield "options", f"{option!r} is not an option here; {_EXTERNAL_OPTIONS[option]}"
        if not isinstance(self.options.get("pretrained", False), bool):
            yield "options", f"pretrained must be true or false, got {self.options['pretrained']!r}"

    @property
    def is_external(self) -> bool:
        """Whether the network comes from another package."""
        return is_external(self.arch)

    @property
    def has_own_layers(self) -> bool:
        """Whether norms, activation and initial weights are fixed, as in external networks."""
        return has_own_layers(self.arch)

    def changed(self, **changes: Any) -> NetworkSpec:
        """Return the validated spec with ``changes`` applied; options are passed by their own names."""
        return parse_spec(merge(self.given(), changes), f"the network {self.arch}")

    def given(self) -> dict[str, Any]:
        """Return the settings that were set explicitly."""
        return self.model_dump(exclude_unset=True)

    def described(self, images: Preprocessing, class_names: Iterable[str] | None = None) -> NetworkSpec:
        """Return the spec to store in weights files: with preprocessing and class names, without ``pretrained``.

        Raises DataError as `escape_names` does.
        """
        names = None if class_names is None else escape_names(class_names)
        return self.without_pretrained().model_copy(
            update={"preprocessing": images.preprocessing(), "class_names": names}
        )

    def for_experiment(self) -> NetworkSpec:
        """Return the spec for the ``network`` section of an experiment, without the facts stored only in files."""
        return self.model_copy(update={"preprocessing": None, "class_names": None})

    def without_pretrained(self) -> NetworkSpec:
        """Return the spec without ``pretrained``, so that an external package does not load its own weights."""
        options = {key: value for key, value in self.options.items() if key != "pretrained"}
        return self.model_copy(update={"options": options}) if self.is_external else self


def merge(*contents: Mapping[str, Any]) -> dict[str, Any]:
    """Merge several descriptions. Later ones win, and options are merged individually.

    Keys that are not fields of `NetworkSpec` are options. Another number of classes removes earlier class names.
    """
    merged: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for content in contents:
        fields = {key: value for key, value in content.items() if key in NetworkSpec.model_fields}
        if fields.get("num_classes") not in (None, merged.get("num_classes")):
            merged.pop("class_names", None)
        options |= {key: value for key, value in content.items() if key not in fields} | fields.pop("options", {})
        merged |= fields
    return {**merged, "options": options}


def parse_spec(content: Mapping[str, Any], source: str) -> NetworkSpec:
    """Return the spec of ``content``, which messages call ``source``.

    Raises ConfigError for invalid settings and unknown architectures.
    """
    arch = content.get("arch")
    if isinstance(arch, str) and not is_external(arch):
        architecture(arch)
    return parse_section(NetworkSpec, content, source)


def choose_dilation(arch: Architecture, output_stride: int | None, dilation: Any) -> Any:
    """Return the option ``dilation`` of a network whose last map has this stride; ``dilation`` if the stride is None.

    Raises ConfigError if both are given, and for a stride that the architecture does not support.
    """
    if output_stride is None:
        return dilation
    if dilation is not None:
        raise ConfigError(f"{arch.name}: output_stride and dilation set the same thing; pass one of them")
    if not arch.dilations:
        raise ConfigError(
            f"{arch.name}: output_stride: the network cannot be dilated, so that its stride is fixed; resnet18 to "
            "resnet152, resnext*, densenet* and wider_resnet*_a2 can"
        )
    if output_stride not in list(arch.dilations):  # the value may be unhashable
        strides = join_names(sorted(arch.dilations))
        raise ConfigError(f"{arch.name}: output_stride = {shorten_repr(output_stride)}: should be one of {strides}")
    return arch.dilations[output_stride]


def escape_names(names: Iterable[str]) -> list[str]:
    """Return the names of class folders escaped by `escape`, as specs and messages use them.

    Raises DataError if two names become equal.
    """
    escaped = [escape(name) for name in names]
    if twice := [name for name, count in Counter(escaped).items() if count > 1]:
        raise DataError(f"names of class folders look the same when printed: {join_names(twice)}; rename one of each")
    return escaped


def read_original_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``network`` section with the original project's keys ``input_3x3`` and ``dilation`` as options.

    `NetworkSpec` itself accepts the original project's keys ``bn_mode``, ``classes`` and ``leaky_relu_slope``. The
    content is not validated.
    """
    content, options, name = dict(content), content.get("options", {}), content.get("arch", "resnet101")
    if not isinstance(name, str) or not isinstance(options, dict) or is_external(name):
        return content
    arch = ARCHITECTURES.get(name)
    for key, default in (("input_3x3", False), ("dilation", 1)):
        value = content.pop(key, default)
        if value is True and key == "input_3x3" and arch is not None and arch.ignores_input_3x3:
            continue  # files of the original project request a stem that its WiderResNets and ResNets do not have
        if type(value) is not type(default) or value != default:
            options = {**options, key: value}
    return {**content, "options": options}
