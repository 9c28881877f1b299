"""Section 4.3 and the right half of Table 1 of Rota Bulo et al. 2018: the overhead of saving memory in a block.

Tested by tests/reproduce/test_inplace_abn.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import mean
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zoo.benchmark.results import median_and_spread
from zoo.benchmark.timing import Clock, Step, keep_heap, time_interleaved
from zoo.benchmark.variants import STRATEGIES, Block
from zoo.models.resnext import GROUPS
from zoo.remat.memory_use import clear_gradients
from zoo.reproduce.comparison import Comparison, Section, compare
from zoo.reproduce.measurements import measures
from zoo.reproduce.published_numbers import PublishedNumber, published

# Channels and side of the maps in the bottlenecks of ResNeXt-101's four modules, for images of 224 pixels.
MODULES = {"CONV1": (128, 56), "CONV2": (256, 28), "CONV3": (512, 14), "CONV4": (1024, 7)}
BATCH, ROUNDS = 32, 25
SAMPLE_S = 0.2  # minimum duration of a sample, which lowers the variance for small maps
STANDARD, CHECKPOINT, CHECKPOINT_XHAT, INPLACE_1, INPLACE_2 = STRATEGIES

Seconds = Mapping[str, Sequence[float]]  # the times of each strategy, one per round


class Difference(NamedTuple):
    """Overhead of a strategy over another in percent: median and interquartile range of ``n`` rounds."""

    value: float
    spread: float
    n: int

    def comparison(self, what: str, number: PublishedNumber | None) -> Comparison:
        """Return the comparison with a published number."""
        return compare(what, self.value, number, "%", n=self.n, spread=self.spread)


@measures("inplace_abn", "Section 4.3")
def measure_overheads(
    modules: Mapping[str, tuple[int, int]] = MODULES,
    batch: int = BATCH,
    rounds: int = ROUNDS,
    sample_s: float = SAMPLE_S,
) -> Section:
    """Return the overhead of each strategy over the standard block.

    Configures malloc to keep freed memory, see `keep_heap`.

    Args:
    - `modules`: channels and side of the maps, by the name of the module.
    - `batch`: images per call.
    - `rounds`: interleaved timings of each strategy.
    - `sample_s`: minimum duration of a sample in seconds.
    """
    allocator, seconds = keep_heap(), {}
    with one_thread():
        clock = Clock(torch.device("cpu"))
        for name, (channels, side) in modules.items():
            x, dout = torch.randn(2, batch, channels, side, side).unbind()
            steps = {strategy: block_step(Block(channels, GROUPS, strategy), x, dout) for strategy in STRATEGIES}
            seconds[name] = time_interleaved(steps, clock, rounds=rounds, min_sample_s=sample_s)
    shapes = ", ".join(f"{name} {channels} x {side}^2" for name, (channels, side) in modules.items())
    section = Section(
        "section4.3", "Section 4.3 and Table 1, right: time of a block",
        "Forward and backward of norm, activation and convolution in plain torch operations, in float32, on one "
        f"thread of a CPU (in the paper, on a Titan Xp), with {batch} images. Channels and pixels are those of the "
        f"bottlenecks in the four modules of ResNeXt-101: {shapes}. The 3x3 convolution has {GROUPS} groups. Median "
        f"and interquartile range of {rounds} rounds; all strategies are timed in each round, and differences are "
        f"taken within a round. {clock.description}; {allocator}.",
    )  # fmt: skip
    section.comparisons = [*compare_claims(seconds), *list_overheads(seconds)]
    section.notes += [
        "the bars to the right of Table 1 have no numbers; the text gives their range over the four modules",
        "the paper does not say which convolution its block has; this one keeps the number of channels",
        *(f"{name}: {meaning}" for name, meaning in STRATEGIES.items()),
    ]
    return section


@contextmanager
def one_thread() -> Iterator[None]:
    """Context manager: uses one thread, whose CPU time is hardly affected by other programs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def block_step(block: nn.Module, x: Tensor, dout: Tensor) -> Step:
    """Return forward and backward of a block, including the gradients of its input and its parameters."""
    x = x.detach().requires_grad_()

    def run(times: int) -> None:
        for _ in range(times):
            block(x).backward(dout)
            clear_gradients([x, *block.parameters()])

    return Step(run)


def difference(seconds: Sequence[Seconds], strategy: str, other: str) -> Difference:
    """Return the overhead of ``strategy`` over ``other``, averaged over the modules in each round."""
    rounds = len(seconds[0][strategy])
    values = [100 * mean(times[strategy][n] / times[other][n] - 1 for times in seconds) for n in range(rounds)]
    return Difference(*median_and_spread(values), rounds)


def compare_claims(seconds: Mapping[str, Seconds]) -> list[Comparison]:
    """Return the comparisons with the paper's times; ``seconds`` are the times of the strategies by module."""
    overheads = {name: difference([times], INPLACE_1, STANDARD) for name, times in seconds.items()}
    by_value = sorted(overheads, key=lambda name: overheads[name].value)
    comparisons = []
    for name, key in ((by_value[0], "least"), (by_value[-1], "most")):
        number = published("inplace_abn", f"section4.3/overhead_inplace_{key}")
        comparisons.append(overheads[name].comparison(f"{INPLACE_1} over standard, {key}: {name}", number))
    return comparisons


def list_overheads(seconds: Mapping[str, Seconds]) -> list[Comparison]:
    """Return the time of each module's standard block and the overhead of the others."""
    comparisons = []
    for name, times in seconds.items():
        value, spread = median_and_spread([1e3 * time for time in times[STANDARD]])
        comparisons.append(compare(f"{name}, {STANDARD}", value, unit="ms", n=len(times[STANDARD]), spread=spread))
        comparisons += [
            difference([times], strategy, STANDARD).comparison(f"{name}, {strategy} over standard", None)
            for strategy in (INPLACE_1, INPLACE_2, CHECKPOINT, CHECKPOINT_XHAT)
        ]
    return comparisons
