"""Sizes of architectures, measured on the meta device. The index stores the sizes of bundled architectures."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import nn

from zoo.config.network import parse_spec
from zoo.models.build import build_on_meta


def measure_sizes(name: str, **options: Any) -> dict[str, Any]:
    """Return the sizes of an architecture in the form of `zoo.config.architectures.network_sizes`."""
    model: Any = build_on_meta(parse_spec({"arch": name, "options": options}, name))
    parameters = count_parameters(model)
    return {
        "parameters": parameters,
        "headless": parameters - count_parameters(model.get_classifier()),
        "entries": len(model.state_dict()),
        "keys_sha256": hash_keys(model),
        "norms": sum(name.endswith("running_mean") for name, _ in model.named_buffers()),
        "stages": [list(stage.values()) for stage in model.feature_info.get_dicts()],
    }


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def hash_keys(model: nn.Module) -> str:
    """Return the SHA-256 of the keys and shapes of the state dict."""
    lines = [f"{key} {tuple(value.shape)}" for key, value in model.state_dict().items()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
