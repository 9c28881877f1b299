"""Names of networks: what each stands for, which have published weights, and `get`, which builds them."""

from __future__ import annotations

import fnmatch
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field
from torch import nn

from zoo import config
from zoo.architectures import ARCHITECTURES, architecture, is_external
from zoo.errors import ConfigError, WeightsError, escape, join_names, nearest
from zoo.layers.norm import NormFactory
from zoo.limits import MAX_CHANNELS
from zoo.models import Network, build, build_network
from zoo.models.deeplab import DeepLab
from zoo.models.external import build_external
from zoo.section import Section, parse_section
from zoo.spec import NetworkSpec, Preprocessing, merge, parse_spec, stride_option
from zoo.weights import StoredWeights, load_state_dict, read_weights
from zoo.weights.published import published, published_spec
from zoo.weights.stored import load_body, load_stored, settings_of_body
from zoo.weights.stored_spec import check_same_network

if TYPE_CHECKING:
    from zoo.data.transforms import Transform

CFG_KEYS = ("mean", "std", "scale", "crop", "interpolation")
CIFAR_INPUT = config.Input(
    crop_train=32,
    scale_val=-1,
    crop_val=32,
    mean=[0.4914, 0.4822, 0.4465],
    std=[0.2471, 0.2435, 0.2616],
)
INPUTS = {"imagenet": config.Input(), "cifar": CIFAR_INPUT}  # for networks that belong to no experiment
# The fields of a spec that `get` takes; the others are `get`'s own or facts of files.
SPEC_ARGUMENTS = ("norm", "activation", "activation_param", "num_classes", "memory", "weight_init",
                  "weight_gain_multiplier")  # fmt: skip
FROM_BODY = ("norm", "activation", "activation_param")


def list_models(pattern: str | Sequence[str] = "*", pretrained: bool = False) -> list[str]:
    """Return the names that match the shell-style ``pattern``, sorted: architectures and published variants.

    Several patterns give the names that match any of them. With ``pretrained`` only the published variants. Raises
    ConfigError for anything but text.
    """
    patterns = [pattern] if isinstance(pattern, str) else pattern
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(each, str) for each in patterns):
        raise ConfigError(f"a pattern must be text, or a list of texts, got {pattern!r}")
    names = list(published()) if pretrained else [*ARCHITECTURES, *published()]
    matching = {name for each in patterns for name in fnmatch.filter(names, each)}
    return sorted(matching, key=lambda name: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", name)])


def list_pretrained(pattern: str | Sequence[str] = "*") -> list[str]:
    """Return the names of the published variants, as ``list_models(pattern, pretrained=True)`` does."""
    return list_models(pattern, pretrained=True)


def is_model(name: str) -> bool:
    """Return whether `list_models` has this name: an architecture or a published variant."""
    return name in ARCHITECTURES or name in published()


class BuildOptions(Section):
    """The arguments of `get` that say how a network is built and loaded, and not which network it is."""

    pretrained: bool = False
    features_only: bool = False
    out_indices: Annotated[list[int | str], Field(min_length=1, max_length=100)] | None = None
    output_stride: Literal[8, 16, 32] | None = None
    in_chans: Annotated[int, Field(ge=1, le=MAX_CHANNELS)] = 3
    drop_rate: Annotated[float, Field(ge=0, le=0.99)] = 0.0
    signed_scale: bool = False

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield features that are chosen but not asked for, and dropout without a classifier."""
        if self.out_indices is not None and not self.features_only:
            yield ("out_indices", "features_only"), "chooses among features; give features_only=True too"
        if self.drop_rate and self.features_only:
            yield ("drop_rate", "features_only"), "drops what a classifier reads, and there is none; leave it out"


def get(
    name: str | os.PathLike[str],
    *,
    pretrained: bool = False,
    weights: str | os.PathLike[str] | None = None,
    norm: str | NormFactory | None = None,
    activation: str | None = None,
    num_classes: int | None = None,
    features_only: bool = False,
    **options: Any,
) -> Network:
    """Return a network, initialized as the published ones were, or with weights.

    Arguments that are left out are taken from the weights file if it describes its network, as checkpoints of this
    package's trainer and files of ``zoo convert`` do. Arguments that are given have to agree with the file.

    Args:
    - `name`: an architecture ("resnext101"), a published variant ("resnext101_ipabn_lr_512", which fixes norm,
      activation and stem; arguments given here win), the path of a weights file that describes its network, or
      "timm:NAME" or "torchvision:NAME" for a network of another package, which is returned as that package's own class.
    - `pretrained`: load the published weights of the variant. They are downloaded if they are not in the cache, and are
      always verified. An architecture stands for its only variant.
    - `weights`: path of a weights file, or a published name, to load strictly.
    - `norm`: "standard" (the default), "inplace", "sync", or a function ``channels -> module``.
    - `activation`: "leaky_relu" (the default), "elu" or "identity"; "relu" too with the standard norm.
    - `num_classes`: default the file's number, or 1000 (10 for CIFAR networks, 19 for deeplab_*); 0 leaves the
      classifier out, and forward returns the pooled features (N, num_features), in deeplab_* the map of the head.
    - `features_only`: build a backbone that returns the list of its stages' raw outputs; see ``.feature_info``.
    - `**options`: options of the architecture, which ``zoo show NAME`` explains (``memory``, ``input_3x3``,
      ``dilation`` and others), arguments of the other package's builder, and these:

      - `activation_param`: slope of leaky_relu (default 0.01) or alpha of elu.
      - `out_indices`: (with features_only) positions of the stages to return, finest first; "stem" is the map that the
        pool of the stem reads, at half of the image's sides. Stages behind the last one are not run.
      - `output_stride`: 8, 16 or 32: how many times smaller than the image the last map is. It sets ``dilation`` in
        the families that have that option; the weights do not change. In deeplab_* 8 (the default) or 16.
      - `in_chans`: number of channels of the image (default 3). For another number the first filters of the weights,
        which read red, green and blue, are summed (1 channel) or repeated and scaled, see `zoo.weights.load.fit_input`.
      - `drop_rate`: share of the inputs of the classifier's linear layer that is dropped in training.
      - `signed_scale`: (with weights) read the scales of a file with their sign, as the in-place networks of December
        2017 were trained: the network is built with the standard norm, whose scale is signed.
      - `body_weights`: (deeplab_* alone) weights file of the body, or a published name, such as
        "resnext101_ipabn_lr_512" for deeplab_resnext101. Norm, activation and stem that are left out are the file's.
        The file's classifier is not loaded; head and cls are new.
      - `weight_init`, `weight_gain_multiplier`: the initialization, as the settings of experiments name it.

    Raises TypeError for an unknown argument, ConfigError (a ValueError) for an unknown name or an invalid value, and
    WeightsError for weights that are not available, do not fit or belong to another network.
    """
    name, body_path = os.fspath(name), options.pop("body_weights", None)
    file = _read_file(name, weights, pretrained)
    variant = only_variant(name) if pretrained is True and not is_external(name) else name
    own = _spec_of_name(variant, file)
    options |= {"norm": norm, "activation": activation, "num_classes": _num_classes(num_classes, options)}
    how, changes = _sort_arguments(own, {**options, "pretrained": pretrained, "features_only": features_only})
    has_weights = pretrained or file is not None
    factory = changes["norm"] if callable(changes.get("norm")) else None
    _check_together(own, how, changes, has_weights)
    body = None if body_path is None else _read_body(own, body_path, has_weights)
    spec = _merge_specs(own, changes, how, file, body)
    if pretrained and not spec.is_external:  # what is wrong with the arguments is reported before the download
        check_same_network(own, _compared(own, changes, how), variant, "the arguments")
        file = read_weights(variant)
    if spec.is_external:
        return _get_external(spec, how, file)
    model = _build(spec, how, factory)
    images = spec.preprocessing or INPUTS[architecture(spec.arch).input].preprocessing()
    model.built_as = None if factory else spec.model_copy(update={"preprocessing": images})
    model.pretrained_cfg = _pretrained_cfg(images, variant, architecture(spec.arch).task == "classification")
    if file is not None:
        load_state_dict(model, file.state_dict, source=escape(file.path))
    if body is not None:
        assert isinstance(model, DeepLab)
        load_body(model, body, "the arguments")
    return model


create_model = get  # its name in timm


def build_from_config(network: NetworkSpec) -> nn.Module:
    """Return the freshly initialized network of an experiment's ``network`` section.

    A network of another package has that package's initial weights, or its pretrained ones if the options say so.
    Raises ConfigError, with the JSON path, where the architecture does not exist or lacks an option.
    """
    model: Any
    try:
        model = build.build_model(network) if network.is_external else _build(network, BuildOptions())
    except ConfigError as error:
        raise ConfigError(f"network.arch {network.arch!r}: {error}") from error
    model.built_as = network.without_pretrained()
    return model


def build_on_meta(network: NetworkSpec) -> nn.Module:
    """Return the network of an experiment's ``network`` section without values, on the meta device.

    Nothing of its size is allocated, unless another package cannot build it so. Raises ConfigError as
    `build_from_config` does.
    """
    try:
        return build.build_on_meta(network)
    except ConfigError as error:
        raise ConfigError(f"network.arch {network.arch!r}: {error}") from error


def _read_file(name: str, weights: Any, pretrained: bool) -> StoredWeights | None:
    """Return the weights file that `get` is to load: ``weights``, or ``name`` if that is a file; None if neither.

    Published weights are left for later.
    """
    if pretrained and (weights is not None or os.path.isfile(name)):
        other = "weights=PATH" if weights is not None else "a checkpoint"
        raise ConfigError(f"pretrained=True and {other} are two sources of weights", name, "give one")
    if weights is not None:
        return read_weights(_checked_path("weights", weights))
    if not os.path.isfile(name):
        return None
    if name.endswith(".json"):
        raise ConfigError(f"{escape(name)} is no checkpoint; zoo train and zoo validate take experiment files")
    return read_weights(name)


def _checked_path(argument: str, path: Any) -> str | os.PathLike[str]:
    if isinstance(path, (str, os.PathLike)):
        return path
    raise TypeError(
        f"{argument} must be the path of a weights file or a published name, not a {type(path).__name__}; load a state "
        "dict with model.load_state_dict(...)"
    )


def _spec_of_name(name: str, file: StoredWeights | None) -> NetworkSpec:
    """Return what a name says of its network; the settings that it fixes are the given ones.

    ``file`` is the weights file that is loaded. If ``name`` is the name of it, the file's own spec adds everything but
    the architecture later. Raises ConfigError for an unknown name.
    """
    if name in ARCHITECTURES or is_external(name):
        return NetworkSpec(arch=name)
    if name in published():
        return published_spec(name)
    if not os.path.isfile(name) or file is None:
        raise ConfigError(_unknown(name, [*ARCHITECTURES, *published()]))
    is_loaded = os.path.samefile(file.path, name)
    spec = file.spec if is_loaded else read_weights(name).checked_spec()
    if spec is None:
        raise WeightsError(
            f"{escape(name)} does not say which network it belongs to; name one: "
            f"zoo.get(ARCHITECTURE, weights={name!r})"
        )
    return NetworkSpec(arch=spec.arch) if is_loaded else spec


def _num_classes(num_classes: int | None, options: dict[str, Any]) -> int | None:
    """Return the number of classes, and remove its earlier name ``classes`` from ``options``."""
    if "classes" not in options:
        return num_classes
    warnings.warn("zoo.get: the argument classes is called num_classes", FutureWarning, stacklevel=3)
    classes: int | None = options.pop("classes")
    if None not in (num_classes, classes):
        raise TypeError("zoo.get: num_classes and classes are the same argument; give num_classes alone")
    return num_classes if classes is None else classes


def _sort_arguments(own: NetworkSpec, arguments: Mapping[str, Any]) -> tuple[BuildOptions, dict[str, Any]]:
    """Return the arguments of `get` about building and loading, and those that change the spec.

    An argument that is None has its default. Raises TypeError for names that neither `get` nor the architecture knows.
    """
    if not own.is_external:
        known = [*SPEC_ARGUMENTS, *BuildOptions.model_fields, *architecture(own.arch).options]
        for argument in arguments:
            if argument not in known:
                (near,) = nearest(argument, [*known, "weights", "body_weights"], 1)
                raise TypeError(
                    f"get() got an unexpected keyword argument {argument!r} for {own.arch}, whose options are "
                    f"{join_names(architecture(own.arch).options)}; the nearest argument is {near!r}"
                )
    given = {key: value for key, value in arguments.items() if value is not None or key == "pretrained"}
    how = {key: given.pop(key) for key in BuildOptions.model_fields if key in given}
    if isinstance(how.get("out_indices"), tuple):
        how["out_indices"] = list(how["out_indices"])
    return parse_section(BuildOptions, how, own.arch), given


def _check_together(own: NetworkSpec, how: BuildOptions, changes: Mapping[str, Any], has_weights: bool) -> None:
    """Raise ConfigError for arguments of `get` that exclude each other."""
    norm = changes.get("norm")
    if own.is_external:
        if how.signed_scale:
            raise ConfigError(f"signed_scale is not for {own.arch}, which has the layers of its package; leave it out")
        return
    problems = {
        "a norm function decides on the activation itself; leave activation and activation_param out": callable(norm)
        and not changes.keys().isdisjoint({"activation", "activation_param"}),
        "features_only=True builds no classifier; leave num_classes out": how.features_only
        and changes.get("num_classes", 0) != 0,
        "features_only=True returns the stages already; leave keep_outputs out": how.features_only
        and changes.get("keep_outputs", False),
        "drop_rate drops what a classifier reads, and there is none; leave it out": how.drop_rate
        and changes.get("num_classes") == 0,
        "signed_scale=True says how to read weights; give weights=PATH": how.signed_scale and not has_weights,
        f"signed_scale=True builds the network with norm='standard', not with norm={norm!r}": how.signed_scale
        and norm not in (None, "standard"),
        "output_stride and dilation set the same thing; pass one of them": how.output_stride is not None
        and "dilation" in changes,
    }
    for problem, present in problems.items():
        if present:
            raise ConfigError(f"{own.arch}: {problem}")


def _read_body(own: NetworkSpec, path: Any, has_weights: bool) -> StoredWeights:
    """Return the weights for the body of a network; ConfigError where they have no place."""
    if own.is_external or architecture(own.arch).family != "deeplab":
        raise ConfigError(f"{own.arch}: body_weights are for the body of a deeplab_* network; give weights=PATH")
    if has_weights:
        raise ConfigError(f"{own.arch}: body_weights and weights of the whole network are two sources; give one")
    return read_weights(_checked_path("body_weights", path))


def _merge_specs(
    own: NetworkSpec,
    changes: dict[str, Any],
    how: BuildOptions,
    file: StoredWeights | None,
    body: StoredWeights | None,
) -> NetworkSpec:
    """Return the spec of the files, changed by what the name says, changed by the arguments.

    Raises WeightsError where name or arguments contradict a file, ConfigError for an impossible network.
    """
    wanted, compared = merge(own.given(), changes), _compared(own, changes, how)
    has_function = callable(changes.get("norm"))
    if has_function:
        changes = {**changes, "norm": build.norm_kind(changes["norm"])}
    if how.signed_scale:
        changes = {**changes, "norm": "standard"}
    if how.output_stride is not None and not own.is_external:
        changes = {**changes, **stride_option(architecture(own.arch), how.output_stride)}
    below: dict[str, Any] = {}
    for weights, is_body in ((file, False), (body, True)):
        if weights is None:
            continue
        stored = weights.checked_spec()
        if stored is None:
            if not has_function and not own.is_external:
                arch = architecture(own.arch).structure["body"] if is_body else own.arch
                weights.warn_of_assumptions(parse_spec(merge(own.given(), changes), own.arch), wanted, arch)
        elif is_body:
            settings = settings_of_body(compared, stored)
            check_same_network(stored, settings, escape(weights.path), "the arguments")
            below = {key: getattr(stored, key) for key in FROM_BODY if not has_function}
            below |= {key: stored.options[key] for key in ("input_3x3",) if key in stored.options}
        else:
            check_same_network(stored, compared, escape(weights.path), "the arguments")
            below = _adapted(stored.model_dump(), how, changes)
    return parse_spec(merge(below, _adapted(own.given(), how, changes), changes), own.arch)


def _compared(own: NetworkSpec, changes: Mapping[str, Any], how: BuildOptions) -> dict[str, Any]:
    """Return the settings of name and arguments that the weights must agree with."""
    wanted = merge(own.given(), changes)
    if how.signed_scale or callable(changes.get("norm")):
        wanted.pop("norm", None)
    return wanted


def _adapted(content: dict[str, Any], how: BuildOptions, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a file or a name without those that the arguments make meaningless."""
    without = {"memory"} if "norm" in changes else set()  # the strategy may need another norm
    if "num_classes" in changes:
        without.add("class_names")
    content = {key: value for key, value in content.items() if key not in without}
    options = content.get("options", {})
    if how.features_only:
        options = {key: value for key, value in options.items() if key != "keep_outputs"}
    return {**content, "options": options}


def _build(spec: NetworkSpec, how: BuildOptions, factory: NormFactory | None = None) -> Network:
    """Return the initialized network of a spec; ``factory`` makes its norms in place of the spec's."""
    model = build_network(spec, factory, features_only=how.features_only)
    if how.in_chans != 3:
        model.set_input_channels(how.in_chans)
    if how.drop_rate:
        model.set_drop_rate(how.drop_rate)
    if how.features_only and hasattr(model, "bn_out"):
        model.bn_out.requires_grad_(False)  # loaded and saved, but not run: DDP waits for gradients of what is trained
    build.initialize(model, spec)
    if how.out_indices is not None:
        model.select_features(how.out_indices)
    return model


def _get_external(spec: NetworkSpec, how: BuildOptions, file: StoredWeights | None) -> Any:
    """Return the network of another package, with the weights of a file if there is one."""
    num_classes = spec.given().get("num_classes")  # the default is the package's own
    options = {**spec.options, **how.model_dump(exclude_defaults=True)}
    model: Any = build_external(spec.arch, num_classes=num_classes, memory=spec.memory, **options)
    if num_classes is not None:
        model.built_as = spec.without_pretrained()
    if file is not None:
        load_stored(model, file, "the arguments")
    if file is not None and spec.preprocessing is not None:
        own_cfg = getattr(model, "pretrained_cfg", None) or {}
        model.pretrained_cfg = {**own_cfg, **_pretrained_cfg(spec.preprocessing, os.fspath(file.path), True)}
    return model


def only_variant(name: str) -> str:
    """Return ``name`` if it is a published variant, or the only published variant of the architecture ``name``."""
    if name in published():
        return name
    if name not in ARCHITECTURES:
        raise ConfigError(_unknown(name, [*ARCHITECTURES, *published()]))
    variants = [variant for variant, entry in published().items() if entry.arch == name]
    if not variants:
        raise WeightsError(f"{name} has no published weights; those that have: {', '.join(published())}")
    if len(variants) > 1:
        raise WeightsError(f"{name} has several published weights, name one of them: {', '.join(variants)}")
    return variants[0]


def _pretrained_cfg(images: Preprocessing, name: str, is_cropped: bool) -> dict[str, Any]:
    """Return what `zoo.transforms` reads; networks that segment take whole images, so that scale and crop are None."""
    return {
        "mean": tuple(images.mean),
        "std": tuple(images.std),
        "scale": images.scale_val if is_cropped else None,
        "crop": images.crop_val if is_cropped else None,
        "interpolation": "bilinear",
        "source": published()[name].page if name in published() else name if os.path.isfile(name) else None,
    }


def _unknown(name: str, known: Iterable[str]) -> str:
    if os.sep in name or os.path.exists(name) or name.endswith((".pth", ".pt", ".tar", ".json")):
        kind = "is a folder" if os.path.isdir(name) else "there is no such file"
        where = escape(name)
        return f"{where}: {kind}; give the name of a network or the path of a checkpoint (zoo list shows all names)"
    return f"unknown network {name!r}; the nearest names are {', '.join(nearest(name, known))} (zoo list shows all)"


def transforms(
    name_or_cfg: str | nn.Module | Mapping[str, Any],
    *,
    training: bool = False,
    ten_crops: bool = False,
    scale: int | None = None,
    crop: int | None = None,
) -> Transform:
    """Return the preprocessing of a model: a callable from an image to a normalized (3, crop, crop) tensor.

    Args:
    - `name_or_cfg`: a model's name, a model, or its ``pretrained_cfg``.
    - `training`: random resized crop and flip in place of resize and center crop; color jitter and lighting belong to
      an experiment, see `zoo.data.transforms.TrainTransform`.
    - `ten_crops`: return (10, 3, crop, crop); validation only.
    - `scale`, `crop`: shorter side of the resized image (-1: not resized; validation only) and side of the crop, in px,
      in place of the model's.

    The callable takes a PIL image, a uint8 array (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), which is treated as PIL
    would, or a tensor (C, H, W) of 1 or 3 channels: uint8, or floating-point with values in [0, 1]. A batch of tensors
    (N, C, H, W) gives (N, 3, crop, crop), each image drawn on its own in training. The published scores are those of
    PIL images. Tensors are resized in float32 (bilinear, antialiased), without PIL's rounding to 8 bits: their
    values differ by up to 1/255 before the normalization.

    Raises ConfigError for an unknown name, for settings that do not go together, and for a network that segments, which
    takes whole images, unless scale and crop are given; the callable raises DataError for
    anything but an image, and for an image that is smaller than the crop.
    """
    from zoo.data.transforms import TrainTransform, ValTransform  # here, as this imports torchvision and PIL

    cfg = _cfg_of(name_or_cfg)
    if cfg["interpolation"] != "bilinear":
        raise ConfigError(f"interpolation is {cfg['interpolation']!r}; pretrained_cfg: only 'bilinear' is known")
    if training and ten_crops:
        raise ConfigError("ten crops are for validation; zoo.transforms: give training or ten_crops, not both")
    if training and scale is not None:
        raise ConfigError(f"scale={scale!r} belongs to validation; zoo.transforms: give training or scale, not both")
    crop, scale = cfg["crop"] if crop is None else crop, cfg["scale"] if scale is None else scale
    if crop is None or (scale is None and not training):
        raise ConfigError(
            "a network that segments takes whole images, so that no scale and crop belong to it; zoo.transforms: give "
            "scale and crop, or normalize whole images by the mean and std of its pretrained_cfg, as zoo segment does"
        )
    sizes = {"crop_train": crop} if training else {"crop_val": crop, "scale_val": scale}
    content = {"input": {**sizes, "mean": list(cfg["mean"]), "std": list(cfg["std"])}}
    settings = config.parse_experiment(content, "zoo.transforms").input
    if training:
        return TrainTransform(settings)
    return ValTransform(settings.scale_val, settings.crop_val, settings.mean, settings.std, ten_crops=ten_crops)


def _cfg_of(name_or_cfg: str | nn.Module | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(name_or_cfg, Mapping):
        return _complete(name_or_cfg, "the mapping")
    if isinstance(name_or_cfg, str):
        # Without memory and initialization, to look at its settings alone; a file's weights need memory to go to.
        with torch.device("cpu" if os.path.isfile(name_or_cfg) else "meta"):
            name_or_cfg = get(name_or_cfg)
    cfg = getattr(name_or_cfg, "pretrained_cfg", None)
    if cfg is None:
        raise ConfigError(
            f"{type(name_or_cfg).__name__} has no pretrained_cfg; zoo.transforms: give a model of zoo.get, "
            "a name of zoo.list_models, or a mapping with mean, std, scale, crop and interpolation"
        )
    return _complete(cfg, f"the pretrained_cfg of {type(name_or_cfg).__name__}")


def _complete(cfg: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    """Return the mapping; ConfigError, which calls it ``what``, unless it has all keys."""
    missing = [key for key in CFG_KEYS if key not in cfg]
    if missing:
        raise ConfigError(
            f"{what} has no {join_names(missing)}; zoo.transforms: give the pretrained_cfg of a model of zoo.get, or a "
            f"mapping with {join_names(CFG_KEYS)}"
        )
    return dict(cfg)
