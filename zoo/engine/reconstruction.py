"""How exactly reversible chains reconstruct their activations during a training step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from zoo.errors import ConfigError


def check_meter(model: nn.Module, every_steps: int) -> None:
    """Raise ConfigError if ``model`` shall be metered every so many steps (0: never) but reconstructs nothing."""
    if every_steps and not any(hasattr(module, "meter") and not module.store for module in model.modules()):
        raise ConfigError(
            f"training.reconstruction_meter = {every_steps}: this network reconstructs no activations; remove the key, "
            'or use a revnet*, irevnet* or revnext* with network.memory "auto"'
        )


@contextmanager
def reconstruction_errors(model: nn.Module) -> Iterator[dict[str, float]]:
    """Fill the dictionary that it yields with the relative error of each block's reconstructed input.

    Keys are ``chain/index of the block``, the chain by its name in ``model`` (no ``chain/`` if it is the model). Chains
    that store their activations have nothing to report. The backward passes inside take the memory of stored
    activations, and wait for the device.
    """
    errors: dict[str, float] = {}
    chains: dict[str, Any] = {name: module for name, module in model.named_modules() if hasattr(module, "meter")}
    for name, chain in chains.items():
        chain.meter = partial(_note, errors, f"{name}/" if name else "")
    try:
        yield errors
    finally:
        for chain in chains.values():
            chain.meter = None


# A chain may report a block in several parts, from the last to the first: what is left is the block's own input.
def _note(errors: dict[str, float], prefix: str, index: int, error: float) -> None:
    errors[f"{prefix}{index}"] = error
