"""Table 5 of Gomez et al. 2017: bytes of parameters and activations for images of ImageNet."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from zoo.benchmark.memory_use import count_memory
from zoo.reproduce.networks import build, count_parameters, forward_of
from zoo.reproduce.schema import Published, Section, at_least, compare, unpublished

MB = 1e6
IMAGES = 32  # per GPU, of a ResNet; a RevNet got 64 (section 7.1)
RESNET, REVNET = "resnet101_preact", "revnet104"
PARAMETERS_MB = {RESNET: Published(178, "printed", "Table 5"), REVNET: Published(180, "printed", "Table 5")}
ACTIVATIONS_MB = {RESNET: Published(5250, "printed", "Table 5"), REVNET: Published(1440, "printed", "Table 5")}
RATIO = Published(5250 / 1440, "derived", "Table 5")


def measure_imagenet(size: int = 224) -> Section:
    """Return the bytes for images of ``size`` pixels, counted on the meta device."""
    section = Section(
        "table5", "Table 5: memory for ImageNet",
        f"float32, images of {size} pixels. Activations: bytes that live between forward and backward, counted for "
        f"one image and times {IMAGES}, the paper's batch per GPU: it states neither batch nor rule for its own.",
    )  # fmt: skip
    held = {name: _held(name, size, memory) for name, memory in ((RESNET, "plain"), (REVNET, "auto"))}
    for name in held:
        parameters = 4 * count_parameters(build(name, "meta", classes=1000)) / MB
        section.figures.append(compare(f"{name}: parameters", PARAMETERS_MB[name], parameters, "MB", 0.01))
    outputs = IMAGES * sum_of_outputs(build(RESNET, "meta"), size) / MB
    section.figures.append(
        compare(f"{RESNET}: all outputs of conv, BN, ReLU and pool", ACTIVATIONS_MB[RESNET], outputs, "MB", 0.1)
    )
    for name, count in held.items():
        section.figures.append(
            compare(f"{name}: held after forward", ACTIVATIONS_MB[name], IMAGES * count / MB, "MB", 0.1)
        )
    section.figures.append(at_least("held, ResNet / RevNet", RATIO, held[RESNET] / held[REVNET], ""))
    inplace = held[RESNET] / _held(REVNET, size, "auto", "inplace")
    section.figures.append(unpublished("held, ResNet / RevNet with in-place stem and head", inplace))
    section.notes.append(
        "held is less than the sum of all outputs: a norm's output is not kept a second time for the ReLU after it"
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


def _held(name: str, size: int, memory: str, norm: str = "standard") -> int:
    activation = "leaky_relu" if norm == "inplace" else "relu"
    model = build(name, "meta", memory=memory, norm=norm, activation=activation, classes=1000)
    forward: Callable[[], Tensor] = forward_of(model, 1, size)
    return count_memory(forward, model.parameters()).held
