"""Section 7 of Gomez et al. 2017: batches that fit on a GPU."""

from __future__ import annotations

from zoo.benchmark.memory_prediction import MemoryPrediction
from zoo.benchmark.network_setup import Setup
from zoo.benchmark.strategies import Strategy
from zoo.reproduce.comparison import Comparison, Section, Verdict, compare, not_measured
from zoo.reproduce.published_numbers import PublishedNumber, published_numbers
from zoo.spec import NetworkSpec

RESNET, REVNET = "resnet101_preact", "revnet104"
SIZE = 224
DEEP_UNITS = (2, 2, 94, 2)  # units per stage: 602 layers, six per unit; RevNet-104 with more units in one stage
DEEP_BATCH = 2


def measure_fits() -> Section:
    """Return the largest batches of RevNets in the memory of a ResNet (sections 7.1 and 7.2)."""
    section = Section(
        "section7.2", "Section 7.2: largest batches in the memory of ResNet-101",
        f"{SIZE} px, float32, SGD and momentum. All bytes of a step are counted on the meta device, without scratch "
        "memory of convolutions. The largest batch of ResNet-101 on the GPU had 32 images, so the memory of the GPU is "
        "between the bytes of 32 and of 64 images.",
    )  # fmt: skip
    number = {key.rpartition("/")[2]: each for key, each in published_numbers("revnet").items() if "section7" in key}
    resnet, revnet = _predict(RESNET, "plain"), _predict(REVNET, "auto")
    fits = int(number["resnet_images"].number)
    least, most = (resnet.bytes_for(batch).total for batch in (fits, 2 * fits))
    (low, _), (high, _) = (revnet.largest_batch(memory) for memory in (least, most))
    needed = revnet.bytes_for(int(number["images"].number)).total
    is_source = Verdict("not built", "it defines the memory of the other rows; that of the GPU is not stated")
    no_sessions = Verdict("not built", "PyTorch has no counterpart to sessions of TensorFlow: no graph is split")
    in_memory, in_gb = f"in the memory of {RESNET} with {fits} images", f"{needed / 1e9:.1f} GB"
    section.comparisons = [
        compare(f"{REVNET} {in_memory}", low, number["per_gpu"]),
        compare(f"{REVNET} over {RESNET}, {in_memory}", low / fits, number["gain"]),
        compare(
            f"{REVNET} in the memory of the GPU, at least", low, number["images"],
            note=f"at most {high}; {number['images'].text} images need {in_gb}",
        ),
        not_measured(f"{RESNET} in the memory of the GPU", number["resnet_images"], "images", is_source),
        not_measured("time of splitting the graph", number["overhead"], "%", no_sessions),
        _compare_layers(number["layers"], least),
        compare(f"{RESNET} with {fits} images", least / 1e9, unit="GB"),
        compare(f"{RESNET} with {2 * fits} images", most / 1e9, unit="GB"),
    ]  # fmt: skip
    return section


def _predict(arch: str, memory: str, structure: tuple[int, ...] | None = None) -> MemoryPrediction:
    setup = Setup(NetworkSpec(arch=arch), batch=DEEP_BATCH, size=SIZE, structure=structure)
    return MemoryPrediction(setup, Strategy(arch, "standard", memory))


def _compare_layers(number: PublishedNumber, memory: int) -> Comparison:
    """Return whether a network with about the published number of layers fits in memory."""
    layers = 6 * sum(DEEP_UNITS) + 2
    needed = _predict(REVNET, "auto", DEEP_UNITS).bytes_for(DEEP_BATCH).total
    what = f"a RevNet of {'-'.join(map(str, DEEP_UNITS))} units in the memory of ResNet-101 with 32 images"
    note = f"{needed / 1e9:.1f} GB with {DEEP_BATCH} images, of {memory / 1e9:.1f} GB"
    return compare(what, layers if needed <= memory else 0, number, note=note)
