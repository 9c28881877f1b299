"""Networks with scales of both signs and random statistics, for tests of conversions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import zoo
from zoo.config.network import NetworkSpec

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def scramble(model: nn.Module, seed: int = 0, positive: tuple[str, ...] | bool = False) -> nn.Module:
    """Give every norm random weights and statistics. ``positive``: all scales, or those of the named norms, are > 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, norm in model.named_modules():
        if getattr(norm, "running_mean", None) is None:
            continue
        with torch.no_grad():
            for tensor in (norm.weight, norm.bias, norm.running_mean):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
            norm.running_var.copy_(torch.rand(norm.running_var.shape, generator=generator) + 0.5)
            norm.weight.add_(norm.weight.sign() * 0.3)
            if positive is True or (positive and name in positive):
                norm.weight.abs_()
    return model


def spec_of(arch: str, **settings: Any) -> NetworkSpec:
    """Return the spec of a network; settings and options are passed by their own names."""
    return NetworkSpec(arch=arch).changed(**settings)


def scrambled(arch: str, positive: tuple[str, ...] | bool = False, **options: Any) -> dict[str, Tensor]:
    """Return the float64 state dict of a network with 10 classes."""
    torch.manual_seed(0)
    return scramble(zoo.get(arch, num_classes=10, **options), positive=positive).double().state_dict()


def outputs(state_dict: dict[str, Tensor], arch: str, **options: Any) -> Tensor:
    """Return the float64 outputs of ``zoo.get(arch)`` with 10 classes and these weights, in evaluation mode."""
    with torch.device("meta"):
        model = zoo.get(arch, num_classes=10, **options).double()
    model = model.to_empty(device="cpu").eval()
    model.load_state_dict(state_dict)
    with torch.no_grad():
        return model(IMAGES.clone())
