"""Memory of a training step of vision transformers over depth: stored, lean, checkpointed and reversible."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from zoo.benchmark.network_setup import Setup
from zoo.benchmark.results import Results
from zoo.config.network import parse_spec
from zoo.memory.allocations import measure_memory

VIT, REVVIT = "timm:vit_small_patch16_224", "revvit_s"
# Provider -> the network, its memory strategy and its options.
PROVIDERS = {
    "ViT-S": (VIT, "plain", {}),
    "ViT-S, zoo.lean": (VIT, "lean", {}),
    "ViT-S, checkpoint per block": (VIT, "checkpoint", {}),
    "Rev-ViT-S": (REVVIT, "auto", {}),
    "Rev-ViT-S, grid_bits=14": (REVVIT, "auto", {"grid_bits": 14}),
}


def measure_depths(results: Results, depths: Sequence[int], batch_size: int) -> None:
    """Measure the memory of each network with each number of blocks. Raises ConfigError without timm."""
    for depth in depths:
        for provider, (arch, memory, options) in PROVIDERS.items():
            print(depth, provider, file=sys.stderr, flush=True)
            torch.manual_seed(0)
            setup = _setup_of(arch, depth, batch_size, options)
            model = setup.build("standard", memory)
            found = measure_memory(setup.forward_of(model), model.parameters())
            case = replace(setup.case, subject=f"{depth} blocks")
            results.add(case, provider, "held", "MB", [found.held / 1e6])
            results.add(case, provider, "peak without gradients", "MB", [found.peak_without_gradients / 1e6])


def _setup_of(arch: str, depth: int, batch_size: int, options: dict[str, int]) -> Setup:
    """Return the setup of a network of this depth."""
    if arch == VIT:
        return Setup(parse_spec({"arch": arch, "options": {"depth": depth}}, arch), batch_size, 224)
    return Setup(parse_spec({"arch": arch, "options": options}, arch), batch_size, 224, structure=(depth,))
