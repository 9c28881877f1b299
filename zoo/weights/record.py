"""What a weights file says about the network that it belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeGuard

import torch
from torch import nn

from zoo.architectures import ARCHITECTURES, has_same_tensors, is_elsewhere
from zoo.config import Experiment, Input, Network, parse_experiment
from zoo.errors import MAX_LISTED, ConfigError, DataError, WeightsError, listed, nearest, printable
from zoo.layers.norm import NORM_CLASSES, norm_act
from zoo.limits import MAX_CLASSES, MAX_SIDE, MAX_SLOPE, is_number, is_whole
from zoo.models import build_network
from zoo.models.elsewhere import build_from_elsewhere
from zoo.weights.published import published

ACTIVATIONS = ("leaky_relu", "relu", "elu", "identity")
WITH_PARAMETER = ("leaky_relu", "elu")
COMMON_SETTINGS = ("arch", "norm", "activation", "activation_param", "classes")  # of every network
# These options change no weights.
FREE_OPTIONS = ("memory", "dilation", "output_stride", "pooling_size", "keep_outputs", "dropout")
# Files come from anywhere; these limits are far more than any network needs, and far less than would fill a machine.
MAX_NAME_LENGTH, MAX_NUMBER, MAX_ENTRIES = 255, 65_536, 64
MAX_SHOWN, MAX_SHOWN_LIST = 100, 500  # characters
ASKED_BY_NETWORK = "the network that it is loaded into"
REMEDY = "take the weights alone with zoo.weights.read_state_dict(FILE), or ask who made the file"


@dataclass(frozen=True)
class Preprocessing:
    """How images are prepared: shorter side (-1: not resized) and centre crop in px, mean and std of [0, 1] values."""

    scale: int
    crop: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


@dataclass(frozen=True)
class NetworkRecord:
    """What a reader has to know to build a network for given weights; in files a plain dict under "network".

    Args:
    - `arch`: name of the architecture, or "PACKAGE:NAME" of a network of another package.
    - `norm`: "standard", "inplace" or "sync", which says how scales are read.
    - `activation`: "leaky_relu", "relu", "elu" or "identity".
    - `activation_param`: slope of leaky_relu or alpha of elu. It, ``activation`` and ``norm`` are None for a network of
      another package.
    - `classes`: outputs of the classifier, 0 without one.
    - `options`: options of the architecture that are not at their defaults (``input_3x3``, ``dilation``, ...), or
      ``memory`` and the arguments of the other package's builder.
    - `class_names`: names of the first outputs in their order, escaped by `printable`; None where they are not known.
    - `preprocessing`: preparation of the images that the network was validated with; None if unknown.
    - `folded`: whether the norms are part of the convolutions, see `zoo.convert.fold_network`.
    """

    arch: str
    norm: str | None
    activation: str | None
    activation_param: float | None
    classes: int
    options: Mapping[str, Any]
    class_names: tuple[str, ...] | None = None
    preprocessing: Preprocessing | None = None
    folded: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain values, which JSON and ``torch.load(weights_only=True)`` can read."""
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        preprocessing = None if self.preprocessing is None else _plain(asdict(self.preprocessing))
        return {**_plain(content), "preprocessing": preprocessing}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], source: str) -> NetworkRecord:
        """Return the record that ``content`` holds; WeightsError that names ``source`` and the key unless it is right.

        Unknown and missing keys, other types and sizes beyond all reason are refused.
        """
        known = [field.name for field in fields(cls)]
        if set(known) != set(content):
            missing = [key for key in known if key not in content]
            unknown = [key for key in content if key not in known]
            parts = [f"lacks {', '.join(missing)}"] if missing else []
            parts += [f"has the unknown keys {shown(unknown)}"] if unknown else []
            raise WeightsError(f"{source}: network: {' and '.join(parts)}; {REMEDY}")
        for key, value, problem in _problems(content):
            raise WeightsError(f"{source}: network.{key} = {shown(value)}: {problem}; {REMEDY}")
        names, images = content["class_names"], content["preprocessing"]
        if images is not None:
            images = Preprocessing(images["scale"], images["crop"], tuple(images["mean"]), tuple(images["std"]))
        return cls(**{**content, "class_names": None if names is None else tuple(names), "preprocessing": images})

    @classmethod
    def of_config(
        cls, network: Network, images: Input | None = None, class_names: Iterable[str] | None = None
    ) -> NetworkRecord:
        """Return the record of an experiment's ``network`` and ``input`` sections and of the class folders' names.

        Raises DataError as `escaped_names` does.
        """
        of_other_package = is_elsewhere(network.arch)
        options: dict[str, Any] = {}
        if network.has_3x3_stem:
            options["input_3x3"] = True
        if network.dilation != 1:
            options["dilation"] = network.dilation
        if network.memory != "auto":
            options["memory"] = network.memory
        return cls(
            arch=network.arch,
            norm=None if of_other_package else network.bn_mode,
            activation=None if of_other_package else network.activation,
            activation_param=None if of_other_package else float(network.activation_param),
            classes=network.classes,
            options={**options, **network.without_pretrained().options},
            class_names=None if class_names is None else escaped_names(class_names),
            preprocessing=None if images is None else preprocessing_of(images),
        )

    @classmethod
    def of_published(cls, name: str) -> NetworkRecord:
        """Return what is published of the weights ``name``."""
        experiment = published()[name].experiment
        return cls.of_config(experiment.network, experiment.input)

    def settings(self) -> dict[str, Any]:
        """Return the arguments that `zoo.get` builds the network with."""
        return {**{key: getattr(self, key) for key in COMMON_SETTINGS}, **self.options}

    def experiment_settings(self) -> dict[str, Any]:
        """Return the record as the ``network`` and ``input`` sections of an experiment."""
        settings = self.settings()
        settings["bn_mode"] = settings.pop("norm")
        if is_elsewhere(self.arch):
            for key in ("bn_mode", "activation", "activation_param"):
                del settings[key]
        network_settings = {key: settings.pop(key) for key in list(settings) if key in Network.model_fields}
        content: dict[str, Any] = {"network": _plain({**network_settings, "options": settings})}
        if self.preprocessing is not None:
            images = self.preprocessing
            content["input"] = _plain(
                {"scale_val": images.scale, "crop_val": images.crop, "mean": images.mean, "std": images.std}
            )
        return content

    def build(self) -> nn.Module:
        """Return the network: without values (`build_network`), or initialized by its package if that is another one.

        Raises ConfigError for what no network can be built from.
        """
        if self.norm is None or self.activation is None or self.activation_param is None:
            return build_from_elsewhere(self.arch, classes=self.classes, **self.options)
        norm = norm_act(self.norm, self.activation, self.activation_param)
        return build_network(self.arch, norm, classes=self.classes, **self.options)

    def build_on_meta(self) -> nn.Module:
        """Return the network on the meta device.

        Nothing of its size is allocated, unless another package cannot build it there. Raises ConfigError as `build`.
        """
        try:
            with torch.device("meta"):
                return self.build()
        except ConfigError:
            if not is_elsewhere(self.arch):
                raise
            return self.build().to("meta")  # some builders compute with values

    def without_memory(self) -> NetworkRecord:
        """Return the record without the option ``memory``, which changes no weights but does not fit every norm."""
        return replace(self, options={key: value for key, value in self.options.items() if key != "memory"})


def escaped_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of class folders as records and messages have them, made `printable`.

    Raises DataError if two names become the same.
    """
    escaped = tuple(map(printable, names))
    if twice := [name for name, count in Counter(escaped).items() if count > 1]:
        raise DataError(f"class folders whose names look the same: {listed(twice)}; rename one of each")
    return escaped


def preprocessing_of(images: Input) -> Preprocessing:
    """Return how an experiment's ``input`` section prepares the images of a validation."""
    mean, std = images.mean, images.std
    return Preprocessing(images.scale_val, images.crop_val, (mean[0], mean[1], mean[2]), (std[0], std[1], std[2]))


def record_in(content: Mapping[Any, Any], source: str) -> NetworkRecord | None:
    """Return what the content of a weights file says about its network; None for files of other programs.

    Checkpoints that were written before there were records have the experiment's settings, which say the same
    except for the names of the classes. Raises WeightsError for a wrong record, ConfigError for wrong settings.
    """
    if not isinstance(content.get("state_dict"), dict):
        return None
    network = content.get("network")
    record = NetworkRecord.from_json(network, source) if _is_record(network) else None
    experiment = experiment_in(content, source)
    if experiment is None or not has_record(experiment.network.arch):
        return record
    of_config = NetworkRecord.of_config(experiment.network, experiment.input).to_json()
    if record is None:
        record = NetworkRecord.from_json(of_config, source)
        return replace(record, class_names=class_names_in(content, record.classes, source))
    differences = [
        f"{key}: {shown(record.to_json()[key])} under network, {shown(of_config[key])} under config"
        for key in (*COMMON_SETTINGS, "options")
        if record.to_json()[key] != of_config[key]
    ]
    if differences:
        raise WeightsError(f"{source}: says two things of its network: {'; '.join(differences)}; {REMEDY}")
    return record


def experiment_in(content: Mapping[Any, Any], source: str) -> Experiment | None:
    """Return the experiment whose settings a checkpoint holds; None for other files, such as those of other trainers.

    Raises ConfigError for a checkpoint of this package's trainer whose settings are wrong.
    """
    is_own = "format_version" in content
    if not isinstance(content.get("config"), dict) or (_is_record(content.get("network")) and not is_own):
        return None
    try:
        return parse_experiment(content["config"], source)
    except ConfigError:
        if is_own:
            raise
        return None


def has_record(arch: str) -> bool:
    """Return whether checkpoints of an architecture describe their network; those of a user's own network do not."""
    return arch in ARCHITECTURES or is_elsewhere(arch)


def class_names_in(content: Mapping[Any, Any], classes: int, source: str) -> tuple[str, ...] | None:
    """Return the names of the classes in a checkpoint that has no record of its network; None if it has none.

    Raises WeightsError for what cannot be the names of this number of classes.
    """
    names = content.get("class_names")
    for key, value, problem in _name_problems(names, classes):
        raise WeightsError(f"{source}: {key} = {shown(value)}: {problem}; {REMEDY}")
    return None if names is None else tuple(names)


def _is_record(network: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether what is under "network" is a record, right or wrong; other trainers have settings there."""
    return isinstance(network, dict) and not network.keys().isdisjoint(field.name for field in fields(NetworkRecord))


def check_record(
    record: NetworkRecord, wanted: Mapping[str, Any], source: str, asked_by: str = ASKED_BY_NETWORK
) -> None:
    """Raise WeightsError if ``wanted`` (arguments of `zoo.get`) contradicts the record of a file's network.

    ``asked_by`` tells in the message where ``wanted`` comes from ("the experiment", "the arguments"). Keys that are not
    in ``wanted`` are not compared. These differences are allowed: another number of classes, "inplace" beside "sync",
    a norm that is a function, and options that change no weights. Of networks of other packages only the architecture
    is compared, since it is unknown which arguments of their builders change weights.
    """
    if record.folded:
        raise WeightsError(
            f"{source}: holds a network folded for inference, which is not built like others; load it with "
            f"zoo.convert.fold_network(zoo.get({record.arch!r}, ...)).load_state_dict(...), "
            "or give the file that it was made from"
        )
    if "arch" in wanted and any(map(is_elsewhere, (record.arch, wanted["arch"]))):
        wanted = {"arch": wanted["arch"]}
    settings = record.settings()
    differences = [
        (key, settings.get(key, _default(record.arch, key)), value)
        for key, value in wanted.items()
        if key not in ("classes", *FREE_OPTIONS) and not _agrees(record, key, value)
    ]
    if any(key == "arch" for key, *_ in differences):  # options of another architecture cannot be compared
        differences = [difference for difference in differences if difference[0] in ("arch", "norm", "activation")]
    if not differences:
        return
    parts = [
        f"{key}={shown(recorded)} in the file, but {key}={shown(value)} is asked for by {asked_by}"
        for key, recorded, value in differences
    ]
    raise WeightsError(
        f"{source}: belongs to another network: {'; '.join(parts)}; give the experiment or the arguments that the file "
        f"was trained with{_conversions(differences)}{_as_body(differences)}; in Python, "
        "model.load_state_dict(zoo.weights.read_state_dict(FILE)) loads it all the same"
    )


def _agrees(record: NetworkRecord, key: str, value: Any) -> bool:
    if key == "norm":
        return callable(value) or (value == "standard") == (record.norm == "standard")
    if key == "activation_param" and record.activation not in WITH_PARAMETER:
        return True
    recorded = record.settings().get(key, _default(record.arch, key))
    return bool(_plain(recorded) == _plain(value))


def _conversions(differences: list[tuple[str, Any, Any]]) -> str:
    """Return the hint which kinds of ``zoo convert`` turn the file's settings into those asked for; "" if none can."""
    kinds = []
    # Sorted, so that the activation is converted first, since in-place norms have no relu.
    for key, recorded, value in sorted(differences, key=lambda difference: difference[0]):
        if key == "norm":
            kinds.append("inplace-to-standard" if value == "standard" else "standard-to-inplace")
        elif (key, recorded, value) == ("activation", "relu", "leaky_relu"):
            kinds.append("relu-to-leaky-relu")
        else:
            return ""
    return f", or convert the file (zoo convert {' and then '.join(kinds)})"


def _as_body(differences: list[tuple[str, Any, Any]]) -> str:
    """Return the hint that a file of another architecture fits the body of the one that is asked for; "" if not."""
    for key, recorded, value in differences:
        body = ARCHITECTURES[value].structure.get("body") if key == "arch" and value in ARCHITECTURES else None
        if body is not None and not is_elsewhere(recorded) and has_same_tensors(recorded, body):
            return f", or give the file as body_weights to zoo.get, for the body of {value}"
    return ""


def _default(arch: str, key: str) -> Any:
    return None if is_elsewhere(arch) else ARCHITECTURES[arch].options.get(key)


def _plain(value: Any) -> Any:
    """Return ``value`` with tuples as lists, which is what JSON makes of them."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def shown(value: Any) -> str:
    """Return a value from a file as one short line for a message, whatever the value is."""
    if isinstance(value, list):
        more = f" and {len(value) - MAX_LISTED:,} more" if len(value) > MAX_LISTED else ""
        return f"[{', '.join(map(shown, value[:MAX_LISTED]))}{more}]"[:MAX_SHOWN_LIST]
    try:
        text = repr(value[:MAX_SHOWN] if isinstance(value, str) else value)
    except (ValueError, RecursionError):  # numbers of thousands of digits; dicts in dicts without end
        text = f"(too long to show: {type(value).__name__})"
    return printable(text[:MAX_SHOWN])


Problem = tuple[str, Any, str]  # key, value, what is wrong with it


def _problems(content: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what is wrong with the values of a record that has all keys."""
    arch, norm, activation = (content[key] for key in ("arch", "norm", "activation"))
    if isinstance(arch, str) and is_elsewhere(arch):
        yield from _problems_elsewhere(content)
        return
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        near = ", ".join(nearest(arch[:MAX_SHOWN] if isinstance(arch, str) else "", ARCHITECTURES))
        yield "arch", arch, f"this version has no such network, the nearest names are {near}"
        return
    if not isinstance(norm, str) or norm not in NORM_CLASSES:
        yield "norm", norm, f"is not one of {', '.join(NORM_CLASSES)}"
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        yield "activation", activation, f"is not one of {', '.join(ACTIVATIONS)}"
    elif activation == "relu" and norm != "standard":
        yield "activation", activation, f"does not go with the norm {norm!r}"
    parameter = content["activation_param"]
    if not is_number(parameter, -MAX_SLOPE, MAX_SLOPE) or (activation in WITH_PARAMETER and parameter <= 0):
        yield (
            "activation_param",
            parameter,
            f"must be a number up to {MAX_SLOPE:,.0f}, and positive where the activation uses it",
        )
    yield from _option_problems(arch, content["options"])
    yield from _common_problems(content)


def _common_problems(content: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what is wrong with the values that mean the same for the networks of all packages."""
    if not is_whole(content["classes"], 0, MAX_CLASSES):
        yield "classes", content["classes"], f"must be a whole number from 0 to {MAX_CLASSES:,}"
        return
    yield from _name_problems(content["class_names"], content["classes"])
    yield from _preprocessing_problems(content["preprocessing"])
    if not isinstance(content["folded"], bool):
        yield "folded", content["folded"], "must be true or false"


def _problems_elsewhere(content: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what is wrong with the values of a record of a network of another package."""
    for key in ("norm", "activation", "activation_param"):
        if content[key] is not None:
            yield key, content[key], f"must be null, as {content['arch']} has its package's own"
    options = content["options"]
    if not isinstance(options, dict) or not all(isinstance(key, str) for key in options):
        yield "options", options, "must be a dict of the arguments of the package's builder"
        return
    network = {"arch": content["arch"], "options": {key: options[key] for key in options if key != "memory"}}
    if "memory" in options:
        network["memory"] = options["memory"]
    try:
        parse_experiment({"network": network}, "as settings")  # refuses, for instance, the path of another file
    except ConfigError as error:
        yield "options", options, str(error)
    if "pretrained" in options:
        yield "options", options, "pretrained asks for the package's weights, and the file has its own"
    yield from _common_problems(content)


def _is_number(value: Any) -> bool:
    return is_number(value, -MAX_NUMBER, MAX_NUMBER)


def _option_problems(arch: str, options: Any) -> Iterator[Problem]:
    if not isinstance(options, dict):
        yield "options", options, "must be a dict"
        return
    for key, value in options.items():
        if not isinstance(key, str) or key not in ARCHITECTURES[arch].options:
            known = ", ".join(ARCHITECTURES[arch].options)
            yield "options", key, f"{arch} has no such option, it has {known}"
        elif not _is_setting(value):
            allowed = (
                f"a word, a truth value, a number up to {MAX_NUMBER:,}, or a list of at most {MAX_ENTRIES} of them"
            )
            yield f"options.{key}", value, f"must be {allowed}"


def _is_setting(value: Any, depth: int = 0) -> bool:
    if isinstance(value, list):
        return depth < 2 and len(value) <= MAX_ENTRIES and all(_is_setting(item, depth + 1) for item in value)
    if isinstance(value, str):
        return len(value) <= MAX_NAME_LENGTH and value.isprintable()
    return isinstance(value, bool) or _is_number(value)


def _name_problems(names: Any, classes: int) -> Iterator[Problem]:
    if names is None:
        return
    if not isinstance(names, list):
        yield "class_names", names, "must be a list of names"
    elif len(names) > classes:
        yield "class_names", names, f"these are {len(names):,} names for {classes:,} classes"
    elif bad := [name for name in names if not _is_name(name)]:
        yield "class_names", bad, f"names are texts of 1 to {MAX_NAME_LENGTH} characters that a terminal can show"
    elif twice := [name for name, count in Counter(names).items() if count > 1]:
        yield "class_names", names, f"there are twice: {shown(twice)}"


def _is_name(name: Any) -> bool:
    # File systems allow 255 characters, and `printable` may turn each into ten.
    return isinstance(name, str) and 0 < len(name) <= 10 * MAX_NAME_LENGTH and name.isprintable()


def _preprocessing_problems(images: Any) -> Iterator[Problem]:
    if images is None:
        return
    if not isinstance(images, dict) or set(images) != {field.name for field in fields(Preprocessing)}:
        yield "preprocessing", images, "must be a dict of scale, crop, mean and std"
        return
    scale, crop = images["scale"], images["crop"]
    if not (is_whole(scale, -1, -1) or is_whole(scale, 1, MAX_SIDE)):
        yield "preprocessing.scale", scale, f"must be -1 or a whole number from 1 to {MAX_SIDE:,}"
    elif not is_whole(crop, 1, MAX_SIDE if scale == -1 else scale):
        yield "preprocessing.crop", crop, "must be a whole number from 1 to the scale"
    for key in ("mean", "std"):
        values = images[key]
        if not isinstance(values, list) or len(values) != 3 or not all(map(_is_number, values)):
            yield f"preprocessing.{key}", values, "must be three numbers"
        elif not all((0 if key == "mean" else 1e-6) <= value <= 1 for value in values):
            yield f"preprocessing.{key}", values, "must be from 0 to 1, and std more than 0"
