"""Table 1 of Gomez et al. 2017: memory and computation of a training step against the number of blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zoo.benchmark.memory_use import measure_memory
from zoo.layers import init_weights, norm_act
from zoo.layers.checkpointing import checkpoint
from zoo.layers.reversible import ReversibleBlock, ReversibleSequential
from zoo.layers.revnet_blocks import build_preact_branch
from zoo.reproduce.comparison import Comparison, Line, Panel, PublishedValue, Section, compare, unpublished
from zoo.reproduce.paper_networks import held_bytes

DEPTHS = (4, 16, 36, 100)
UNITS = (3, 9, 18)  # per stage of a CIFAR RevNet
HALF, SIZE, BATCH = 16, 16, 4  # channels of x1 and of x2, pixels of a side, number of feature maps
EXPONENT_TOLERANCE = 0.1
# The exponents that stand for what Table 1 prints as O(L), O(sqrt(L)) and O(1).
EXPONENTS = {
    "naive": PublishedValue(1.0, "derived", "Table 1: O(L)"),
    "checkpoint sqrt(L)": PublishedValue(0.5, "derived", "Table 1: O(sqrt(L))"),
    "reversible": PublishedValue(0.0, "derived", "Table 1: O(1)"),
}
# The cost of a step in forward passes: one for the forward, two for the backward, and those that are run again.
PASSES = {
    "naive": PublishedValue(3, "printed", "section 5.1"),
    "checkpoint sqrt(L)": PublishedValue(4, "derived", "section 3.2: the same overhead as a RevNet's"),
    "reversible": PublishedValue(4, "printed", "section 5.1"),
}
RECURSIVE = PublishedValue("O(log L), O(L log L)", "printed", "Table 1")
NO_GROWTH = PublishedValue(0.0, "derived", "section 3.2: storage independent of the depth")


class Cost(NamedTuple):
    """The cost of one training step.

    Args:
    - `peak`: the largest number of bytes allocated at a time, without the parameters' gradients.
    - `calls`: how often each F and G is called, on average.
    """

    peak: int
    calls: float


def measure_depth(depths: Sequence[int] = DEPTHS, units: Sequence[int] = UNITS) -> Section:
    """Return the growth of memory with depth, and the cost in forward passes, of one chain of blocks.

    ``depths`` are numbers of blocks of the chain, ``units`` those per stage of RevNets for CIFAR.
    """
    section = Section(
        "table1", "Table 1: memory and computation against depth",
        f"A chain of L additive blocks, each F and G two 3x3 convolutions on {HALF} channels, {BATCH} maps of "
        f"{SIZE} pixels, L = {', '.join(map(str, depths))}. Peak: the largest number of bytes that a step has "
        "allocated at a time, without the parameters' gradients. Cost in forward passes N: the counted calls of F and "
        "G, and 2N for the gradients.",
    )  # fmt: skip
    costs = {name: [_measure(strategy, depth) for depth in depths] for name, strategy in STRATEGIES.items()}
    section.comparisons += [_compare_growth(name, depths, of_depths) for name, of_depths in costs.items()]
    section.comparisons += [_compare_passes(name, of_depths[-1].calls) for name, of_depths in costs.items()]
    section.comparisons.append(
        Comparison("recursive checkpoint: memory and cost", RECURSIVE, None, "", "not in this package")
    )
    section.comparisons += _compare_networks(units)
    section.notes += [
        "the authors' own code runs the forward a second time: 5N in place of 4N (section 5.1)",
        "torch's checkpoint does not run the last G of a segment again, as nothing needs its output",
    ]
    lines = [Line(name, list(depths), [cost.peak / 1e6 for cost in of_depths]) for name, of_depths in costs.items()]
    section.panels.append(Panel("a chain of L blocks", "blocks L", "peak of a step, MB", lines, True, True))
    return section


class _Checkpointed(nn.Module):
    """A chain in segments of ``length`` blocks; only the segments' inputs are kept for the backward pass."""

    def __init__(self, blocks: Sequence[nn.Module], length: int) -> None:
        super().__init__()
        starts = range(0, len(blocks), length)
        self.segments = nn.ModuleList(ReversibleSequential(blocks[i : i + length], store=True) for i in starts)

    def forward(self, x: Tensor) -> Tensor:
        """Return the last segment's output."""
        for segment in self.segments:
            x = checkpoint(segment, x)
        return x


STRATEGIES: dict[str, Callable[[Sequence[nn.Module]], nn.Module]] = {
    "naive": lambda blocks: ReversibleSequential(blocks, store=True),
    "checkpoint each block": lambda blocks: _Checkpointed(blocks, 1),
    "checkpoint sqrt(L)": lambda blocks: _Checkpointed(blocks, math.isqrt(len(blocks))),
    "reversible": lambda blocks: ReversibleSequential(blocks),
}


def _measure(strategy: Callable[[Sequence[nn.Module]], nn.Module], depth: int) -> Cost:
    norm = norm_act("standard", "relu")
    blocks = [ReversibleBlock(*(build_preact_branch(HALF, HALF, norm, False) for _ in "fg")) for _ in range(depth)]
    chain = strategy(blocks).train()
    init_weights(chain)
    x = torch.randn(BATCH, 2 * HALF, SIZE, SIZE)
    with counted_calls(blocks) as calls:
        chain(x).square().mean().backward()
    memory = measure_memory(lambda: chain(x).square().mean(), chain.parameters(), warmup=0)
    return Cost(memory.peak_without_gradients, len(calls) / (2 * depth))


@contextmanager
def counted_calls(blocks: Sequence[nn.Module]) -> Iterator[list[str]]:
    """Return a context that yields a list, which grows by one entry for each call of a block's F or G."""
    calls: list[str] = []

    def note(module: nn.Module, *_: object) -> None:
        calls.append(type(module).__name__)

    handles = [block.get_submodule(name).register_forward_hook(note) for block in blocks for name in "fg"]
    yield calls
    for handle in handles:
        handle.remove()


def _compare_growth(name: str, depths: Sequence[int], costs: Sequence[Cost]) -> Comparison:
    """Return the exponent of the growth between the two largest depths."""
    (a, low), (b, high) = list(zip(depths, costs, strict=True))[-2:]
    exponent = math.log(high.peak / low.peak) / math.log(b / a)
    published = EXPONENTS.get(name)
    what = f"{name}: exponent of the peak's growth from {a} to {b} blocks"
    if published is None:
        return unpublished(what, exponent)
    difference = exponent - float(published.value)
    is_close = abs(difference) <= EXPONENT_TOLERANCE
    verdict = f"within {EXPONENT_TOLERANCE}" if is_close else f"off by {difference:+.2f}"
    return Comparison(what, published, exponent, "", verdict)


def _compare_passes(name: str, calls: float) -> Comparison:
    published = PASSES.get(name)
    what = f"{name}: forward passes of a step"
    if published is None:
        return unpublished(what, calls + 2, "N")
    return compare(what, published, calls + 2, "N", 0.05)


def _compare_networks(units: Sequence[int]) -> list[Comparison]:
    """Return the held bytes of CIFAR RevNets of different depths, and their growth per unit.

    As published, networks that reconstruct their activations do not grow; for the others nothing is published.
    """
    comparisons = []
    for memory, manner in (("plain", "stored"), ("auto", "reconstructed")):
        held = [held_bytes("revnet38_cifar", 8, 32, structure=(count,) * 3, memory=memory) for count in units]
        growth = (held[-1] - held[0]) / (3 * (units[-1] - units[0]))
        text = " / ".join(f"{count / 1e6:.2f}" for count in held)
        label = f"RevNet-38's widths, batch 8, {'-'.join(map(str, units))} units per stage, {manner}"
        comparisons.append(unpublished(f"{label}: held", text, "MB"))
        if memory == "plain":
            comparisons.append(unpublished(f"{label}: per unit", growth / 1e6, "MB"))
        else:
            verdict = "equal" if growth == 0 else "off"
            comparisons.append(Comparison(f"{label}: per unit", NO_GROWTH, growth / 1e6, "MB", verdict))
    return comparisons
