"""The arguments of `zoo.get`: which values they take, and what the names of other packages are called here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from zoo.config.options import (
    MAX_CHANNELS,
    MAX_PARAMETERS,
    MAX_TOTAL_DEPTH,
    SIZES,
    is_list_of,
    is_number,
    is_whole,
)
from zoo.config.section import MAX_CLASSES, MAX_SLOPE
from zoo.errors import ConfigError, listed, nearest

PATH = (str, os.PathLike)

# argument -> what it must be, and whether a value is
VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        ("pretrained", "features_only", "signed_scale"), ("True or False", lambda value: isinstance(value, bool))
    ),
    "weights": ("the path of a weights file or a published name", lambda value: isinstance(value, PATH)),
    "norm": (
        "'standard', 'inplace', 'sync' or a function channels -> module",
        lambda value: isinstance(value, str) or callable(value),
    ),
    "activation": ("'leaky_relu', 'elu', 'identity' or 'relu'", lambda value: isinstance(value, str)),
    "activation_param": (
        f"a number from {-MAX_SLOPE:g} to {MAX_SLOPE:g}",
        lambda value: is_number(value, -MAX_SLOPE, MAX_SLOPE),
    ),
    "classes": (f"an integer from 0 to {MAX_CLASSES:,}", lambda value: is_whole(value, 0, MAX_CLASSES)),
    "in_chans": (f"a whole number from 1 to {MAX_CHANNELS}", lambda value: is_whole(value, 1, MAX_CHANNELS)),
    "out_indices": (
        "a list of positions in the list of features",
        lambda value: is_list_of(value, lambda item: type(item) is int or isinstance(item, str), 100),
    ),
    "output_stride": ("8, 16 or 32", lambda value: type(value) is int and value in (8, 16, 32)),
    "drop_rate": ("a number from 0 to 0.99", lambda value: is_number(value, 0, 0.99)),
}

# Names of arguments that timm, torchvision and others have -> what stands for them here.
_NO_SUCH = "there is no such thing here; leave it out"
OTHER_NAMES = {
    "num_classes": "it is called classes here",
    "checkpoint_path": "it is called weights here",
    "act_layer": "it is called activation here, a word: 'leaky_relu', 'elu', 'identity' or 'relu'",
    "norm_layer": "it is called norm here: 'standard', 'inplace', 'sync' or a function channels -> module",
    "in_channels": "it is called in_chans here",
    "replace_stride_with_dilation": "it is called output_stride here (or dilation, a number per module)",
    "dropout_rate": "it is called drop_rate here",
    "drop": "it is called drop_rate here",
    "zero_init_last": _NO_SUCH,
    "zero_init_residual": _NO_SUCH,
    "drop_path_rate": _NO_SUCH,
    "drop_block_rate": _NO_SUCH,
    "global_pool": (
        "the pooling is the network's own; classes=0 gives the map before it, features_only=True those of all stages"
    ),
    "pretrained_cfg": "the network gets it as an attribute, model.pretrained_cfg, which you can change there",
    "pretrained_cfg_overlay": "the network gets model.pretrained_cfg, which you can change there",
    "cache_dir": "the environment variable ZOO_CACHE names the cache",
    "progress": "downloads show a bar where there is a terminal",
    "scriptable": "TorchScript is not supported; torch.export is",
    "exportable": "every network can be exported with torch.export; leave it out",
    "stem_type": "it is called input_3x3 here, True or False",
    "img_size": "the networks take images of any size; leave it out",
}


def check_values(arguments: dict[str, Any]) -> None:
    """Raise ConfigError for an argument of the wrong kind; None stands for the default of all but the switches."""
    for name, value in arguments.items():
        wanted, accepts = VALUES[name]
        optional = name not in ("pretrained", "features_only", "signed_scale")
        if not (optional and value is None) and not accepts(value):
            raise ConfigError(f"{name} must be {wanted}, got {value!r}")


def unknown_option(option: str, arch: str, known: list[str], common: Iterable[str]) -> ConfigError:
    """Return the error for an option that the architecture does not have: what it is called here, or the nearest."""
    hint = OTHER_NAMES.get(option)
    if hint is None:
        hint = f"the nearest argument is {nearest(option, [*known, *common], 1)[0]!r}"
    return ConfigError(f"{arch} has no option {option!r}; its options are {listed(known)}; {hint}")


def dilation_for(output_stride: int, arch: str, families: Iterable[str]) -> Any:
    """Return the ``dilation`` that gives the last map of an architecture this stride."""
    if "dilation" not in families:
        raise ConfigError(
            f"output_stride: {arch} cannot be dilated, so that its stride is fixed; resnet18 to resnet152, resnext*, "
            "densenet* and wider_resnet*_a2 can"
        )
    choices = {32: False, 8: True} if arch.startswith("wider") else {32: 1, 16: [1, 1, 1, 2], 8: [1, 1, 2, 4]}
    if output_stride not in choices:
        raise ConfigError(f"output_stride: {arch} has the strides {listed(choices)} only, got {output_stride}")
    return choices[output_stride]


def check_norm_function(norm: Callable[[int], nn.Module]) -> None:
    """Raise ConfigError for a norm that has no activation: the networks have none of their own behind their norms."""
    layer = norm(64)
    if not isinstance(layer, nn.Module):
        raise ConfigError(f"norm must return a module for a number of channels, got {type(layer).__name__} for 64")
    if isinstance(layer, (_NormBase, nn.GroupNorm, nn.LayerNorm)) and not hasattr(layer, "activation"):
        raise ConfigError(
            f"norm: {type(layer).__name__} has no activation, and the networks take norm and activation from one "
            "module; give norm='standard', or a function as lambda channels: "
            f"nn.Sequential(nn.{type(layer).__name__}(channels), nn.ReLU()). resnet18 to resnet152, which activate "
            "behind the sum, need a module with the attributes activation and activation_param, as zoo.layers.ABN has"
        )


def depth_of(options: Mapping[str, Any]) -> int:
    """Return the number of blocks or layers that a network's options set, each of which has weights; 0 if none do."""
    return int(sum(options.get("blocks", options.get("layers", ()))) * options.get("units", 1))


def check_size(
    arch: str, options: Mapping[str, Any], defaults: Mapping[str, Any], build: Callable[[], nn.Module]
) -> None:
    """Raise ConfigError for sizes among ``options`` that are each possible, but too much together.

    The parameters of what ``build`` returns are counted on the meta device, where nothing is allocated; the depth is
    looked at before, as even there a network of a million blocks is built for hours. ``defaults``: those of all options
    of the architecture. Without a size among the options nothing is built.
    """
    if options.keys().isdisjoint(SIZES):
        return
    depth = depth_of({**defaults, **options})
    if depth > MAX_TOTAL_DEPTH:
        raise ConfigError(
            f"{arch} would have {depth:,} layers or blocks, more than {MAX_TOTAL_DEPTH:,}, with the options "
            f"{dict(options)}; make them smaller"
        )
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in build().parameters())
    if num_parameters > MAX_PARAMETERS:
        raise ConfigError(
            f"{arch} would have {num_parameters:,} parameters, more than {MAX_PARAMETERS:,}, with the options "
            f"{dict(options)}; make them smaller"
        )
