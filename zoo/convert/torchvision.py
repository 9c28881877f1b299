"""Converts weights between torchvision's ResNets and this package's, which name the same tensors differently."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zoo.architectures import ARCHITECTURES
from zoo.convert.conversion import ConversionReport, StateDict, build_with_weights, compare_outputs
from zoo.errors import ConfigError, ConversionError, listed
from zoo.layers.norm import norm_act
from zoo.models import build_network
from zoo.weights.load import COUNTER, MAX_KEYS, torchvision_arch

RENAMED = {"proj_conv": "downsample.0", "proj_bn": "downsample.1"}


def from_torchvision(
    state_dict: StateDict, arch: str, *, compare_with_source: bool = True, images: Tensor | None = None
) -> tuple[dict[str, Tensor], ConversionReport]:
    """Return the state dict of torchvision's ResNet ``arch`` under this package's names; exact.

    The network is zoo.get(arch, activation="relu"). Batch counters, which torchvision's oldest files lack, become 0.
    Raises ConversionError that names every missing and unknown key, and WeightsError for other shapes.
    """
    return _convert(state_dict, arch, "from-torchvision", compare_with_source, images)


def to_torchvision(
    state_dict: StateDict, arch: str, *, compare_with_source: bool = True, images: Tensor | None = None
) -> tuple[dict[str, Tensor], ConversionReport]:
    """Return the state dict of the relu ResNet ``arch`` with standard norms under torchvision's names; exact.

    Raises ConversionError that names every missing and unknown key, and WeightsError for other shapes.
    """
    return _convert(state_dict, arch, "to-torchvision", compare_with_source, images)


def torchvision_key(key: str) -> str:
    """Return torchvision's name of a tensor of a ResNet: mod2.block1.convs.bn1.weight -> layer1.0.bn1.weight."""
    if match := re.fullmatch(r"mod(\d)\.block(\d+)\.(?:convs\.)?(\w+)\.(\w+)", key):
        module, block, layer, leaf = match.groups()
        return f"layer{int(module) - 1}.{int(block) - 1}.{RENAMED.get(layer, layer)}.{leaf}"
    return key.removeprefix("mod1.").removeprefix("classifier.")


def _convert(
    state_dict: StateDict, arch: str, conversion: str, compare_with_source: bool, images: Tensor | None
) -> tuple[dict[str, Tensor], ConversionReport]:
    known = [name for name, record in ARCHITECTURES.items() if record.family == "resnet"]
    if arch not in known:
        raise ConfigError(f"{arch!r} is no network that torchvision has too; those are {', '.join(known)}")
    with torch.device("meta"):
        own_keys = build_network(arch, norm_act("standard", "relu"), classes=1).state_dict()
    names = {torchvision_key(key): key for key in own_keys}
    if conversion == "to-torchvision":
        names = {key: other for other, key in names.items()}
    _check_keys(state_dict, names, arch)
    converted = {
        new: state_dict[old].detach().clone() if old in state_dict else torch.tensor(0) for old, new in names.items()
    }
    zoo_weights = converted if conversion == "from-torchvision" else state_dict
    model = build_with_weights(zoo_weights, arch, activation="relu")  # checks the shapes
    measured: dict[str, Any] = {}
    if compare_with_source:
        other = _torchvision_network(arch, state_dict if zoo_weights is converted else converted)
        measured = compare_outputs(other, model, images, exact_for=state_dict)
    layers = tuple(dict.fromkeys(key.rpartition(".")[0] for key in converted))
    reason = "the tensors are the same under other names; the activation is relu"
    return converted, ConversionReport(conversion, arch, layers, True, reason, **measured)


def _check_keys(state_dict: StateDict, known: Iterable[str], arch: str) -> None:
    differences = {
        "missing": [key for key in known if key not in state_dict and not key.endswith(COUNTER)],
        "unknown": [key for key in state_dict if key not in set(known)],
    }
    if any(differences.values()):
        parts = [f"{what} ({len(keys)}): {listed(keys, MAX_KEYS)}" for what, keys in differences.items() if keys]
        other_arch = torchvision_arch(state_dict)
        advice = f"it is torchvision's {other_arch}" if other_arch not in (None, arch) else f"give the file of {arch}"
        raise ConversionError(f"the state dict is not that of {arch}: {'; '.join(parts)}; {advice}")


def _torchvision_network(arch: str, state_dict: StateDict) -> nn.Module:
    from torchvision import models

    with torch.device("meta"):
        model: nn.Module = getattr(models, arch)(num_classes=len(state_dict["fc.bias"]))
    model = model.double().to_empty(device="cpu").eval()
    counters = {key: torch.tensor(0) for key in model.state_dict() if key.endswith(COUNTER)}
    model.load_state_dict({**counters, **state_dict})
    return model
