"""Converts weights between torchvision's ResNets and this package's: the same tensors under other names."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from zoo.config.architectures import ARCHITECTURES
from zoo.config.network import NetworkSpec
from zoo.convert._conversion import ConversionReport, StateDict, source_spec
from zoo.errors import ConfigError, ConversionError, join_names
from zoo.models.build import build_on_meta
from zoo.weights._load import COUNTER, MAX_KEYS, check_fits

TORCHVISION_LAYERS = {"proj_conv": "downsample.0", "proj_bn": "downsample.1"}


def from_torchvision(
    state_dict: StateDict, spec: str | NetworkSpec
) -> tuple[dict[str, Tensor], NetworkSpec, ConversionReport]:
    """Rename the tensors of a torchvision ResNet to this package's names. Exact.

    ``spec`` is the network in this package, with relu and standard norms; a name means this network. Missing batch
    counters, as in torchvision's oldest files, become 0.

    Raises ConversionError with all missing and unknown keys, and WeightsError for wrong shapes.
    """
    return _convert(state_dict, spec, "from-torchvision")


def to_torchvision(state_dict: StateDict, spec: str | NetworkSpec) -> tuple[dict[str, Tensor], None, ConversionReport]:
    """Rename the tensors of a ResNet with relu and standard norms to torchvision's names. Exact.

    The result belongs to a network of torchvision and has no spec. Raises ConversionError with all missing and unknown
    keys, and WeightsError for wrong shapes.
    """
    converted, _, report = _convert(state_dict, spec, "to-torchvision")
    return converted, None, report


def torchvision_key(key: str) -> str:
    """Return torchvision's name of a tensor of a ResNet: mod2.block1.convs.bn1.weight -> layer1.0.bn1.weight."""
    if match := re.fullmatch(r"mod(\d)\.block(\d+)\.(?:convs\.)?(\w+)\.(\w+)", key):
        module, block, layer, leaf = match.groups()
        return f"layer{int(module) - 1}.{int(block) - 1}.{TORCHVISION_LAYERS.get(layer, layer)}.{leaf}"
    return key.removeprefix("mod1.").removeprefix("classifier.")


def _convert(
    state_dict: StateDict, network: str | NetworkSpec, conversion: str
) -> tuple[dict[str, Tensor], NetworkSpec, ConversionReport]:
    """Return the renamed tensors, the spec of the network in this package, and the report."""
    spec = source_spec(state_dict, network, conversion)
    arch, known = spec.arch, [name for name, each in ARCHITECTURES.items() if each.family == "resnet"]
    if arch not in known:
        raise ConfigError(f"{arch!r} is not a network that torchvision also has; those are {', '.join(known)}")
    plain = NetworkSpec(arch=arch, activation="relu", num_classes=1)
    names = {torchvision_key(key): key for key in build_on_meta(plain).state_dict()}
    if conversion == "to-torchvision":
        names = {key: other for other, key in names.items()}
    _check_keys(state_dict, names, arch)
    converted = {
        new: state_dict[old].detach().clone() if old in state_dict else torch.tensor(0) for old, new in names.items()
    }
    own_weights = converted if conversion == "from-torchvision" else state_dict
    check_fits(build_on_meta(plain.changed(num_classes=spec.num_classes)), own_weights, source=f"the weights of {arch}")
    layers = tuple(dict.fromkeys(key.rpartition(".")[0] for key in converted))
    reason = "the tensors are the same by other names; the activation is relu"
    return converted, spec, ConversionReport(conversion, arch, layers, True, reason)


def _check_keys(state_dict: StateDict, known: Iterable[str], arch: str) -> None:
    differences = {
        "missing": [key for key in known if key not in state_dict and not key.endswith(COUNTER)],
        "unknown": [key for key in state_dict if key not in set(known)],
    }
    if any(differences.values()):
        parts = [f"{what} ({len(keys)}): {join_names(keys, MAX_KEYS)}" for what, keys in differences.items() if keys]
        raise ConversionError(f"this is no state dict of {arch}: {'; '.join(parts)}; give the file of {arch}")
