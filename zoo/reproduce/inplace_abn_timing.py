"""Section 4.3 and the right half of Table 1 of Rota Bulo et al. 2018: the overhead of saving memory in a block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zoo.benchmark.results import median_and_spread
from zoo.benchmark.variants import Block
from zoo.memory.allocations import clear_gradients
from zoo.memory.timing import Clock, TimedStep, keep_heap, ratios, time_interleaved
from zoo.models.resnext import GROUPS
from zoo.reproduce.comparison import Comparison, ReportSection
from zoo.reproduce.measurements import measures
from zoo.reproduce.published_numbers import published_number

# Channels and side of the maps in the bottlenecks of ResNeXt-101's four modules, for images of 224 pixels.
MODULES = {"CONV1": (128, 56), "CONV2": (256, 28), "CONV3": (512, 14), "CONV4": (1024, 7)}
BATCH, ROUNDS = 32, 25
SAMPLE_S = 0.2  # minimum duration of a sample; lowers the variance for small maps
STANDARD, INPLACE_1 = "standard", "inplace_1"

Seconds = Mapping[str, Sequence[float]]  # the times of each strategy, one per round


@measures("inplace_abn", "Section 4.3")
def measure_overheads(
    modules: Mapping[str, tuple[int, int]] = MODULES,
    batch: int = BATCH,
    rounds: int = ROUNDS,
    sample_s: float = SAMPLE_S,
) -> ReportSection:
    """Return the overhead of InPlace-ABN I over the standard block, on one thread of a CPU.

    The paper measured on a Titan Xp and does not specify the convolution of its block; here it preserves the number of
    channels. Differences are taken within a round. Configures malloc to keep freed memory, see `keep_heap`.

    Args:
    - `modules`: channels and side of the maps, by the name of the module.
    - `batch`: images per call.
    - `rounds`: interleaved timings of each strategy.
    - `sample_s`: minimum duration of a sample in seconds.
    """
    keep_heap()
    seconds = {}
    with use_one_thread():
        clock = Clock(torch.device("cpu"))
        for name, (channels, side) in modules.items():
            x, dout = torch.randn(2, batch, channels, side, side).unbind()
            steps = {
                strategy: block_step(Block(channels, GROUPS, strategy), x, dout) for strategy in (STANDARD, INPLACE_1)
            }
            seconds[name] = time_interleaved(steps, clock, rounds=rounds, min_sample_s=sample_s)
    return ReportSection("section4.3", "Section 4.3 and Table 1, right: time of a block", compare_claims(seconds))


@contextmanager
def use_one_thread() -> Iterator[None]:
    """Uses a single thread, because its CPU time is hardly affected by other programs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def block_step(block: nn.Module, x: Tensor, dout: Tensor) -> TimedStep:
    """Return a step of forward and backward of a block, including the gradients of input and parameters."""
    x = x.detach().requires_grad_()

    def run(times: int) -> None:
        for _ in range(times):
            block(x).backward(dout)
            clear_gradients([x, *block.parameters()])

    return TimedStep(run)


def compare_claims(seconds: Mapping[str, Seconds]) -> list[Comparison]:
    """Compare times with the paper's; ``seconds`` are the times of the strategies by module."""
    overheads = {
        name: median_and_spread([100 * (ratio - 1) for ratio in ratios(times[INPLACE_1], times[STANDARD])])
        for name, times in seconds.items()
    }
    by_value = sorted(overheads, key=overheads.__getitem__)
    comparisons = []
    for name, key in ((by_value[0], "least"), (by_value[-1], "most")):
        number = published_number("inplace_abn", f"section4.3/overhead_inplace_{key}")
        value, spread = overheads[name]
        what = f"{INPLACE_1} over standard, {key}: {name}"
        comparisons.append(Comparison(what, value, number, n=len(seconds[name][STANDARD]), spread=spread))
    return comparisons
