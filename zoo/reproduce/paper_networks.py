"""Networks of the papers, built for measurements, and the loss of one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.config.network import NetworkSpec
from zoo.layers.init import init_weights
from zoo.memory.allocations import count_memory
from zoo.models import build_network


def build_for_training(name: str, device: str = "cpu", **settings: Any) -> nn.Module:
    """Build the initialized network in training mode. On the meta device nothing is computed.

    ``settings`` default to those of the RevNet paper: standard norms with ReLU.
    """
    defaults = {"norm": "standard", "activation": "relu", "weight_init": "truncated_normal"}
    spec = NetworkSpec(arch=name).changed(**{**defaults, **settings})
    with torch.device(device):
        model = build_network(spec)
        init_weights(model, spec.weight_init)
    return model.train()


def build_revnext(name: str, slope: float = 0.2, **settings: Any) -> nn.Module:
    """Build an initialized network of Hascoet et al. 2023 in training mode. ``slope`` is that of the leaky ReLUs."""
    return build_for_training(name, activation="leaky_relu", activation_param=slope, weight_init="torch", **settings)


def count_parameters(model: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def held_bytes(name: str, batch: int, size: int, **options: Any) -> int:
    """Return the bytes that a network holds between forward and backward, counted on the meta device.

    ``options``: see `build_for_training`.
    """
    model = build_for_training(name, "meta", **options)
    return count_memory(forward_of(model, batch, size), model.parameters()).held


def forward_of(model: nn.Module, batch: int, size: int) -> Callable[[], Tensor]:
    """Return a function that computes the loss of fixed random images."""
    device = next(model.parameters()).device
    images = torch.randn(batch, 3, size, size, device=device)
    classes = torch.zeros(batch, dtype=torch.long, device=device)
    return lambda: F.cross_entropy(model(images), classes)
