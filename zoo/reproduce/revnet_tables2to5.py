"""Tables 2 to 5 of Gomez et al. 2017: parameters, test errors, and memory for images of ImageNet."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zoo.benchmark.memory_prediction import MemoryPrediction
from zoo.benchmark.network_setup import Setup
from zoo.benchmark.strategies import Strategy
from zoo.config.network import NetworkSpec
from zoo.layers.reversible import ReversibleBlock
from zoo.layers.revnet_blocks import TransitionBlock
from zoo.reproduce.comparison import ReportSection
from zoo.reproduce.error_rates import command_of, compare_errors, report_errors
from zoo.reproduce.measurements import measures
from zoo.reproduce.paper_networks import build_for_training, count_parameters, forward_of, held_bytes
from zoo.reproduce.published_numbers import PublishedNumber, published_number, published_numbers
from zoo.reproduce.training_runs import TrainingRun
from zoo.torch_internals.data import NormBase


def _of_item(item: str) -> list[PublishedNumber]:
    """Return the published numbers of a table."""
    return [number for number in published_numbers("revnet").values() if number.item == item]


# Test errors in percent, by experiment.
CIFAR_ERRORS, IMAGENET_ERRORS = (
    {number.network: number for number in _of_item(table)} for table in ("Table 3", "Table 4")
)
SHORT_EXPERIMENTS = (
    "resnet32_cifar10_short",
    "revnet38_cifar10_short",
    'revnet38_cifar10_short {"network.options": {"grid_bits": 14}}',
)
RESNET, REVNET = "resnet101_preact", "revnet104"
# The RevNet and the ResNet of each pair of Tables 3 and 4.
PAIRS = {
    "revnet38_cifar10": "resnet32_cifar10", "revnet110_cifar10": "resnet110_cifar10",
    "revnet164_cifar10": "resnet164_cifar10", "revnet38_cifar100": "resnet32_cifar100",
    "revnet110_cifar100": "resnet110_cifar100", "revnet164_cifar100": "resnet164_cifar100", REVNET: RESNET,
}  # fmt: skip
MB = 1e6
IMAGES = 32  # per GPU, for a ResNet; a RevNet got 64 (section 7.1)
SIZE = 224  # side of the images of ImageNet, in pixels
DEEP_UNITS = (2, 2, 94, 2)  # units per stage: 602 layers, six per unit; RevNet-104 with more units in one stage
DEEP_BATCH = 2


@measures("revnet", "Table 2")
def measure_parameters() -> ReportSection:
    """Return Table 2: number of parameters of the networks."""
    section = ReportSection("table2", "Table 2: parameters")
    for number in _of_item("Table 2"):
        num_classes = int(number.id.rpartition("_")[2])
        count = count_parameters(build_for_training(number.network, "meta", num_classes=num_classes))
        section.add(f"{number.network}, {num_classes} classes", count / 1e6, number)
    return section


@measures("revnet", "Table 3", given="runs")
def report_cifar_errors(runs: Sequence[TrainingRun]) -> ReportSection:
    """Return Table 3."""
    return report_errors("table3", "Table 3: test error on CIFAR", CIFAR_ERRORS, runs)


@measures("revnet", "Table 4", given="runs")
def report_imagenet_errors(runs: Sequence[TrainingRun]) -> ReportSection:
    """Return Table 4."""
    return report_errors("table4", "Table 4: test error on ImageNet", IMAGENET_ERRORS, runs)


@measures("revnet", "Section 5.2", given="runs")
def report_differences(runs: Sequence[TrainingRun]) -> ReportSection:
    """Return the differences between the test errors of RevNets and their ResNets (section 5.2).

    The largest difference of all pairs of Tables 3 and 4 should not exceed the published difference.
    """
    section = ReportSection("section5.2_errors", "Section 5.2: test errors of RevNets compared with ResNets")
    number = published_number("revnet", "section5.2/underperforms_by")
    finished = {
        name: [
            run for run in runs if run.experiment == name and run.is_finished and not (run.is_stored and name in PAIRS)
        ]
        for name in (*CIFAR_ERRORS, *IMAGENET_ERRORS)
    }
    pairs = [
        compare_errors(f"{revnet} minus {resnet}", number, finished[revnet], finished[resnet])
        for revnet, resnet in PAIRS.items()
        if finished[revnet] and finished[resnet]
    ]
    missing = [name for name, found in finished.items() if not found]
    if missing:
        command = f"`{command_of('NAME')}`, NAME: {', '.join(missing)}"
        section.add("largest of all pairs", None, number, pending=command)
    section.comparisons += sorted(pairs, key=lambda pair: float(pair.measured or 0), reverse=True)
    return section


@measures("revnet", "Table 5")
def measure_imagenet_memory(size: int = SIZE) -> ReportSection:
    """Return Table 5: bytes of parameters and activations for images of ``size`` pixels, counted on the meta device.

    Activations are counted for one image and multiplied by `IMAGES`, the paper's batch per GPU. The paper states
    neither the batch nor the counting rule. The network holds less than the sum of all outputs, because in-place ReLUs
    overwrite the outputs of norms.
    """
    section = ReportSection("table5", "Table 5: memory for ImageNet")
    numbers = {number.id.removeprefix("revnet/table5/"): number for number in _of_item("Table 5")}
    held = {name: held_bytes(name, 1, size, memory=memory) for name, memory in ((RESNET, "plain"), (REVNET, "auto"))}
    outputs = {name: sum_of_outputs(build_for_training(name, "meta"), size) for name in held}
    for name in held:
        parameters = 4 * count_parameters(build_for_training(name, "meta")) / MB
        section.add(f"{name}: parameters", parameters, numbers[f"{name}/parameters"])
    for rule, counts in (("outputs of conv, BN, ReLU and pool", outputs), ("held after forward", held)):
        for name, count in counts.items():
            section.add(f"{name}: {rule}", IMAGES * count / MB, numbers[f"{name}/activations"])
        section.add(f"{rule}, ResNet / RevNet", counts[RESNET] / counts[REVNET], numbers["ratio"])
    return section


@measures("revnet", "Section 7.2")
def measure_fits() -> ReportSection:
    """Return the largest batch and depth of RevNets in the memory of a ResNet (sections 7.1 and 7.2).

    The largest batch of ResNet-101 on the GPU had `IMAGES` images, so the memory of the GPU is between the memory for
    this number and for twice this number.
    """
    section = ReportSection("section7.2", "Section 7: largest batches in the memory of ResNet-101")
    resnet, revnet = _predict(RESNET, "plain"), _predict(REVNET, "auto")
    memory = resnet.bytes_for(IMAGES)
    images = revnet.largest_batch(memory)
    deep = _predict(REVNET, "auto", DEEP_UNITS).bytes_for(DEEP_BATCH)
    layers = 6 * sum(DEEP_UNITS) + 2
    deep_network = f"a RevNet of {'-'.join(map(str, DEEP_UNITS))} units"
    note = f"{deep / 1e9:.1f} GB with {DEEP_BATCH} images, of {memory / 1e9:.1f} GB"
    number = published_number("revnet", "section7.1/per_gpu")
    section.add(f"{REVNET} in the memory of {RESNET} with {IMAGES} images", images, number)
    section.add(f"{REVNET} in the memory of the GPU, at least", images, published_number("revnet", "section7.2/images"))
    number = published_number("revnet", "section7.2/layers")
    what = f"{deep_network} in the memory of ResNet-101 with {IMAGES} images"
    section.add(what, layers if deep <= memory else 0, number, note=note)
    return section


def _predict(arch: str, memory: str, structure: tuple[int, ...] | None = None) -> MemoryPrediction:
    setup = Setup(NetworkSpec(arch=arch), batch=DEEP_BATCH, size=SIZE, structure=structure)
    return MemoryPrediction(setup, Strategy(arch, "standard", memory))


def sum_of_outputs(model: nn.Module, size: int) -> int:
    """Return the bytes of the outputs of all convolutions, norms, activations and pools for one image.

    In a RevNet, counts the outputs of stages and the outputs inside the largest residual function f or g instead of all
    outputs in blocks, because Algorithm 1 recomputes one function after the other.
    """
    blocks = [module for module in model.modules() if isinstance(module, (ReversibleBlock, TransitionBlock))]
    in_blocks = {module for block in blocks for module in block.modules()}
    sizes: dict[nn.Module, int] = {}

    def add(module: nn.Module, _: object, output: Tensor | tuple[Tensor, ...]) -> None:
        copies = 2 if isinstance(module, NormBase) else 1
        tensors = output if isinstance(output, tuple) else (output,)
        sizes[module] = sizes.get(module, 0) + 4 * copies * sum(math.prod(tensor.shape) for tensor in tensors)

    counted = (nn.Conv2d, NormBase, TransitionBlock)  # a transition has outputs as large as its stage
    modules = [module for module in model.modules() if isinstance(module, counted) or "Pool" in type(module).__name__]
    handles = [module.register_forward_hook(add) for module in modules]
    with torch.no_grad():
        forward_of(model, 1, size)()
    for handle in handles:
        handle.remove()
    functions = [function for block in blocks for function in (block.f, block.g)]
    largest = max((sum(sizes.get(module, 0) for module in each.modules()) for each in functions), default=0)
    kept = (isinstance(module, TransitionBlock) or module not in in_blocks for module in sizes)
    return largest + sum(count for count, is_kept in zip(sizes.values(), kept, strict=True) if is_kept)
