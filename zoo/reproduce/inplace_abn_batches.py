"""Section 4.1 of Rota Bulo et al. 2018: the largest ImageNet batches with standard and with in-place norms."""

from __future__ import annotations

from zoo.benchmark.memory_prediction import MemoryPrediction
from zoo.benchmark.network_setup import Setup
from zoo.benchmark.strategies import BASELINE, EAGER
from zoo.reproduce.comparison import Section, Verdict, not_measured
from zoo.reproduce.inplace_abn_figures1and2 import NETWORKS, spec_of
from zoo.reproduce.inplace_abn_table2 import BASES, GPUS, PLAIN_IABN
from zoo.reproduce.published_numbers import published

SIZE = 224  # side of the images, in pixels
LARGEST_BATCH = "resnext101_stdbn_lr_256/batch"
# Keys of published batches by network and strategy: the largest that fits, one that fits, and ones that do not fit.
PUBLISHED_BATCHES = {
    ("resnext101", BASELINE): LARGEST_BATCH,
    ("resnext101", PLAIN_IABN): "resnext101_ipabn_lr_512/batch",
    ("resnext152", BASELINE): "resnext152_ipabn_lr_256/batch_stdbn",
    ("wider_resnet38", BASELINE): "wider_resnet38_ipabn_lr_256/batch_stdbn",
    ("densenet264", BASELINE): "densenet264_ipabn_lr_256/batch_stdbn",
}


def measure_batches() -> Section:
    """Return the largest batches with standard and with in-place norms."""
    memory = published("inplace_abn", "section4/gpu_memory")
    section = Section(
        "section4.1", "Section 4.1: batches that fit",
        f"The largest number of images of {SIZE} pixels that {GPUS} GPUs of {memory.value} GB can train with, using "
        "SGD with momentum in float32. Bytes of parameters, momentum, gradients, images and all tensors of a step are "
        "counted on the meta device. Scratch memory of convolutions, which depends on the GPU, and memory of the "
        "framework itself are not counted.",
    )  # fmt: skip
    is_setting = Verdict("not built", "a property of the authors' GPUs, which the other rows assume")
    section.comparisons.append(not_measured("memory of a GPU", memory, "GB", is_setting))
    strategies = [strategy for strategy in EAGER if strategy.name in (BASELINE, PLAIN_IABN)]
    for arch, input_3x3 in NETWORKS.items():
        for strategy in strategies:
            setup = Setup(spec_of(arch, input_3x3), batch=2, size=SIZE)
            prediction = MemoryPrediction(setup, strategy)
            images = GPUS * prediction.largest_batch(int(1e9 * memory.number))[0]
            key = PUBLISHED_BATCHES.get((arch, strategy.name))
            number = published("inplace_abn", f"section4.1/{key}") if key else None
            what, basis = f"{arch}, {strategy.name}: largest batch", BASES.get(strategy.name, "both")
            section.add(what, images, number, unit="images", basis=basis)
            if key == LARGEST_BATCH and number is not None:
                gigabytes = prediction.bytes_for(int(number.number) // GPUS).total / 1e9
                what = f"{arch}, {strategy.name}: memory for {int(number.number) // GPUS} images"
                section.add(what, gigabytes, unit="GB")
    return section
