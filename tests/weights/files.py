"""Weights files that describe their network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def save_described(model: Any, path: Path, **changes: Any) -> Path:
    """Write the weights of a network with its description; ``changes`` replace keys of the description."""
    network = {**model.built_as.model_dump(mode="json"), **changes}
    torch.save({"state_dict": model.state_dict(), "network": network}, path)
    return path
