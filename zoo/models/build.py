"""Builds the network of a `NetworkSpec`: the one place where a description becomes a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zoo.architectures import LEAN, SIZES, Architecture, architecture
from zoo.errors import ConfigError
from zoo.layers.init import init_weights
from zoo.layers.norm import InPlaceABN, NormFactory, norm_act
from zoo.limits import MAX_PARAMETERS, MAX_TOTAL_DEPTH
from zoo.models.base import Network
from zoo.models.deeplab import HEAD_DILATIONS, DeepLab
from zoo.models.densenet import DenseNet
from zoo.models.external import build_external
from zoo.models.irevnet import IRevNet
from zoo.models.preact import PreactResNet
from zoo.models.resnet import ResNet
from zoo.models.resnext import ResNeXt
from zoo.models.revnet import RevNet
from zoo.models.revnext import FlatRevNeXt, RevNeXt
from zoo.models.revnext_baselines import RevNeXtBaseline, TwoBranchIRevNet
from zoo.models.wider_resnet import WiderResNet, WiderResNetA2
from zoo.remat.lean import lean
from zoo.spec import NetworkSpec
from zoo.torch_internals import NormBase


def _deeplab(
    norm: NormFactory,
    classes: int,
    *,
    body: str,
    features_only: bool,
    output_stride: int | None,
    dilation: Any,
    head_dilations: Sequence[int] | None,
    pooling_size: int | Sequence[int] | None,
    **of_body: Any,
) -> DeepLab:
    """Return DeepLabV3 on the architecture ``body``, with the options ``of_body``.

    The body is dilated for ``output_stride``, by default 8, or as ``dilation`` says. Raises ConfigError for both, for a
    dilation that gives another stride than 8 or 16, and for features.
    """
    record = architecture(body)
    if features_only:
        raise ConfigError(
            "features_only: DeepLab makes logits of one map, and has no list of features; take those of its body: "
            f"zoo.get({body!r}, features_only=True, output_stride={output_stride or 8})"
        )
    if dilation is None:
        dilation = record.dilations[output_stride or 8]
    elif output_stride is not None:
        raise ConfigError("output_stride and dilation say the same; give one")
    network = FAMILIES[record.family](
        norm, 0, **record.structure, **{**record.options, **of_body, "dilation": dilation}
    )
    stride = network.feature_info.reduction()[-1]
    if stride not in HEAD_DILATIONS:
        raise ConfigError(
            f"dilation = {dilation!r}: makes the map of {body} {stride} times smaller than the image, and the head "
            "needs 8 or 16; give output_stride instead"
        )
    return DeepLab(
        norm,
        classes,
        body=network,
        head_dilations=head_dilations or HEAD_DILATIONS[stride],
        pooling_size=pooling_size,
    )


# The class of each family: (norm, classes, *, features_only, **structure and options) -> network.
FAMILIES: dict[str, Callable[..., Network]] = {
    "resnet": ResNet,
    "resnext": ResNeXt,
    "wider_resnet": WiderResNet,
    "wider_resnet_a2": WiderResNetA2,
    "densenet": DenseNet,
    "preact": PreactResNet,
    "revnet": RevNet,
    "irevnet": IRevNet,
    "irevnet_two_branch": TwoBranchIRevNet,
    "revnext": RevNeXt,
    "revnext_flat": FlatRevNeXt,
    "revnext_baseline": RevNeXtBaseline,
    "deeplab": _deeplab,
}


def build_network(
    spec: NetworkSpec,
    norm: NormFactory | None = None,
    *,
    features_only: bool = False,
    structure: Sequence[int] | None = None,
) -> Network:
    """Return the network of a spec; its convolutions and classifier have no values yet (`initialize` sets them).

    Under ``torch.device("meta")`` nothing is allocated.

    Args:
    - `norm`: function channels -> norm with its activation, in place of that of the spec.
    - `features_only`: leave the classifier out; forward returns the list of the stages' outputs.
    - `structure`: blocks per stage in place of the architecture's own, as many numbers as it has.

    Raises ConfigError for an unknown architecture, and for options that are valid one by one but not together.
    """
    arch = architecture(spec.arch)
    memory = "auto" if spec.memory == LEAN else spec.memory
    arguments = {**arch.structure, **arch.options, **spec.options, "memory": memory}
    if structure is not None:
        arguments["structure"] = _checked_structure(arch, structure)
    factory = norm or norm_act(spec.norm, spec.activation, spec.activation_param)

    def build(factory: NormFactory) -> Network:
        return FAMILIES[arch.family](factory, spec.num_classes, features_only=features_only, **arguments)

    try:
        _check_size(arch, spec.options, build)
        network = build(factory)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{spec.arch}: {error}") from error
    return lean(network) if spec.memory == LEAN else network


def build_model(spec: NetworkSpec) -> nn.Module:
    """Return the network of a spec: without values, or initialized by its package if it is external.

    Raises ConfigError as `build_network` and `build_external` do.
    """
    if spec.is_external:
        return build_external(spec.arch, num_classes=spec.num_classes, memory=spec.memory, **spec.options)
    return build_network(spec)


def build_on_meta(spec: NetworkSpec) -> nn.Module:
    """Return the network of a spec on the meta device.

    Nothing of its size is allocated, except for external networks whose builders compute with values. Raises
    ConfigError as `build_model` does.
    """
    try:
        with torch.device("meta"):
            return build_model(spec)
    except ConfigError:
        if not spec.is_external:
            raise
        return build_model(spec).to("meta")


def initialize(model: nn.Module, spec: NetworkSpec) -> None:
    """Set the initial weights of a network of this package as its spec says; nothing on the meta device."""
    if not next(model.parameters()).is_meta:
        gain, slope = spec.weight_gain_multiplier, spec.activation_param
        init_weights(model, spec.weight_init, gain, spec.activation, slope)


def norm_kind(norm: NormFactory) -> str:
    """Return "inplace" or "standard", whichever a function channels -> norm builds.

    Raises ConfigError for a norm without an activation: the networks have none of their own behind their norms.
    """
    layer = norm(64)
    if not isinstance(layer, nn.Module):
        raise ConfigError(f"norm must return a module for a number of channels, got {type(layer).__name__} for 64")
    if isinstance(layer, (NormBase, nn.GroupNorm, nn.LayerNorm)) and not hasattr(layer, "activation"):
        raise ConfigError(
            f"norm: {type(layer).__name__} has no activation, and the networks take norm and activation from one "
            "module; give norm='standard', or a function such as lambda channels: "
            f"nn.Sequential(nn.{type(layer).__name__}(channels), nn.ReLU()). resnet18 to resnet152, which activate "
            "behind the sum, need a module with the attributes activation and activation_param, as zoo.layers.ABN has"
        )
    return "inplace" if isinstance(layer, InPlaceABN) else "standard"


def depth_of(record: Architecture, options: Mapping[str, Any]) -> int:
    """Return the number of blocks or layers, all with weights, that the options ask for; 0 if no option sets it."""
    options = {**record.options, **options}
    return int(sum(options.get("blocks", options.get("layers", ()))) * options.get("units", 1))


def _checked_structure(record: Architecture, structure: Sequence[int]) -> Sequence[int]:
    if "structure" not in record.structure:
        raise ConfigError(f"{record.name} has no structure of blocks per stage to change")
    num_stages = len(record.structure["structure"])
    if len(structure) != num_stages:
        raise ConfigError(f"{record.name} has {num_stages} stages, the structure {structure} is of other length")
    return structure


def _check_size(record: Architecture, options: Mapping[str, Any], build: Callable[[NormFactory], nn.Module]) -> None:
    """Raise ConfigError for sizes among ``options`` that are allowed one by one, but too large together.

    The parameters of what ``build`` returns are counted on the meta device, where nothing is allocated; the depth is
    checked first, because building a network of a million blocks takes hours even there. If no option sets a size,
    nothing is built.
    """
    if options.keys().isdisjoint(SIZES):
        return
    depth = depth_of(record, options)
    if depth > MAX_TOTAL_DEPTH:
        raise ConfigError(
            f"{record.name} would have {depth:,} layers or blocks, more than {MAX_TOTAL_DEPTH:,}, with the options "
            f"{dict(options)}; make them smaller"
        )
    try:
        with torch.device("meta"):
            num_parameters = sum(parameter.numel() for parameter in build(norm_act("standard")).parameters())
    except (TypeError, OverflowError, RuntimeError) as error:  # torch's, of sizes that no tensor can have
        raise ConfigError(f"{record.name} cannot be built with the options {dict(options)} ({error})") from error
    if num_parameters > MAX_PARAMETERS:
        raise ConfigError(
            f"{record.name} would have {num_parameters:,} parameters, more than {MAX_PARAMETERS:,}, with the options "
            f"{dict(options)}; make them smaller"
        )
