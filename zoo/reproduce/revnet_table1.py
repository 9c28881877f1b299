"""Table 1 and sections 3.2, 4, 5.1 and 5.2 of Gomez et al. 2017: memory, computation and time of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from zoo.benchmark.results import median_and_spread
from zoo.layers import init_weights, norm_act
from zoo.layers.checkpointing import checkpoint
from zoo.layers.reversible import ReversibleBlock, ReversibleSequential
from zoo.layers.revnet_blocks import build_preact_branch
from zoo.memory.allocations import measure_memory
from zoo.memory.timing import Clock, ratios, time_interleaved, training_step
from zoo.reproduce.comparison import ReportSection
from zoo.reproduce.measurements import measures
from zoo.reproduce.paper_networks import build_for_training, forward_of
from zoo.reproduce.published_numbers import published_number
from zoo.torch_internals.dispatch import TorchDispatchMode

DEPTHS = (4, 16, 36, 100)
HALF_CHANNELS, SIZE, BATCH = 16, 16, 4  # channels of x1 and of x2, side in pixels, number of feature maps
COUNTED_BATCH, CIFAR_SIZE = 2, 32  # images of steps whose operations are counted, and their side
TIMED_NETWORK, TIMED_BATCH, ROUNDS = "revnet38_cifar", 32, 20


class Cost(NamedTuple):
    """The cost of one training step.

    Args:
    - `peak`: peak memory in bytes, without the gradients of the parameters.
    - `calls`: mean number of calls of each F and G.
    """

    peak: int
    calls: float


@measures("revnet", "Section 3.2")
def measure_operations() -> ReportSection:
    """Return the multiplications and additions of a step (section 3.2), in forward passes of the same network."""
    section = ReportSection("section3.2", "Section 3.2: operations of a training step")
    (forward, backward), (rev_forward, rev_backward), (_, stored_backward) = (
        count_operations(build_for_training(name, "meta", memory=memory))
        for name, memory in (("resnet32_cifar", "plain"), ("revnet38_cifar", "auto"), ("revnet38_cifar", "plain"))
    )
    again = (rev_backward - stored_backward) / rev_forward
    ordinary, reversible = 1 + stored_backward / rev_forward, 1 + rev_backward / rev_forward
    calls = _chain_costs(DEPTHS)["checkpoint sqrt(L)"][-1].calls
    found: dict[str, tuple[str, float]] = {
        "backward": ("ResNet-32: backward", backward / forward),
        "reversible": ("RevNet-38: forward and backward", reversible),
        "overhead": ("RevNet-38: overhead", 100 * (reversible / ordinary - 1)),
        "checkpointing": ("checkpoint sqrt(L): overhead", 100 * (calls - 1) / 3),
        "overhead_gpu": ("RevNet-38: overhead, if backward takes as long as forward", 100 * again / 2),
    }
    for key, (what, measured) in found.items():
        section.add(what, measured, published_number("revnet", f"section3.2/{key}"))
    return section


@measures("revnet", "Table 1")
def measure_complexity() -> ReportSection:
    """Return the growth of memory and computation of a chain with its number of blocks L (Table 1).

    Memory is the peak of a step without the gradients of the parameters, and computation the calls of F and G. Both are
    given as the exponent p of L^p between the last two depths.
    """
    costs, (low, high) = _chain_costs(DEPTHS), DEPTHS[-2:]
    section = ReportSection("table1", "Table 1: memory and computation against depth")
    for name, row in KEY_BY_STRATEGY.items():
        peaks = [cost.peak for cost in costs[name]]
        calls = [cost.calls * depth for cost, depth in zip(costs[name], DEPTHS, strict=True)]
        for column, values in (("memory", peaks), ("computation", calls)):
            number = published_number("revnet", f"table1/{row}/{column}")
            exponent = math.log(values[-1] / values[-2]) / math.log(high / low)
            section.add(f"{name}: exponent of the {column}", exponent, number)
    return section


@measures("revnet", "Section 4")
def measure_layer_costs() -> ReportSection:
    """Return the cost of a step of the deepest chain if forward and backward through a layer cost 1 each (section 4).

    The unit of memory is the number of bytes that a block adds to the peak of a chain that stores activations.
    """
    section = ReportSection("section4", "Section 4: cost of a step for each layer")
    costs = _chain_costs(DEPTHS)
    for name in ("naive", "checkpoint sqrt(L)", "reversible"):
        number = published_number("revnet", f"section4/{KEY_BY_STRATEGY[name]}/computation")
        section.add(f"{name}: passes of a step", costs[name][-1].calls + 1, number)
    low, high = costs["naive"][-2:]
    block = (high.peak - low.peak) / (DEPTHS[-1] - DEPTHS[-2])
    layers = costs["checkpoint sqrt(L)"][-1].peak / block / math.sqrt(DEPTHS[-1])
    section.add(
        "checkpoint sqrt(L): memory over sqrt(L)", layers, published_number("revnet", "section4/checkpointing/memory")
    )
    return section


@measures("revnet", "Section 5.1")
def measure_passes() -> ReportSection:
    """Return the cost of a step of the deepest chain in forward passes; gradients cost 2 of them (section 5.1)."""
    section = ReportSection("section5.1", "Section 5.1: forward passes of a step")
    costs = _chain_costs(DEPTHS)
    for name, key in (("reversible", "algorithm1"), ("naive", "ordinary")):
        number = published_number("revnet", f"section5.1/{key}")
        section.add(f"{name}: forward passes of a step", costs[name][-1].calls + 2, number)
    pending = "the authors' TensorFlow code, which runs every branch twice in backward, is not part of zoo"
    section.add("authors' code", None, published_number("revnet", "section5.1/authors_code"), pending=pending)
    return section


@measures("revnet", "Section 5.2")
def measure_update_cost() -> ReportSection:
    """Return the ratio of the step times with reconstructed and with stored activations (section 5.2)."""
    section = ReportSection("section5.2", "Section 5.2: time of a step")
    models = {memory: build_for_training(TIMED_NETWORK, memory=memory) for memory in ("auto", "plain")}
    steps = {
        memory: training_step(forward_of(model, TIMED_BATCH, CIFAR_SIZE), model) for memory, model in models.items()
    }
    seconds = time_interleaved(steps, Clock(torch.device("cpu")), rounds=ROUNDS)
    ratio, spread = median_and_spread(ratios(seconds["auto"], seconds["plain"]))
    number = published_number("revnet", "section5.2/update_cost")
    section.add("reconstructed over stored", ratio, number, n=ROUNDS, spread=spread)
    return section


class OperationLog(TorchDispatchMode):
    """Adds up the multiplications and additions of matrix products and convolutions.

    torch's FlopCounterMode cannot count a backward pass that calls `torch.autograd.grad`, as a reversible chain does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.total += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result


def count_operations(model: nn.Module) -> tuple[int, int]:
    """Count the operations of forward and backward of a network on the meta device, for CIFAR images."""
    forward = forward_of(model, COUNTED_BATCH, CIFAR_SIZE)
    with OperationLog() as in_forward:
        loss = forward()
    with OperationLog() as in_backward:
        loss.backward()
    return in_forward.total, in_backward.total


class _Checkpointed(nn.Module):
    """A chain in segments of ``length`` blocks. Saves only the inputs of the segments for backward."""

    def __init__(self, blocks: Sequence[nn.Module], length: int) -> None:
        super().__init__()
        starts = range(0, len(blocks), length)
        self.segments = nn.ModuleList(ReversibleSequential(blocks[i : i + length], store=True) for i in starts)

    def forward(self, x: Tensor) -> Tensor:
        """Return the last segment's output."""
        for segment in self.segments:
            x = checkpoint(segment, x)
        return x


class _CheckpointedRecursively(nn.Module):
    """A chain that checkpoints its first half, and recursively each half (Chen et al. 2016)."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        middle = len(blocks) // 2
        halves = [blocks[:middle], blocks[middle:]] if middle else []
        self.halves = nn.ModuleList(_CheckpointedRecursively(half) for half in halves)
        self.block = nn.Identity() if middle else ReversibleSequential(blocks, store=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the last block's output."""
        if not self.halves:
            return self.block(x)
        first, second = self.halves
        return second(checkpoint(first, x))


CHAIN_STRATEGIES: dict[str, Callable[[Sequence[nn.Module]], nn.Module]] = {
    "naive": lambda blocks: ReversibleSequential(blocks, store=True),
    "checkpoint sqrt(L)": lambda blocks: _Checkpointed(blocks, math.isqrt(len(blocks))),
    "checkpoint recursively": _CheckpointedRecursively,
    "reversible": lambda blocks: ReversibleSequential(blocks),
}
# Name in the keys of the paper's numbers -> the strategy that the paper compares.
KEY_BY_STRATEGY = {
    "naive": "naive", "checkpoint sqrt(L)": "checkpointing", "checkpoint recursively": "recursive",
    "reversible": "reversible",
}  # fmt: skip


@cache
def _chain_costs(depths: Sequence[int]) -> dict[str, list[Cost]]:
    """Return the costs of each strategy at each depth."""
    return {name: [measure_cost(strategy, depth) for depth in depths] for name, strategy in CHAIN_STRATEGIES.items()}


def measure_cost(strategy: Callable[[Sequence[nn.Module]], nn.Module], depth: int) -> Cost:
    """Return the cost of a step of a chain of ``depth`` blocks."""
    norm = norm_act("standard", "relu")
    blocks = [
        ReversibleBlock(*(build_preact_branch(HALF_CHANNELS, HALF_CHANNELS, norm, False) for _ in "fg"))
        for _ in range(depth)
    ]
    chain = strategy(blocks).train()
    init_weights(chain)
    x = torch.randn(BATCH, 2 * HALF_CHANNELS, SIZE, SIZE)
    with count_calls(blocks) as calls:
        chain(x).square().mean().backward()
    memory = measure_memory(lambda: chain(x).square().mean(), chain.parameters(), warmup=0)
    return Cost(memory.peak_without_gradients, len(calls) / (2 * depth))


@contextmanager
def count_calls(blocks: Sequence[nn.Module]) -> Iterator[list[str]]:
    """Yields a list; each call of a block's F or G appends an entry."""
    calls: list[str] = []

    def note(module: nn.Module, *_: object) -> None:
        calls.append(type(module).__name__)

    handles = [block.get_submodule(name).register_forward_hook(note) for block in blocks for name in "fg"]
    yield calls
    for handle in handles:
        handle.remove()
