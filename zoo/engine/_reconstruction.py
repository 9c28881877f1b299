"""Effects of reconstruction: errors of reconstructed activations, and the angle between gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zoo.ops.recomputation import restore_buffers, restore_generators


def reconstructs(model: nn.Module) -> bool:
    """Return whether backward of ``model`` reconstructs activations."""
    return not all(chain.store for chain in _chains(model).values())


def _chains(model: nn.Module) -> dict[str, Any]:
    """Return the chains of reversible blocks or invertible layers in ``model`` by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "meter")}


@contextmanager
def reconstruction_errors(model: nn.Module) -> Iterator[dict[str, float]]:
    """Yields a dict that backward fills with the relative error of each block's reconstructed input.

    Keys are "chain/index": the name of the reversible chain in ``model`` and the index of the block; "index" alone if
    ``model`` is the chain. Chains that store activations report nothing. Within the block, backward uses the memory of
    stored activations, to compare with them, and synchronizes with the device.
    """
    errors: dict[str, float] = {}
    chains = _chains(model)
    # A chain may report the parts of a block from the last to the first. The first part is reported last and
    # overwrites the others; its input is the input of the block.
    for name, chain in chains.items():
        prefix = f"{name}/" if name else ""
        chain.meter = lambda index, error, prefix=prefix: errors.__setitem__(f"{prefix}{index}", error)
    try:
        yield errors
    finally:
        for chain in chains.values():
            chain.meter = None


def gradients(model: nn.Module, losses: Callable[[], Iterable[Tensor]], *, store: bool) -> list[Tensor]:
    """Return the gradient of the sum of ``losses`` with respect to each trained parameter; ``model`` is unchanged.

    Restores running statistics and random generators. With ``store`` the reversible chains store activations, otherwise
    they behave as in training. ``losses`` runs the model and yields losses, each with its own graph.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    chains = _chains(model).values()
    stores = [chain.store for chain in chains]
    total: list[Tensor] = []
    try:
        with restore_buffers(model), restore_generators(model):
            for chain in chains:
                chain.store = chain.store or store
            for loss in losses():
                own = torch.autograd.grad(loss, parameters, materialize_grads=True)
                total = [a + b for a, b in zip(total, own, strict=True)] if total else list(own)
    finally:
        for chain, stored in zip(chains, stores, strict=True):
            chain.store = stored
    return total


def angle_between(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Return the angle in degrees between two vectors, each given as a list of tensors; NaN if one is 0 or not finite.

    Computes 2 arcsin(|u - v| / 2) of the unit vectors in float64, which is accurate for small angles too.
    """
    pairs = [(u.detach().cpu().double(), v.detach().cpu().double()) for u, v in zip(first, second, strict=True)]
    u_norm, v_norm = (
        math.sqrt(sum(float(part.square().sum()) for part in parts)) for parts in zip(*pairs, strict=True)
    )
    if not 0 < u_norm * v_norm < math.inf:
        return math.nan
    distance = math.sqrt(sum(float((u / u_norm - v / v_norm).square().sum()) for u, v in pairs))
    return math.degrees(2 * math.asin(min(1.0, distance / 2)))
