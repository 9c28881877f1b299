"""Names of networks: what each stands for, which have published weights, and `get`, which builds them."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from zoo import config
from zoo.architectures import ARCHITECTURES, architecture, is_elsewhere
from zoo.errors import ConfigError, WeightsError, listed, nearest, printable
from zoo.layers.init import init_weights
from zoo.layers.norm import NormFactory, norm_act
from zoo.models import Network, build_network
from zoo.models.arguments import check_norm_function, check_values, stride_option
from zoo.models.build import check_option_names, check_options
from zoo.models.deeplab import DeepLab
from zoo.models.elsewhere import build_from_elsewhere
from zoo.weights import NetworkRecord, StoredWeights, load_state_dict, read_weights
from zoo.weights.published import published
from zoo.weights.record import COMMON_SETTINGS, Preprocessing, check_record, preprocessing_of
from zoo.weights.stored import load_body, load_stored, settings_of_body

if TYPE_CHECKING:
    from zoo.data.location import DataPath
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


def get(
    name: str | os.PathLike[str],
    *too_many: NoReturn,
    pretrained: bool = False,
    weights: str | os.PathLike[str] | None = None,
    norm: str | NormFactory | None = None,
    activation: str | None = None,
    activation_param: float | None = None,
    num_classes: int | None = None,
    classes: int | None = None,
    features_only: bool = False,
    out_indices: Sequence[int | str] | None = None,
    output_stride: int | None = None,
    in_chans: int | None = None,
    drop_rate: float | None = None,
    signed_scale: bool = False,
    body_weights: str | os.PathLike[str] | None = None,
    **arch: Any,
) -> Network:
    """Return a network, initialised as the published ones were, or with weights.

    Arguments that are left out are taken from the weights file if it describes its network, as checkpoints of this
    package's trainer and files of ``zoo convert`` do. Arguments that are given have to agree with the file.

    Args:
    - `name`: an architecture ("resnext101"), a published variant ("resnext101_ipabn_lr_512", which fixes norm,
      activation and stem; arguments given here win), the path of a weights file that knows its network, or
      "timm:NAME" or "torchvision:NAME" for a network of another package, which is returned as that package's own class.
      All arguments but ``norm``, ``activation``, ``activation_param``, ``signed_scale`` and ``body_weights`` are then
      possible, and those that are not described here go to the package's builder.
    - `pretrained`: load the published weights of the variant. They are downloaded if they are not in the cache, and are
      always verified. An architecture stands for its only variant.
    - `weights`: path of a weights file, or a published name, to load strictly.
    - `norm`: "standard" (the default), "inplace", "sync", or a function ``channels -> module``.
    - `activation`: "leaky_relu" (the default, as in the original's networks; an experiment file that leaves it out
      means relu where the norm is standard), "elu" or "identity"; "relu" too with the standard norm.
    - `activation_param`: slope of leaky_relu (default 0.01) or alpha of elu.
    - `num_classes`: default the file's number, or 1000 (10 for CIFAR networks, 19 for deeplab_*); 0 leaves the
      classifier out, and forward returns the pooled features (N, num_features), in deeplab_* the map of the head.
    - `classes`: alias of ``num_classes``.
    - `features_only`: build a backbone that returns the list of its stages' raw outputs; see ``.feature_info``.
    - `out_indices`: (with features_only) positions of the stages to return, finest first; "stem" is the map that the
      pool of the stem reads, at half of the image's sides. Stages behind the last one are not run.
    - `output_stride`: 8, 16 or 32: how many times smaller than the image the last map is. It sets ``dilation`` in
      the families that have that option; the weights do not change. In deeplab_* 8 (the default) or 16.
    - `in_chans`: number of channels of the image (default 3). For another number the first filters of the weights,
      which read red, green and blue, are summed (1 channel) or repeated and scaled; the log says so, see
      `zoo.weights.load.fit_input`.
    - `drop_rate`: share of the inputs of the classifier's linear layer that is dropped in training.
    - `signed_scale`: (with weights) read the scales of a file with their sign, as the in-place networks of December
      2017 were trained: the network is built with the standard norm, whose scale is signed.
    - `body_weights`: (deeplab_* alone) path of a weights file of the body, or a published name, to load into the body:
      "resnext101_ipabn_lr_512" for deeplab_resnext101. Norm, activation and stem that are left out are the file's. The
      classifier of the file is left out; head and cls are new. The log says so.
    - `**arch`: options of the architecture, which `zoo.architectures` and ``zoo show NAME`` explain: ``memory``, what
      is kept for backward (it changes no weights), ``input_3x3``, ``dilation``, ``keep_outputs`` and others. Those that
      set sizes make at most 5,000 blocks and 2,000,000,000 parameters together.

    Raises ConfigError for an unknown name, argument or option (the message names those that exist) and for an invalid
    value; WeightsError for weights that are not available, do not fit or belong to another network.
    """
    if too_many:
        raise ConfigError(
            f"zoo.get takes the name of a network, and everything else by name, got {too_many} too; write for "
            "instance zoo.get(NAME, pretrained=True)"
        )
    if isinstance(weights, Mapping):  # its values would fill the message
        raise ConfigError(
            "weights must be the path of a weights file or a published name, got a state dict; build the network "
            "without it and give it to model.load_state_dict(...)"
        )
    if num_classes is not None and classes is not None:
        raise ConfigError(f"num_classes={num_classes!r} and classes={classes!r} say the same; give num_classes alone")
    classes = num_classes if classes is None else classes
    check_values({"pretrained": pretrained, "weights": weights, "norm": norm, "activation": activation,
                  "activation_param": activation_param, "num_classes": classes, "features_only": features_only,
                  "out_indices": out_indices, "output_stride": output_stride, "in_chans": in_chans,
                  "drop_rate": drop_rate, "signed_scale": signed_scale, "body_weights": body_weights})  # fmt: skip
    arguments = {
        "norm": norm,
        "activation": activation,
        "activation_param": activation_param,
        "classes": classes,
        **arch,
    }
    arguments = {key: value for key, value in arguments.items() if value is not None}
    name = _check_arguments(name, arguments, weights, pretrained, features_only, signed_scale)
    _check_shape_arguments(name, arguments, features_only, out_indices, output_stride, drop_rate)
    if signed_scale:
        arguments["norm"] = "standard"
    stored, images, record_of_file = None, None, None
    if os.path.isfile(name):
        stored, record_of_file = _of_file(name)
    network = name if record_of_file is None else record_of_file.arch
    if is_elsewhere(network):
        others = {"features_only": features_only or None, "out_indices": out_indices, "output_stride": output_stride,
                  "in_chans": in_chans, "drop_rate": drop_rate, "signed_scale": signed_scale or None,
                  "body_weights": body_weights}  # fmt: skip
        arguments |= {key: value for key, value in others.items() if value is not None}
        return _get_elsewhere(network, arguments, stored if weights is None else read_weights(weights), pretrained)
    if record_of_file is not None:
        settings, images = record_of_file.settings(), record_of_file.preprocessing
    else:
        name = only_variant(name) if pretrained else name
        settings, images = _of_name(name)
        if pretrained:
            _check_contradictions(
                name, settings, {key: arguments[key] for key in arguments if key != "classes"}, signed_scale
            )
    check_option_names(ARCHITECTURES[settings["arch"]], arch)  # also those whose value is None
    if output_stride is not None:
        arguments |= stride_option(output_stride, ARCHITECTURES[settings["arch"]])
    if weights is not None:
        stored = read_weights(weights)
    body = None
    if body_weights is not None:
        body = _read_body(name, settings, body_weights, pretrained or stored is not None)
        settings = _completed_by_body(settings, body, arguments)
    record = None if stored is None else stored.record_to_build()
    if stored is not None and record is not None:
        settings = _completed(settings, record, arguments, printable(stored.path), features_only, signed_scale)
        images = images or record.preprocessing
    explicit = {**settings, **arguments}
    settings = _with_defaults(explicit)
    if stored is not None and not callable(norm):
        stored.warn_of_assumptions(
            settings["arch"], {key: settings[key] for key in ("norm", "activation") if key not in explicit}
        )
    if pretrained:
        # What is wrong with the arguments is told before the download, and nothing is built before it is verified.
        check_options(ARCHITECTURES[settings["arch"]], _options_in(settings), _norm_factory(settings))
        stored = read_weights(name)
    images = images or preprocessing_of(INPUTS[ARCHITECTURES[settings["arch"]].input])
    model = _build(settings, features_only, in_chans=in_chans or 3, drop_rate=drop_rate or 0.0)
    if out_indices is not None:
        model.select_features(out_indices)
    model.built_as = _record_of(settings, images)
    model.pretrained_cfg = _pretrained_cfg(images, name, ARCHITECTURES[settings["arch"]].task == "classification")
    if stored is not None:
        load_state_dict(model, stored.state_dict, source=printable(stored.path))
    if body is not None:
        assert isinstance(model, DeepLab)
        load_body(model, body, "the arguments")
    return model


create_model = get  # its name in timm


def build_from_config(network: config.Network) -> nn.Module:
    """Return the freshly initialised network of an experiment's ``network`` section.

    A network of another package has that package's initial weights, or its pretrained ones if the options say so.
    Raises ConfigError, with the JSON path, where the architecture does not exist or lacks an option.
    """
    record = NetworkRecord.of_config(network)
    model: Any
    try:
        if is_elsewhere(network.arch):
            model = build_from_elsewhere(
                network.arch, classes=network.classes, memory=network.memory, **network.options
            )
        else:
            model = _build(record.settings(), False, network.weight_init, network.weight_gain_multiplier)
    except ConfigError as error:
        raise ConfigError(f"network.arch {network.arch!r}: {error}") from error
    model.built_as = record
    return model


def build_on_meta(network: config.Network) -> nn.Module:
    """Return the network of an experiment's ``network`` section without values, on the meta device.

    Nothing of its size is allocated, unless another package cannot build it so. Raises ConfigError as
    `build_from_config` does.
    """
    try:
        return NetworkRecord.of_config(network).build_on_meta()
    except ConfigError as error:
        raise ConfigError(f"network.arch {network.arch!r}: {error}") from error


def default_experiment(arch: str, data: DataPath) -> config.Experiment:
    """Return the experiment that trains an architecture to tell the classes of ``data``/val.

    The network is the one that `get` returns. SGD with Nesterov momentum takes batches of 64 images; the rate rises to
    0.025 in half an epoch, and falls along a cosine to 0 after 30 epochs. Raises ConfigError for an unknown
    architecture, and for one that segments, since no folder tells how its labels are stored; DataError for a folder
    without classes.
    """
    from zoo.data.folder import open_source  # here, as this imports torchvision and PIL

    network: dict[str, Any] = {"arch": arch}
    images = INPUTS["imagenet"]
    if not is_elsewhere(arch):
        record = architecture(arch)
        if record.task == "segmentation":
            raise ConfigError(
                f"{arch} segments, and no folder tells how its label maps are stored; write an experiment file, for "
                "instance from what zoo show quickstart_scenes.json prints"
            )
        network |= {"activation": "leaky_relu", "activation_param": 0.01}
        images = INPUTS[record.input]
    network["classes"] = len(open_source(data / "val").classes)
    schedule = {"type": "cosine", "mode": "step", "epochs": 30, "warmup_epochs": 0.5}
    optimizer = {"batch_size": 64, "learning_rate": 0.025, "nesterov": True, "schedule": schedule}
    content = {"network": network, "optimizer": optimizer, "input": images.model_dump()}
    return config.parse_experiment(content, f"the default recipe of {arch}")


def _get_elsewhere(arch: str, arguments: dict[str, Any], stored: StoredWeights | None, pretrained: bool) -> Any:
    """Return the network of another package that `get` was asked for, with the weights of a file if there is one."""
    for key in ("signed_scale", "body_weights", "norm", "activation", "activation_param"):
        if key in arguments:
            raise ConfigError(
                f"{key} is not for {printable(arch)}, which is built of its package's layers; leave it out"
            )
    record = None if stored is None else stored.record_to_build()
    settings = arguments
    if stored is not None and record is not None:
        check_record(record, {"arch": arch}, printable(stored.path), "the arguments")
        settings = {"classes": record.classes, **record.options, **arguments}
    model: Any = build_from_elsewhere(arch, pretrained=pretrained, **settings)
    if "classes" in settings:
        options = {key: value for key, value in settings.items() if key != "classes"}
        images = None if record is None else record.preprocessing
        model.built_as = NetworkRecord(arch, None, None, None, settings["classes"], options, preprocessing=images)
    if stored is None:
        return model
    load_stored(model, stored, "the arguments")
    if record is not None and record.preprocessing is not None:
        own = getattr(model, "pretrained_cfg", None) or {}
        model.pretrained_cfg = {**own, **_pretrained_cfg(record.preprocessing, os.fspath(stored.path), True)}
    return model


def _check_arguments(
    name: Any, arguments: dict[str, Any], weights: Any, pretrained: bool, features_only: bool, signed_scale: bool
) -> str:
    """Return the name as text; raise ConfigError for arguments of `get` that do not go together."""
    if not isinstance(name, (str, os.PathLike)):
        raise ConfigError(f"the name of a network must be text or a path, got {name!r}")
    name = os.fspath(name)
    norm = arguments.get("norm")
    is_file = os.path.isfile(name)
    problems = {
        "pretrained=True goes with the name of a network, not with a checkpoint": pretrained and is_file,
        "pretrained=True and weights=PATH are two sources of weights; give one": pretrained and weights is not None,
        "a norm function decides on the activation itself; leave activation and activation_param out": callable(norm)
        and not arguments.keys().isdisjoint({"activation", "activation_param"}),
        "features_only=True builds no classifier; leave num_classes out": features_only
        and arguments.get("classes", 0) != 0,
        "features_only=True returns the stages already; leave keep_outputs out": features_only
        and arguments.get("keep_outputs", False),
        "signed_scale=True says how to read weights; give weights=PATH": signed_scale
        and not (weights or pretrained or is_file),
        f"signed_scale=True builds the network with norm='standard', not with norm={norm!r}": signed_scale
        and norm not in (None, "standard"),
    }
    for problem, present in problems.items():
        if present:
            raise ConfigError(f"{printable(name)}: {problem}")
    return name


def _check_shape_arguments(
    name: str, arguments: dict[str, Any], features_only: bool, out_indices: Any, output_stride: Any, drop_rate: Any
) -> None:
    """Raise ConfigError for arguments of `get` about the network's shape that do not go together."""
    problems = {
        "out_indices chooses among features; give features_only=True too": out_indices is not None
        and not features_only,
        "output_stride and dilation say the same; give one": output_stride is not None and "dilation" in arguments,
        "drop_rate drops what a classifier reads, and there is none; leave it out": bool(drop_rate)
        and (features_only or arguments.get("classes") == 0),
    }
    for problem, present in problems.items():
        if present:
            raise ConfigError(f"{printable(name)}: {problem}")


def _build(
    settings: dict[str, Any],
    features_only: bool,
    init_method: str = "xavier_normal",
    init_gain: float = 1.0,
    in_chans: int = 3,
    drop_rate: float = 0.0,
) -> Network:
    """Build and initialise a network from settings: arch, norm, activation, activation_param, classes and options."""
    model = build_network(
        settings["arch"],
        _norm_factory(settings),
        classes=settings["classes"],
        features_only=features_only,
        **_options_in(settings),
    )
    if in_chans != 3:
        model.set_input_channels(in_chans)
    if drop_rate:
        model.set_drop_rate(drop_rate)
    if features_only and hasattr(model, "bn_out"):
        model.bn_out.requires_grad_(False)  # loaded and saved, but not run: DDP waits for gradients of what is trained
    if not next(model.parameters()).is_meta:  # where there are no values to set
        init_weights(model, init_method, init_gain, settings["activation"], settings["activation_param"])
    return model


def _norm_factory(settings: Mapping[str, Any]) -> NormFactory:
    """Return the norm factory that the settings of a network describe; ConfigError where there is no such norm."""
    norm = settings["norm"]
    if callable(norm):
        check_norm_function(norm)
    try:
        return norm_act(norm, settings["activation"], settings["activation_param"])
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _options_in(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those settings of a network that are options of its architecture."""
    return {key: value for key, value in settings.items() if key not in COMMON_SETTINGS}


def _of_name(name: str) -> tuple[dict[str, Any], Preprocessing | None]:
    """Return the settings that a name fixes, and for a published variant how its images are prepared."""
    if name in ARCHITECTURES:
        return {"arch": name}, None
    record = NetworkRecord.of_published(name) if name in published() else None
    if record is None:
        raise ConfigError(_unknown(name, [*ARCHITECTURES, *published()]))
    return record.settings(), record.preprocessing


def _of_file(path: str) -> tuple[StoredWeights, NetworkRecord]:
    """Return a weights file and the record of its network; WeightsError if it has none."""
    if path.endswith(".json"):
        raise ConfigError(f"{printable(path)} is no checkpoint; zoo train and zoo validate take experiment files")
    stored = read_weights(path)
    record = stored.record_to_build()
    if record is None:
        raise WeightsError(
            f"{printable(path)} does not say which network it belongs to; name one: "
            f"zoo.get(ARCHITECTURE, weights={path!r})"
        )
    return stored, record


def _completed(
    settings: dict[str, Any],
    record: NetworkRecord,
    arguments: dict[str, Any],
    source: str,
    features_only: bool,
    signed_scale: bool,
) -> dict[str, Any]:
    """Return ``settings``, completed by the record of a weights file.

    ``signed_scale`` asks for another norm than the file's, so that norms are not compared. Raises WeightsError where
    ``settings`` or ``arguments`` contradict the record.
    """
    wanted = {key: value for key, value in {**settings, **arguments}.items() if not (key == "norm" and signed_scale)}
    check_record(record, wanted, source, "the arguments")
    completed = {**record.settings(), **settings}
    if "norm" in arguments:
        completed.pop("memory", None)  # the file's strategy may need another norm
    if features_only:
        completed.pop("keep_outputs", None)  # it has no use there, and would be refused
    return completed


def _read_body(name: str, settings: dict[str, Any], path: str | os.PathLike[str], has_weights: bool) -> StoredWeights:
    """Return the weights for the body of the network ``name``; ConfigError where they have no place."""
    if ARCHITECTURES[settings["arch"]].family != "deeplab":
        raise ConfigError(f"{printable(name)}: body_weights are for the body of a deeplab_* network; give weights=PATH")
    if has_weights:
        raise ConfigError(f"{printable(name)}: body_weights and weights of the whole network are two sources; give one")
    return read_weights(path)


def _completed_by_body(settings: dict[str, Any], body: StoredWeights, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a DeepLab, completed by what the file of its body says of norm, activation and stem.

    Raises WeightsError where ``settings`` or ``arguments`` contradict the file.
    """
    record = body.record_to_build()
    if record is None:
        assumed = {"norm": "standard", "activation": "leaky_relu"}
        given = {**settings, **arguments}
        if not callable(given.get("norm")):
            body.warn_of_assumptions(
                ARCHITECTURES[settings["arch"]].structure["body"],
                {key: value for key, value in assumed.items() if key not in given},
            )
        return settings
    check_record(record, settings_of_body({**settings, **arguments}, record), printable(body.path), "the arguments")
    kept = {"norm", "activation", "activation_param", "input_3x3"} & record.settings().keys()
    of_file = {key: value for key, value in record.settings().items() if key in kept}
    if callable(arguments.get("norm")):
        of_file = {key: value for key, value in of_file.items() if key == "input_3x3"}
    return {**of_file, **settings}


def _with_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a network, completed by the defaults of those that every network has."""
    classes = ARCHITECTURES[settings["arch"]].classes
    defaults = {"norm": "standard", "activation": "leaky_relu", "activation_param": 0.01, "classes": classes}
    return {**defaults, **settings}


def _record_of(settings: dict[str, Any], images: Preprocessing) -> NetworkRecord | None:
    """Return the record of a network that was built from settings; None where a function makes its norms."""
    if callable(settings["norm"]):
        return None
    common = {key: settings[key] for key in COMMON_SETTINGS}
    return NetworkRecord(**common, options=_options_in(settings), preprocessing=images)


def only_variant(name: str) -> str:
    """Return ``name`` if it is a published variant, or the only published variant of the architecture ``name``."""
    if name in published():
        return name
    _of_name(name)  # raises ConfigError for an unknown name
    variants = [variant for variant, entry in published().items() if entry.arch == name]
    if not variants:
        raise WeightsError(f"{name} has no published weights; those that have: {', '.join(published())}")
    if len(variants) > 1:
        raise WeightsError(f"{name} has several published weights, name one of them: {', '.join(variants)}")
    return variants[0]


def _check_contradictions(name: str, settings: dict[str, Any], arguments: dict[str, Any], signed_scale: bool) -> None:
    """Raise ConfigError where an argument differs from what the published weights were trained with."""
    free = {"memory", "pooling_size", *(("norm",) if signed_scale else ())}
    arguments = {key: value for key, value in arguments.items() if key not in free}
    for key, value in arguments.items():
        if settings.get(key, value) != value or (key not in settings and value):
            raise ConfigError(
                f"{name} was trained with {key}={settings.get(key, False)!r}, not {value!r}; leave {key} out, or give "
                "weights=PATH to load the file into another network"
            )


def _pretrained_cfg(images: Preprocessing, name: str, is_cropped: bool) -> dict[str, Any]:
    """Return what `zoo.transforms` reads; networks that segment take whole images, so that scale and crop are None."""
    return {
        "mean": images.mean,
        "std": images.std,
        "scale": images.scale if is_cropped else None,
        "crop": images.crop if is_cropped else None,
        "interpolation": "bilinear",
        "source": published()[name].page if name in published() else name if os.path.isfile(name) else None,
    }


def _unknown(name: str, known: Iterable[str]) -> str:
    if os.sep in name or os.path.exists(name) or name.endswith((".pth", ".pt", ".tar", ".json")):
        kind = "is a folder" if os.path.isdir(name) else "there is no such file"
        where = printable(name)
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
    """Return the preprocessing of a model: a callable from an image to a normalised (3, crop, crop) tensor.

    Args:
    - `name_or_cfg`: a model's name, a model, or its ``pretrained_cfg``.
    - `training`: random resized crop and flip in place of resize and centre crop; colour jitter and lighting belong to
      an experiment, see `zoo.data.transforms.TrainTransform`.
    - `ten_crops`: return (10, 3, crop, crop); validation only.
    - `scale`, `crop`: shorter side of the resized image (-1: not resized; validation only) and side of the crop, in px,
      in place of the model's.

    The callable takes a PIL image, a uint8 array (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), which is treated as PIL
    would, or a tensor (C, H, W) of 1 or 3 channels: uint8, or floating-point with values in [0, 1]. A batch of tensors
    (N, C, H, W) gives (N, 3, crop, crop), each image drawn on its own in training. The published scores are those of
    PIL images. Tensors are resized in float32 (bilinear, antialiased), without PIL's rounding to 8 bits: their
    values differ by up to 1/255 before the normalisation.

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
            "scale and crop, or normalise whole images by the mean and std of its pretrained_cfg, as zoo segment does"
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
        # Without memory and initialisation, to look at its settings alone; a file's weights need memory to go to.
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
            f"{what} has no {listed(missing)}; zoo.transforms: give the pretrained_cfg of a model of zoo.get, or a "
            f"mapping with {listed(CFG_KEYS)}"
        )
    return dict(cfg)
