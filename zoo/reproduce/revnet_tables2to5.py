"""Tables 2 to 5 of Gomez et al. 2017: parameters, test errors, and memory for images of ImageNet."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from zoo.reproduce.comparison import Comparison, PublishedValue, Section, compare, compare_minimum, off_by, unpublished
from zoo.reproduce.error_rates import report_errors
from zoo.reproduce.paper_networks import build_for_training, count_parameters, forward_of, held_bytes
from zoo.reproduce.training_runs import TrainingRun

# Table 2, millions of parameters: with 10 and with 100 classes, or with 1000.
PARAMETERS_M = {
    "resnet32_cifar": (0.46, 0.47), "revnet38_cifar": (0.46, 0.48), "resnet110_cifar": (1.73, 1.73),
    "revnet110_cifar": (1.73, 1.74), "resnet164_cifar": (1.70, 1.73), "revnet164_cifar": (1.75, 1.79),
    "resnet101_preact": (44.5,), "revnet104": (45.2,),
}  # fmt: skip
CLASSES = {1: (1000,), 2: (10, 100)}  # by the number of published values
REVNET104_NOTE = (
    "RevNet-104: neither the paper's text nor its public code explains 45.2 M. The layers of the code have the "
    "45,428,072 parameters counted here; with a last stage that is 826 wide instead of 832 they would have 45.22 M"
)

# Table 3: test errors in percent.
CIFAR_ERRORS = {
    name: PublishedValue(error, "printed", "Table 3")
    for name, error in {
        "resnet32_cifar10": 7.14, "revnet38_cifar10": 7.24, "resnet110_cifar10": 5.74, "revnet110_cifar10": 5.76,
        "resnet164_cifar10": 5.24, "revnet164_cifar10": 5.17, "resnet32_cifar100": 29.95, "revnet38_cifar100": 28.96,
        "resnet110_cifar100": 26.44, "revnet110_cifar100": 25.40, "resnet164_cifar100": 23.37,
        "revnet164_cifar100": 23.69,
    }.items()
}  # fmt: skip
SHORT = ("resnet32_cifar10_short", "revnet38_cifar10_short")

# Table 4: test errors in percent, single crop.
RESNET, REVNET = "resnet101_preact", "revnet104"
IMAGENET_ERRORS = {
    RESNET: PublishedValue(23.01, "printed", "Table 4"),
    REVNET: PublishedValue(23.10, "printed", "Table 4"),
}

# Table 5.
MB = 1e6
IMAGES = 32  # per GPU, for a ResNet; a RevNet got 64 (section 7.1)
PARAMETERS_MB = {RESNET: PublishedValue(178, "printed", "Table 5"), REVNET: PublishedValue(180, "printed", "Table 5")}
ACTIVATIONS_MB = {
    RESNET: PublishedValue(5250, "printed", "Table 5"),
    REVNET: PublishedValue(1440, "printed", "Table 5"),
}
ACTIVATIONS_RATIO = PublishedValue(5250 / 1440, "derived", "Table 5")


def measure_parameters() -> Section:
    """Return Table 2: the counted parameters beside the printed ones."""
    section = Section("table2", "Table 2: parameters", "Trainable parameters, counted.", notes=[REVNET104_NOTE])
    for name, millions in PARAMETERS_M.items():
        for classes, published in zip(CLASSES[len(millions)], millions, strict=True):
            count = count_parameters(build_for_training(name, "meta", classes=classes))
            section.comparisons.append(_compare_millions(f"{name}, {classes} classes", published, count))
    return section


def _compare_millions(what: str, published: float, count: int) -> Comparison:
    """Return the comparison of a count with millions; they are equal if they are when rounded as the paper rounds."""
    digits = 2 if published < 10 else 1
    is_equal = round(count / 1e6, digits) == published
    printed = PublishedValue(f"{published:.{digits}f} M", "printed", "Table 2")
    verdict = "equal as printed" if is_equal else off_by(count / 1e6 / published - 1)
    return Comparison(what, printed, count, "parameters", verdict)


def report_cifar_errors(runs: Sequence[TrainingRun]) -> Section:
    """Return Table 3, and the errors of runs of the short experiments."""
    return report_errors("table3", "Table 3: test error on CIFAR", CIFAR_ERRORS, runs, SHORT)


def report_imagenet_errors(runs: Sequence[TrainingRun]) -> Section:
    """Return Table 4."""
    return report_errors("table4", "Table 4: test error on ImageNet", IMAGENET_ERRORS, runs)


def measure_imagenet_memory(size: int = 224) -> Section:
    """Return Table 5: bytes of parameters and activations for images of ``size`` pixels, counted on the meta device."""
    section = Section(
        "table5", "Table 5: memory for ImageNet",
        f"float32, images of {size} pixels. Activations are the bytes that live between forward and backward, counted "
        f"for one image and multiplied by {IMAGES}, the paper's batch per GPU: the paper states neither the batch nor "
        "the counting rule of its own numbers.",
    )  # fmt: skip
    held = {name: held_bytes(name, 1, size, memory=memory) for name, memory in ((RESNET, "plain"), (REVNET, "auto"))}
    for name in held:
        parameters = 4 * count_parameters(build_for_training(name, "meta")) / MB
        section.comparisons.append(compare(f"{name}: parameters", PARAMETERS_MB[name], parameters, "MB", 0.01))
    outputs = IMAGES * sum_of_outputs(build_for_training(RESNET, "meta"), size) / MB
    section.comparisons.append(
        compare(f"{RESNET}: all outputs of conv, BN, ReLU and pool", ACTIVATIONS_MB[RESNET], outputs, "MB", 0.1)
    )
    for name, count in held.items():
        section.comparisons.append(
            compare(f"{name}: held after forward", ACTIVATIONS_MB[name], IMAGES * count / MB, "MB", 0.1)
        )
    inplace = held_bytes(REVNET, 1, size, memory="auto", norm="inplace", activation="leaky_relu")
    section.comparisons += [
        compare_minimum("held, ResNet / RevNet", ACTIVATIONS_RATIO, held[RESNET] / held[REVNET], ""),
        unpublished("held, ResNet / RevNet with in-place stem and head", held[RESNET] / inplace),
    ]
    section.notes.append(
        "less is held than the sum of all outputs: a norm's output is not kept a second time for the ReLU after it"
    )
    return section


def sum_of_outputs(model: nn.Module, size: int) -> int:
    """Return the bytes of the outputs of all convolutions, norms, their activations and the pool, for one image."""
    total = 0

    def add(module: nn.Module, _: object, output: Tensor) -> None:
        nonlocal total
        total += 4 * math.prod(output.shape) * (2 if isinstance(module, _NormBase) else 1)

    counted = [m for m in model.modules() if isinstance(m, (nn.Conv2d, _NormBase)) or "Pool" in type(m).__name__]
    handles = [module.register_forward_hook(add) for module in counted]
    with torch.no_grad():
        forward_of(model, 1, size)()
    for handle in handles:
        handle.remove()
    return total
