"""Section 7 of Gomez et al. 2017: training settings, and batches that fit on a GPU."""

from __future__ import annotations

from collections.abc import Callable

from zoo.benchmark.max_batch import MemoryPrediction
from zoo.benchmark.network_setup import Setup
from zoo.benchmark.strategies import Strategy
from zoo.config import Experiment, experiments_dir, load_experiment
from zoo.reproduce.comparison import Comparison, Section, Verdict, compare_minimum, not_measured, unpublished
from zoo.reproduce.published_numbers import PublishedNumber, published_numbers
from zoo.spec import NetworkSpec

NUM_IMAGES = {10: 50_000, 1000: 1_281_167}  # of the training set, by number of classes
RESNET, REVNET = "resnet101_preact", "revnet104"
SIZE = 224
DEEP_UNITS = (2, 2, 94, 2)  # units per stage: 602 layers, six per unit; RevNet-104 with more units in one stage
DEEP_BATCH = 2


def report_settings() -> Section:
    """Return the printed training settings, compared with those of the experiments (section 7.1)."""
    section = Section(
        "section7.1", "Section 7.1: training settings",
        "The settings of the experiments, in the notation of the paper.",
    )  # fmt: skip
    for key, number in published_numbers("revnet").items():
        place, _, setting = key.rpartition("/")
        if place in ("section7.1/cifar", "section7.1/imagenet"):
            ours = SETTINGS[setting](load_experiment(experiments_dir() / f"{number.network}.json"))
            section.comparisons.append(_compare_setting(number, ours))
    section.notes += [
        "values of pixels: from -1 to 1 in the authors' code and in the experiments",
        "further differences of the data: docs/training.md, what differs from the original and from the papers",
    ]
    return section


def _compare_setting(number: PublishedNumber, ours: float | str) -> Comparison:
    verdict = Verdict("reproduced", "equal") if ours == number.value else Verdict("off", "another setting")
    return Comparison(f"{number.network}: {number.quantity.partition(': ')[2]}", number, ours, number.unit, verdict)


def _thousands(counts: list[int]) -> str:
    """Return numbers of steps in the notation of the paper, such as "40K and 60K"."""
    words = [f"{count // 1000}K" for count in counts]
    return " and ".join(words) if len(words) < 3 else f"{', '.join(words[:-1])}, and {words[-1]}"


def _num_batches(config: Experiment) -> int:
    return NUM_IMAGES[config.network.num_classes] // config.optimizer.batch_size


def _decay_steps(config: Experiment) -> str:
    schedule = config.optimizer.schedule
    milestones = schedule.params["milestones"]
    per_unit = 1 if schedule.mode == "step" else _num_batches(config)
    return _thousands([milestone * per_unit for milestone in milestones])


def _steps(config: Experiment) -> str:
    """Return the number of training steps, rounded to thousands as in the paper."""
    return _thousands([round(config.optimizer.schedule.epochs * _num_batches(config), -3)])


def _weight_decay(config: Experiment) -> str:
    digit, exponent = f"{config.optimizer.weight_decay:.0e}".split("e-0")
    return f"{digit} x 10^-{exponent}"


def _values(config: Experiment) -> str:
    """Return the range of the values of normalized pixels."""
    low, high = ((value - config.input.mean[0]) / config.input.std[0] for value in (0, 1))
    return f"[{low:g}, {high:g}]"


SETTINGS: dict[str, Callable[[Experiment], float | str]] = {
    "batch": lambda config: config.optimizer.batch_size,
    "part": lambda config: config.optimizer.batch_size // config.optimizer.accumulate_steps,
    "learning_rate": lambda config: config.optimizer.learning_rate,
    "momentum": lambda config: config.optimizer.momentum,
    "weight_decay": _weight_decay,
    "decay": lambda config: round(1 / config.optimizer.schedule.params["gamma"]),
    "decay_steps": _decay_steps,
    "steps": _steps,
    "crop": lambda config: config.input.crop_train,
    "values": _values,
}


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
    gain = Verdict("reproduced", "at least 2") if low >= 2 * fits else Verdict("off", "less than 2")
    in_memory = f"in the memory of {RESNET} with {fits} images"
    section.comparisons = [
        compare_minimum(f"{REVNET} {in_memory}", number["per_gpu"], low, "images"),
        Comparison(f"{REVNET} over {RESNET}, {in_memory}", number["gain"], low / fits, "", gain),
        _compare_images(number["images"], low, high, needed),
        not_measured(f"{RESNET} in the memory of the GPU", number["resnet_images"], "images", is_source),
        not_measured("time of splitting the graph", number["overhead"], "%", no_sessions),
        _compare_layers(number["layers"], least),
        unpublished(f"{RESNET} with {fits} images", least / 1e9, "GB"),
        unpublished(f"{RESNET} with {2 * fits} images", most / 1e9, "GB"),
    ]
    return section


def _predict(arch: str, memory: str, structure: tuple[int, ...] | None = None) -> MemoryPrediction:
    setup = Setup(NetworkSpec(arch=arch), batch=DEEP_BATCH, size=SIZE, structure=structure)
    return MemoryPrediction(setup, Strategy(arch, "standard", memory), scratch=False)


def _compare_images(number: PublishedNumber, low: int, high: int, needed: int) -> Comparison:
    """Return the comparison of the published largest batch with its lower and upper bound."""
    text = f"{number.value} images need {needed / 1e9:.1f} GB"
    if low < number.number <= high:
        verdict = Verdict("underpowered", f"{text}; they may fit, but the paper does not state its GPU memory")
    else:
        verdict = Verdict("reproduced" if number.number <= low else "off", text)
    return Comparison("RevNet-104 in the memory of the GPU", number, f"{low} to {high}", "images", verdict)


def _compare_layers(number: PublishedNumber, memory: int) -> Comparison:
    """Return whether a network with about the published number of layers fits in memory."""
    layers = 6 * sum(DEEP_UNITS) + 2
    needed = _predict(REVNET, "auto", DEEP_UNITS).bytes_for(DEEP_BATCH).total
    text = f"{needed / 1e9:.1f} GB with {DEEP_BATCH} images, of {memory / 1e9:.1f} GB"
    verdict = Verdict("reproduced" if needed <= memory else "off", text)
    what = f"a RevNet of {'-'.join(map(str, DEEP_UNITS))} units in the memory of ResNet-101 with 32 images"
    return Comparison(what, number, layers, "layers", verdict)
