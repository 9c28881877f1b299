"""Tables 1 and 2 of Hascoet et al. 2023: memory per input pixel, test errors and training time of their networks."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from zoo.benchmark.memory_prediction import MemoryPrediction
from zoo.benchmark.network_setup import Setup
from zoo.benchmark.strategies import Strategy
from zoo.config.network import NetworkSpec
from zoo.config.parse import load_experiment
from zoo.layers.invertible import InvertibleConv, LayerwiseBlock
from zoo.layers.norm import ABN
from zoo.layers.reversible import ReversibleBlock
from zoo.memory.allocations import count_memory, measure_memory
from zoo.reproduce.comparison import Comparison, ReportSection
from zoo.reproduce.error_rates import needs_training, report_errors
from zoo.reproduce.measurements import measures
from zoo.reproduce.paper_networks import build_revnext, count_parameters, forward_of
from zoo.reproduce.published_numbers import published_number
from zoo.reproduce.training_runs import TrainingRun

logger = logging.getLogger(__name__)

SIZES = (192, 240)  # side of the images in pixels; for smaller batches, the peak is at another moment of the step
BATCH = 8
PAPER_PIXELS = 32 * 240 * 240  # pixels of the batch in the paper's totals
BYTES_OF_UNIT = {"GB": 1e9, "MB": 1e6}


# The networks of Table 1, and the sections with their totals; the totals of section 3 include the weights.
NETWORKS = {
    "revnext_resnet18": "section3.3", "revnext_revnet": "section3.4", "irevnet_revnext": "section3.5",
    "revnext_flat": "section4.3", "revnext": "section4.4",
}  # fmt: skip
# Trained on CIFAR-10; no text available to us shows the accuracies of the other networks. The abstract prints 93.3 %
# for a network without stating depths and pools; we assume that it is this one.
EXPERIMENT = "revnext_cifar10"
OTHER_EXPERIMENTS = (
    "revnext_resnet18_cifar10", "revnext_revnet_cifar10", "irevnet_revnext_cifar10", "revnext_flat_cifar10",
)  # fmt: skip
# Side of the images in the data sets that section 1 processes in one batch, and their number in the paper's totals.
DATA_SETS, PAPER_IMAGES = {"mnist": 28, "cifar10": 32}, 50_000


@measures("revnext", "Table 1")
def measure_pixels(
    names: Sequence[str] = tuple(NETWORKS), sizes: tuple[int, int] = SIZES, batch: int = BATCH
) -> ReportSection:
    """Return bytes per pixel, the slope over image sizes, and the resulting totals of the paper's batch.

    The slope is computed from the allocator's peaks in a step, without the gradients of the parameters. It excludes
    memory that does not grow with the images. It depends on sizes and batch, because scratch memory is not proportional
    to them.
    """
    small, large = sizes
    section = ReportSection("pixels", "Bytes per input pixel, and Table 1: memory")
    for name in names:
        logger.info("%s", name)
        model = build_revnext(name)
        low, high = (
            measure_memory(forward_of(model, batch, size), model.parameters(), warmup=0).peak_without_gradients
            for size in sizes
        )
        slope = (high - low) / (batch * (large**2 - small**2))
        section.comparisons += _compare_with_paper(name, slope, 4 * count_parameters(model))
    return section


def _compare_with_paper(name: str, slope: float, weights: int) -> list[Comparison]:
    """Return the bytes per pixel, the total and the weights; ``weights`` is in bytes."""
    section, comparisons = NETWORKS[name], []
    added = weights if section.startswith("section3") else 0
    total = published_number("revnext", f"{section}/total")
    for rule, per_pixel in (("by the paper's rule", count_by_rule(name)), ("allocated", slope)):
        found = {total.id: (per_pixel * PAPER_PIXELS + added) / BYTES_OF_UNIT[total.unit]}
        if name == "revnext":
            found["revnext/abstract/bytes_per_pixel"] = per_pixel
        if name == "revnext_resnet18":
            found[f"revnext/{section}/activations"] = per_pixel * PAPER_PIXELS / 1e9
        for key, measured in found.items():
            number = published_number("revnext", key.removeprefix("revnext/"))
            what = f"{name}: {number.quantity.partition(': ')[2]}, {rule}"
            comparisons.append(Comparison(what, measured, number))
    if name == "revnext_resnet18":
        printed = published_number("revnext", f"{section}/weights")
        comparisons.append(Comparison(f"{name}: weights", weights / 1e6, printed))
    return comparisons


def count_by_rule(name: str) -> float:
    """Return the bytes per pixel that the paper counts: the inputs of convolutions and norms, and gradients of maps.

    - Without reversible blocks (section 3.3): the inputs of all layers and the gradient of the last convolution's
      output.
    - With them (3.4, 3.5): the inputs in the first block and the gradient of its map.
    - With invertible layers (4.3, 4.4): the map of the first level, its gradient, and the part that a convolution, or a
      block and the convolutions in it, add to: half of the channels each time. The paper's equations are in no text
      available to us; its totals agree with this reading.
    """
    model = build_revnext(name, device="meta", memory="plain")
    blocks = [m for m in model.modules() if isinstance(m, (ReversibleBlock, LayerwiseBlock, InvertibleConv))]
    is_invertible = any(isinstance(block, InvertibleConv) for block in blocks)
    sizes: list[int] = []
    for layer in blocks[:1] if is_invertible else (blocks[0] if blocks else model).modules():
        if is_invertible or isinstance(layer, (nn.Conv2d, ABN)):
            layer.register_forward_hook(lambda _, inputs, __: sizes.append(inputs[0].numel()))
    images = torch.empty(2, 3, 32, 32, device="meta")
    model(images)
    values = sum(sizes) + (2 * sizes[0] if blocks else sizes[-1])
    if is_invertible:
        values = 2 * sizes[0] + sizes[0] // 2 + sizes[0] // 4 * isinstance(blocks[0], LayerwiseBlock)
    return 4 * values / (images.numel() / 3)


@measures("revnext", "Section 1")
def count_whole_data_sets() -> ReportSection:
    """Return the bytes of section 1: a step whose batch is a whole data set, counted on the meta device."""
    section = ReportSection("data_sets", "Section 1: memory for a whole data set in one batch")
    for name, size in DATA_SETS.items():
        number = published_number("revnext", f"section1/{name}")
        model = build_revnext("revnext", device="meta")
        weights = 4 * count_parameters(model)
        by_rule = count_by_rule("revnext") * PAPER_IMAGES * size**2
        counted = count_memory(forward_of(model, PAPER_IMAGES, size), model.parameters()).peak_without_gradients
        for rule, bytes_ in (("by the paper's rule", by_rule), ("counted", counted)):
            what = f"{PAPER_IMAGES:,} images of {size} pixels, {rule}"
            section.add(what, (bytes_ + weights) / 1e9, number)
    return section


@measures("revnext", "Table 1", given="runs")
def report_cifar10_errors(runs: Sequence[TrainingRun]) -> ReportSection:
    """Return the accuracy of the abstract."""
    title, number = "Table 1: accuracy on CIFAR-10", published_number("revnext", "abstract/top1")
    return report_errors("table1", title, {EXPERIMENT: number}, runs)


@measures("revnext", "Table 2")
def report_gpu() -> ReportSection:
    """Return Table 2: the time, which needs the paper's GPU, and the memory that training needs."""
    config = load_experiment(EXPERIMENT)
    batch, size = config.optimizer.batch_size, config.input.crop_train
    section = ReportSection("table2", "Table 2: time to 93.3 %, and the memory of the GPU")
    network = config.network
    assert isinstance(network, NetworkSpec)
    strategy = Strategy(EXPERIMENT, network.norm, network.memory)
    megabytes = MemoryPrediction(Setup(network, batch, size), strategy).bytes_for(batch) / BYTES_OF_UNIT["MB"]
    number = published_number("revnext", "abstract/minutes")
    section.comparisons = [needs_training("GTX 750 with 1 GB", number, EXPERIMENT)]
    section.add("memory of training", megabytes / 1e3, published_number("revnext", "abstract/gpu_memory"))
    section.add("memory of training", megabytes, published_number("revnext", "section5.2/available_memory"))
    return section
