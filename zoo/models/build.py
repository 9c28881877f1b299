"""Builds networks from their `NetworkSpec`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zoo.config.architectures import LEAN, Architecture, architecture
from zoo.config.network import ExternalSpec, NetworkSpec, Spec
from zoo.errors import ConfigError
from zoo.layers.norm import InPlaceABN, NormFactory, norm_act
from zoo.models.base import Network
from zoo.models.external import build_external
from zoo.models.family import build_architecture
from zoo.remat._lean import lean
from zoo.torch_internals.data import NormBase


def build_network(
    spec: Spec,
    norm: NormFactory | None = None,
    *,
    features_only: bool = False,
    structure: Sequence[int] | None = None,
) -> Network:
    """Build the network of a spec with uninitialized convolutions and classifier; `initialize` initializes them.

    Args:
    - `norm`: function channels -> norm with its activation. Replaces the norm of the spec; only for networks whose
      norms a spec chooses.
    - `features_only`: omit the classifier; forward returns the list of the stages' outputs.
    - `structure`: numbers of blocks per stage. Replaces the architecture's numbers and has the same length.

    Raises ConfigError for an unknown architecture, and for options that are invalid in combination.
    """
    arch = architecture(spec.arch)
    memory = arch.made_lean if spec.memory == LEAN else spec.memory
    arguments = arch.options(**spec.options).model_dump()
    drop_path_rate = arguments.pop("drop_path_rate", 0.0)
    if structure is not None:
        arguments["structure"] = _checked_structure(arch, structure)
    if isinstance(spec, NetworkSpec):
        norm = norm or norm_act(spec.norm, spec.activation, spec.activation_param)
    elif norm is not None:
        raise ConfigError(f"{arch.name} has its own norms", "norm", "omit the argument")

    try:
        network = build_architecture(
            arch.name, norm, spec.num_classes, features_only=features_only, memory=memory, **arguments
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{spec.arch}: {error}") from error
    if drop_path_rate:
        network.set_drop_path_rate(drop_path_rate)
    return lean(network) if spec.memory == LEAN else network


def build_model(spec: Spec) -> nn.Module:
    """Build the network of a spec: uninitialized, or if external, initialized by its package.

    Raises the errors of `build_network` and `build_external`, with the key of the ``network`` section.
    """
    try:
        if isinstance(spec, ExternalSpec):
            return build_external(spec.arch, num_classes=spec.num_classes, memory=spec.memory, **spec.options)
        return build_network(spec)
    except ConfigError as error:
        raise ConfigError(f"network.arch {spec.arch!r}: {error}") from error


def build_on_meta(spec: Spec) -> nn.Module:
    """Build the network of a spec on the meta device, without pretrained weights.

    Allocates no memory, except for external networks whose builders compute with values. Raises ConfigError like
    `build_model`.
    """
    spec = spec.without_pretrained()
    try:
        with torch.device("meta"):
            return build_model(spec)
    except ConfigError:
        if not isinstance(spec, ExternalSpec):
            raise
        return build_model(spec).to("meta")


def initialize(model: Network, spec: Spec) -> None:
    """Initialize the weights of a network of this package as ``spec`` specifies. Does nothing on the meta device."""
    if not next(model.parameters()).is_meta:
        model.initialize(spec)


def norm_kind(norm: NormFactory) -> str:
    """Return the kind of norm, "inplace" or "standard", that a function channels -> norm builds.

    Raises ConfigError for a norm without activation, because networks do not apply activations after norms.
    """
    layer = norm(64)
    if not isinstance(layer, nn.Module):
        raise ConfigError(f"norm must return a module for a number of channels, got {type(layer).__name__} for 64")
    if isinstance(layer, (NormBase, nn.GroupNorm, nn.LayerNorm)) and not hasattr(layer, "activation"):
        raise ConfigError(
            f"norm: {type(layer).__name__} has no activation, but networks expect norm and activation in one module; "
            "pass norm='standard', or a function such as lambda channels: "
            f"nn.Sequential(nn.{type(layer).__name__}(channels), nn.ReLU()). resnet18 to resnet152, which activate "
            "after the sum, need a module with the attributes activation and activation_param, as zoo.layers.ABN has"
        )
    return "inplace" if isinstance(layer, InPlaceABN) else "standard"


def depth_of(arch: Architecture, options: Mapping[str, Any]) -> int:
    """Return the number of blocks or layers with weights that the options set; 0 if no option sets it."""
    options = {**arch.options().model_dump(), **options}
    return int(sum(options.get("blocks", options.get("layers", ()))) * options.get("units", 1))


def _checked_structure(arch: Architecture, structure: Sequence[int]) -> Sequence[int]:
    if "structure" not in arch.structure:
        raise ConfigError(f"{arch.name} has no structure (blocks per stage) to change")
    num_stages = len(arch.structure["structure"])
    if len(structure) != num_stages:
        raise ConfigError(f"{arch.name} has {num_stages} stages, but the structure {structure} has {len(structure)}")
    return structure
