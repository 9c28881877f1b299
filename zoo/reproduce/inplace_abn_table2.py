"""Table 2 of Rota Bulo et al. 2018, and their blog: how many pixels fit into memory with in-place norms."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from zoo.benchmark.memory_prediction import MemoryPrediction
from zoo.benchmark.network_setup import Setup
from zoo.benchmark.plot_style import Line, Panel
from zoo.benchmark.strategies import BASELINE, EAGER, Strategy, choose_strategies
from zoo.config.architectures import LEAN, architecture
from zoo.config.network import NetworkSpec
from zoo.config.parse import load_experiment
from zoo.reproduce.comparison import Comparison, ReportSection
from zoo.reproduce.measurements import measures
from zoo.reproduce.published_numbers import PublishedNumber, published_number, published_numbers

logger = logging.getLogger(__name__)

GPUS = 4
STRIDE = 8  # stride of the last map: sides of crops are multiples of it
REGIMES = ("fixed crop", "fixed batch")  # more crops of the same size; the same number of larger crops
# The columns of the table: the experiments of its first row, without "_stdbn", and their titles in the plot.
COLUMNS = {
    "cityscapes_resnext101": "Cityscapes, ResNeXt-101",
    "coco_stuff_resnext101": "COCO-Stuff, ResNeXt-101",
    "cityscapes_wider_resnet38": "Cityscapes, WiderResNet-38",
    "coco_stuff_wider_resnet38": "COCO-Stuff, WiderResNet-38",
}
BLOG_CROPS, EARLIER_CROPS = (3, 776), (1, 480)  # crops on a GPU, and their side, in the authors' blog
PLAIN_IABN = "iABN plain"  # the networks of 2018
INPLACE_STRATEGIES = (PLAIN_IABN, "iABN")  # the networks of 2018, and the defaults of this package


@measures("inplace_abn", "Table 2")
def measure_memory_gains(setups: Mapping[str, Setup] | None = None) -> ReportSection:
    """Return the largest number of pixels that each strategy can train with in the memory of the first row, on one GPU.

    Published percentages are pixels of a batch over the pixels of the first row. The loss is the same for all
    strategies: it upsamples the logits of one image at a time, in forward and again in backward; the paper's loss
    presumably stored the logits of the whole batch.

    ``setups`` are the first row on one GPU by the names in `COLUMNS`; by default, the experiments of these names.
    """
    setups = {name: first_row(name) for name in COLUMNS} if setups is None else setups
    section = ReportSection("table2", "Table 2: pixels per batch in the same memory")
    for name, setup in setups.items():
        comparisons, panel = _measure_case(name, setup)
        section.comparisons += comparisons
        section.panels.append(panel)
    regime, column = REGIMES[0], next(iter(setups))  # the cell of Table 2 with the largest published gain
    most = published_number("inplace_abn", "section1/throughput")
    section.comparisons += [
        replace(each, what=f"largest published gain: {each.what}", published=most)
        for each in section.comparisons
        if each.what in [f"{column}, {regime}: {strategy}" for strategy in INPLACE_STRATEGIES]
    ]
    return section


@measures("inplace_abn", "Blog")
def count_pixels() -> ReportSection:
    """Return the ratio of the numbers of pixels in the authors' blog, with in-place norms and before."""
    section = ReportSection("blog", "Blog: pixels on a GPU")
    after, before = (crops * side**2 for crops, side in (BLOG_CROPS, EARLIER_CROPS))
    section.add("pixels of all crops", after / before, published_number("inplace_abn", "blog/data"))
    return section


def first_row(name: str) -> Setup:
    """Return the network and the crops on one GPU in the first row of Table 2, from its experiment."""
    config = load_experiment(f"{name}_stdbn")
    network = config.network
    stem = {key: value for key, value in network.options.items() if key == "input_3x3"}
    spec = NetworkSpec(arch=network.arch, num_classes=network.num_classes, options=stem)
    return Setup(spec, batch=config.optimizer.batch_size // GPUS, size=config.input.crop_train)


def strategies_of(arch: str) -> list[Strategy]:
    """Return the strategies that an architecture has and that depend on its norms, `BASELINE` first."""
    known = [memory for memory in architecture(arch).memory if memory != LEAN]
    return [s for s in choose_strategies(EAGER, ["*"]) if s.memory in known and not s.reversible and s.change is None]


def _measure_case(name: str, setup: Setup) -> tuple[list[Comparison], Panel]:
    """Return the comparisons of one column of the table, and its panel."""
    strategies = strategies_of(setup.spec.arch)
    predictions = {strategy.name: MemoryPrediction(setup, strategy) for strategy in strategies}
    memory_bytes = predictions[BASELINE].bytes_for(setup.batch)
    comparisons: list[Comparison] = []
    lines = []
    for strategy, prediction in predictions.items():
        logger.info("%s, %s", name, strategy)
        batch = prediction.largest_batch(memory_bytes)
        size = prediction.largest_size(memory_bytes, STRIDE)
        if strategy in INPLACE_STRATEGIES:
            for regime, largest in zip(REGIMES, ((batch, setup.size), (setup.batch, size)), strict=True):
                comparisons += _compare_largest(name, regime, strategy, setup, *largest)
        batches = sorted({2, setup.batch, batch} - {0})
        lines.append(Line(strategy, batches, [prediction.bytes_for(batch) / 1e9 for batch in batches]))
    title = f"{COLUMNS[name]}, {setup.size} x {setup.size}"
    return comparisons, largest_crops(name, setup.batch, title, lines)


def largest_crops(name: str, batch: int, title: str, lines: Sequence[Line]) -> Panel:
    """Return a panel with the largest number of crops by each strategy, and by the paper's in-place norms.

    ``lines`` are predicted bytes by the number of crops, of which ``batch`` fit the memory of the baseline.
    """
    published = [
        Line("iABN, paper", [round(batch * (1 + float(number.value) / 100))], lines[0].y[-1:])
        for number in gains_of(name, REGIMES[0])
        if "-sync" not in number.network
    ]
    ours = [line for line in lines if line.label != BASELINE]
    bars = [*(line for line in lines if line.label == BASELINE), *published, *ours]
    return Panel(title, "crops in the memory of std-BN", "predicted memory of a step, GB", bars, is_bars=True)


def gains_of(name: str, regime: str) -> list[PublishedNumber]:
    """Return the gain in pixels over the first row, of in-place norms and, if measured, synchronized norms."""
    suffix = regime.replace(" ", "_")
    keys = [f"table2/{name}_{norm}_{suffix}/pixels" for norm in ("ipabn", "ipabn-sync")]
    return [number for key, number in published_numbers("inplace_abn").items() if key in keys]


def _compare_largest(name: str, regime: str, strategy: str, setup: Setup, batch: int, size: int) -> list[Comparison]:
    """Return the gain in pixels over the first row of the largest ``batch`` of crops of ``size``, on one GPU."""
    gain = round(100 * (batch * size**2 / (setup.batch * setup.size**2) - 1))
    what, crops = f"{name}, {regime}: {strategy}", f"{GPUS * batch} x {size}^2"
    return [
        Comparison(what + ", synchronized" * ("-sync" in number.network), gain, number, note=crops)
        for number in gains_of(name, regime)
    ]
