"""The arguments of `zoo.get` beside the options of architectures: which values they take."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import nn

from zoo.architectures import Architecture
from zoo.errors import ConfigError, listed
from zoo.limits import MAX_CHANNELS, MAX_CLASSES, MAX_SLOPE, is_list_of, is_number, is_whole
from zoo.torch_internals import NormBase

PATH = (str, os.PathLike)

# argument -> what it must be, and whether a value is
VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        ("pretrained", "features_only", "signed_scale"), ("True or False", lambda value: isinstance(value, bool))
    ),
    **dict.fromkeys(
        ("weights", "body_weights"),
        ("the path of a weights file or a published name", lambda value: isinstance(value, PATH)),
    ),
    "norm": (
        "'standard', 'inplace', 'sync' or a function channels -> module",
        lambda value: isinstance(value, str) or callable(value),
    ),
    "activation": ("'leaky_relu', 'elu', 'identity' or 'relu'", lambda value: isinstance(value, str)),
    "activation_param": (
        f"a number from {-MAX_SLOPE:g} to {MAX_SLOPE:g}",
        lambda value: is_number(value, -MAX_SLOPE, MAX_SLOPE),
    ),
    "num_classes": (f"an integer from 0 to {MAX_CLASSES:,}", lambda value: is_whole(value, 0, MAX_CLASSES)),
    "in_chans": (f"a whole number from 1 to {MAX_CHANNELS}", lambda value: is_whole(value, 1, MAX_CHANNELS)),
    "out_indices": (
        "a list of positions in the list of features",
        lambda value: is_list_of(value, lambda item: type(item) is int or isinstance(item, str), 100),
    ),
    "output_stride": ("8, 16 or 32", lambda value: type(value) is int and value in (8, 16, 32)),
    "drop_rate": ("a number from 0 to 0.99", lambda value: is_number(value, 0, 0.99)),
}


def check_values(arguments: dict[str, Any]) -> None:
    """Raise ConfigError for an argument of the wrong kind; None stands for the default of all but the switches."""
    for name, value in arguments.items():
        wanted, accepts = VALUES[name]
        optional = name not in ("pretrained", "features_only", "signed_scale")
        if not (optional and value is None) and not accepts(value):
            raise ConfigError(f"{name} must be {wanted}, got {value!r}")


def stride_option(output_stride: int, record: Architecture) -> dict[str, Any]:
    """Return the option, ``dilation`` or an ``output_stride`` of its own, that gives the last map this stride."""
    if "output_stride" in record.options:
        return {"output_stride": output_stride}
    if not record.dilations:
        raise ConfigError(
            f"output_stride: {record.name} cannot be dilated, so that its stride is fixed; resnet18 to resnet152, "
            "resnext*, densenet* and wider_resnet*_a2 can"
        )
    if output_stride not in record.dilations:
        raise ConfigError(
            f"output_stride: {record.name} has the strides {listed(record.dilations)} only, got {output_stride}"
        )
    return {"dilation": record.dilations[output_stride]}


def check_norm_function(norm: Callable[[int], nn.Module]) -> None:
    """Raise ConfigError for a norm that has no activation: the networks have none of their own behind their norms."""
    layer = norm(64)
    if not isinstance(layer, nn.Module):
        raise ConfigError(f"norm must return a module for a number of channels, got {type(layer).__name__} for 64")
    if isinstance(layer, (NormBase, nn.GroupNorm, nn.LayerNorm)) and not hasattr(layer, "activation"):
        raise ConfigError(
            f"norm: {type(layer).__name__} has no activation, and the networks take norm and activation from one "
            "module; give norm='standard', or a function as lambda channels: "
            f"nn.Sequential(nn.{type(layer).__name__}(channels), nn.ReLU()). resnet18 to resnet152, which activate "
            "behind the sum, need a module with the attributes activation and activation_param, as zoo.layers.ABN has"
        )
