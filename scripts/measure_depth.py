"""Memory of a training step of vision transformers against their depth: stored, lean, checkpointed and reversible.

pip install timm
python scripts/measure_depth.py --out docs/results/depth
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import torch

import zoo
from zoo.benchmark.network_setup import Setup
from zoo.benchmark.results import Results
from zoo.config.network import NetworkSpec

VIT, REVVIT = "timm:vit_small_patch16_224", "revvit_s"
# Provider -> the network, its memory strategy and its options.
PROVIDERS = {
    "ViT-S": (VIT, "plain", {}),
    "ViT-S, zoo.lean": (VIT, "lean", {}),
    "ViT-S, checkpoint per block": (VIT, "checkpoint", {}),
    "Rev-ViT-S": (REVVIT, "auto", {}),
    "Rev-ViT-S, grid_bits=14": (REVVIT, "auto", {"grid_bits": 14}),
}


def setup_of(arch: str, depth: int, batch: int, options: dict[str, int]) -> Setup:
    """Return a network of this depth and its images."""
    if arch == VIT:
        return Setup(NetworkSpec(arch=arch, options={"depth": depth}), batch, 224)
    return Setup(NetworkSpec(arch=arch, options=options), batch, 224, structure=(depth,))


def main(argv: list[str] | None = None) -> int:
    """Measure the networks and write OUT.json and OUT.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", nargs="*", type=int, default=[6, 12, 24, 48], metavar="N", help="numbers of blocks")
    parser.add_argument("--batch", type=int, default=2, help="images per step")
    parser.add_argument("--out", type=Path, default=Path("depth"), help="path of the result files, without ending")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    command = shlex.join(["python", "scripts/measure_depth.py", *(sys.argv[1:] if argv is None else argv)])
    results = Results("depth", command, torch.device("cpu"), {"threads": 1})
    for depth in args.depths:
        for provider, (arch, memory, options) in PROVIDERS.items():
            print(depth, provider, flush=True)
            torch.manual_seed(0)
            setup = setup_of(arch, depth, args.batch, options)
            model = setup.build("standard", memory)
            found = zoo.measure_memory(setup.forward_of(model), model.parameters())
            case = replace(setup.case, subject=f"{depth} blocks")
            results.add(case, provider, "held", "MB", [found.held / 1e6])
            results.add(case, provider, "peak without gradients", "MB", [found.peak_without_gradients / 1e6])
    results.write(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
