"""Table 2 of Rota Bulo et al. 2018: how many more pixels in-place norms train with in the memory of standard norms."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from zoo.architectures import architecture
from zoo.benchmark.largest_batch import TOLERANCE, MemoryPrediction, predict_and_measure
from zoo.benchmark.network_setup import Setup
from zoo.benchmark.strategies import BASELINE, EAGER, Strategy, choose_strategies
from zoo.config import experiments_dir, load_experiment
from zoo.reproduce.comparison import (
    Comparison,
    Line,
    Panel,
    PublishedValue,
    Section,
    compare_minimum,
    unpublished,
    within,
)

logger = logging.getLogger(__name__)

GPUS = 4
GPU_GB = PublishedValue(12, "printed", "section 4")
STRIDE = 8  # of the last map: sides of crops are multiples of it
REGIMES = ("fixed crop", "fixed batch")  # more crops of the same size, as many crops of a larger size
# How many more pixels a batch has than in the first row, in percent, in both regimes; by the name of the experiment of
# the first row, without "_stdbn".
GAINS = {
    name: tuple(PublishedValue(gain, "printed", "Table 2") for gain in gains)
    for name, gains in {
        "cityscapes_resnext101": (75, 72), "coco_stuff_resnext101": (50, 56),
        "cityscapes_wider_resnet38": (40, 56), "coco_stuff_wider_resnet38": (40, 35),
    }.items()
}  # fmt: skip
INPLACE = ("iABN plain", "iABN")  # the networks of 2018, and with what this package does by default
ROUNDING = ("iABN unwound", "iABN unwound, 3x3 redone")  # find sums again up to rounding; all others change no bit
GOAL = 2.5  # our own, for the pixels of the best of the others over those of the first row
CHECKED = (4, 128)  # crops, and their side, of the real steps: what any machine has memory for


class Largest(NamedTuple):
    """The most that fits into the memory of the first row, on one GPU.

    Args:
    - `batch`, `size`: crops, and their side in pixels; a regime fixes one of them.
    - `ratio`: the pixels over those of the first row.
    """

    batch: int
    size: int
    ratio: float


def measure_memory_gains(setups: Mapping[str, Setup] | None = None, checked: tuple[int, int] = CHECKED) -> Section:
    """Return the most pixels that each strategy trains with in the memory of the first row.

    Args:
    - `setups`: the first row on one GPU, by the keys of `GAINS`; default the experiments of these names.
    - `checked`: number and side of the crops of a real step, which the prediction is compared with.
    """
    setups = {name: first_row(name) for name in GAINS} if setups is None else setups
    section = Section(
        "table2", "Table 2: pixels per batch in the same memory",
        f"DeepLabV3 at output stride {STRIDE}, trained with SGD and momentum in float32 on {GPUS} GPUs. The memory is "
        "what std-BN, which is PyTorch's BatchNorm2d and a leaky ReLU in place, needs for its row of the table on one "
        f"GPU. Fixed crop: more crops on each GPU; fixed batch: a larger side, a multiple of {STRIDE}. The bytes of "
        "parameters, momentum, gradients, images, label maps and of all tensors of a step, its loss at full resolution "
        "included, are counted on the meta device. No scratch memory of convolutions is counted, as it depends on the "
        "GPU.",
    )  # fmt: skip
    for name, setup in setups.items():
        comparisons, panel = _measure_case(name, setup)
        section.comparisons += comparisons
        section.panels.append(panel)
    section.comparisons += [
        _check(replace(setup, batch=checked[0], size=checked[1]), strategy)
        for setup in {setup.arch: setup for setup in setups.values()}.values()
        for strategy in strategies_of(setup.arch)
    ]
    section.notes += [
        "published percentages are pixels of a batch over those of the first row; all eight follow from the printed "
        "numbers and sizes of crops",
        f"{' and '.join(ROUNDING)} find sums of blocks again by subtraction, equal up to rounding; "
        "checkpoints run the same operations again on the same inputs, so that no bit changes",
        "the loss is the same with all strategies: it upsamples the logits of one image at a time, in forward and "
        "again in backward, where the paper's presumably kept those of the whole batch",
        "real steps run on this machine, and their prediction includes the scratch memory that its convolutions take",
        "the scores of the table are those that its experiments expect; nothing was trained here",
    ]
    return section


def first_row(name: str) -> Setup:
    """Return the network and the crops of one GPU in the first row of Table 2, from its experiment."""
    config = load_experiment(experiments_dir() / f"{name}_stdbn.json")
    network = config.network
    return Setup(
        network.arch,
        batch=config.optimizer.batch_size // GPUS,
        size=config.input.crop_train,
        input_3x3=network.input_3x3 and "input_3x3" in architecture(network.arch).options,
        classes=network.classes,
    )


def strategies_of(arch: str) -> list[Strategy]:
    """Return the strategies that an architecture has, `BASELINE` first."""
    known = architecture(arch).memory
    return [s for s in choose_strategies(EAGER, ["*"]) if s.memory in known and not s.reversible]


def _measure_case(name: str, setup: Setup) -> tuple[list[Comparison], Panel]:
    """Return the comparisons of one column of the table, and its panel."""
    strategies = strategies_of(setup.arch)
    predictions = {strategy.name: MemoryPrediction(setup, strategy, scratch=False) for strategy in strategies}
    memory_bytes = predictions[BASELINE].bytes_for(setup.batch).total
    largest: dict[str, dict[str, Largest]] = {regime: {} for regime in REGIMES}
    lines = []
    for strategy, prediction in predictions.items():
        logger.info("%s, %s", name, strategy)
        batch, _ = prediction.largest_batch(memory_bytes)
        size, _ = prediction.largest_size(memory_bytes, STRIDE)
        for regime, found in zip(REGIMES, ((batch, setup.size), (setup.batch, size)), strict=True):
            ratio = found[0] * found[1] ** 2 / (setup.batch * setup.size**2)
            largest[regime][strategy] = Largest(*found, ratio)
        batches = sorted({2, setup.batch, batch} - {0})
        lines.append(Line(strategy, batches, [prediction.bytes_for(batch).total / 1e9 for batch in batches]))
    row = f"{name}, std-BN: {setup.batch} crops of {setup.size}^2, predicted for one GPU"
    comparisons = [_compare_memory(row, memory_bytes / 1e9)]
    for regime, published in zip(REGIMES, GAINS[name], strict=True):
        comparisons += _compare_regime(f"{name}, {regime}", published, largest[regime])
    return comparisons, Panel(f"{name}, crops of {setup.size}^2", "crops on a GPU", "GB", lines)


def _compare_memory(what: str, gigabytes: float) -> Comparison:
    return Comparison(what, GPU_GB, gigabytes, "GB", "fits" if gigabytes <= float(GPU_GB.value) else "does not fit")


def _compare_regime(what: str, published: PublishedValue, largest: Mapping[str, Largest]) -> list[Comparison]:
    """Return the gain of each strategy but std-BN, in-place norms beside the published, and whether our goal is met."""
    comparisons = []
    for strategy, found in largest.items():
        gain, unit = round(100 * (found.ratio - 1)), f"%: {GPUS * found.batch} x {found.size}^2"
        if strategy in INPLACE:
            comparisons.append(compare_minimum(f"{what}: {strategy}", published, gain, unit))
        elif strategy != BASELINE:
            comparisons.append(unpublished(f"{what}: {strategy}", gain, unit))
    exact = {strategy: found.ratio for strategy, found in largest.items() if strategy not in ROUNDING}
    best = max(exact, key=lambda strategy: exact[strategy])
    verdict = f"at least {GOAL}" if exact[best] >= GOAL else f"less than {GOAL}"
    comparisons.append(Comparison(f"{what}: pixels of {best} over those of std-BN", None, exact[best], "", verdict))
    return comparisons


def _check(setup: Setup, strategy: Strategy) -> Comparison:
    """Return how far the prediction of a small step is from a real one."""
    predicted, taken = predict_and_measure(setup, strategy)
    difference = predicted / taken - 1
    what = f"{setup.arch}, {setup.batch} x {setup.size}^2, {strategy.name}: prediction over a real step"
    return Comparison(what, None, 100 * difference, "%", within(difference, TOLERANCE))
