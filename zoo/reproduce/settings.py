"""Training settings of the experiments next to the settings that the papers print."""

from __future__ import annotations

from collections.abc import Callable

from zoo.config import MIN_LINEAR_LR, Experiment, load_experiment
from zoo.models.deeplab import HEAD_CHANNELS, HEAD_DILATIONS
from zoo.models.resnext import GROUPS
from zoo.reproduce.comparison import Section
from zoo.reproduce.operations import TRAINING_IMAGES
from zoo.reproduce.published_numbers import published_numbers

GPUS = 4  # of the InPlace-ABN paper
NOTE = "further differences of the data: docs/training.md, what differs from the original and from the papers"


def report_settings(paper: str, item: str) -> Section:
    """Return the printed training settings of an item of a paper, compared with those of the experiments."""
    section = Section(
        f"settings_{''.join(item.lower().split())}", f"{item}: training settings",
        "The settings of the experiments, in the notation of the paper.", notes=[NOTE],
    )  # fmt: skip
    for key, number in published_numbers(paper).items():
        setting = SETTINGS.get(key.rpartition("/")[2])
        if (number.item, number.evidence) == (item, "setting") and setting is not None:
            ours = setting(load_experiment(number.network))
            section.add(f"{number.network}: {number.quantity.rpartition(': ')[2]}", ours, number)
    return section


def _thousands(counts: list[int]) -> str:
    """Return numbers of steps in the notation of the paper, such as "40K and 60K"."""
    words = [f"{count // 1000}K" for count in counts]
    return " and ".join(words) if len(words) < 3 else f"{', '.join(words[:-1])}, and {words[-1]}"


def _num_batches(config: Experiment) -> int:
    return TRAINING_IMAGES[config.network.num_classes] // config.optimizer.batch_size


def _decay_steps(config: Experiment) -> str:
    schedule = config.optimizer.schedule
    milestones = schedule.params.model_dump()["milestones"]
    per_unit = 1 if schedule.mode == "step" else _num_batches(config)
    return _thousands([milestone * per_unit for milestone in milestones])


def _steps(config: Experiment) -> str:
    """Return the number of training steps, rounded to thousands as in the paper."""
    return _thousands([round(config.optimizer.schedule.epochs * _num_batches(config), -3)])


def _values(config: Experiment) -> str:
    """Return the range of the values of normalized pixels."""
    low, high = ((value - config.input.mean[0]) / config.input.std[0] for value in (0, 1))
    return f"[{low:g}, {high:g}]"


def _scales(config: Experiment) -> str:
    """Return the range of the random scaling of a segmentation experiment."""
    assert config.segmentation is not None
    return " - ".join(f"{scale:.1f}" for scale in config.segmentation.scale_range)


# By the last part of the keys of the published settings.
SETTINGS: dict[str, Callable[[Experiment], float | str]] = {
    "batch": lambda config: config.optimizer.batch_size,
    "part": lambda config: config.optimizer.batch_size // config.optimizer.accumulate_steps,
    "learning_rate": lambda config: config.optimizer.learning_rate,
    "learning_rate_vistas": lambda config: config.optimizer.learning_rate,
    "momentum": lambda config: config.optimizer.momentum,
    "momentum_kind": lambda config: "Nesterov" if config.optimizer.nesterov else "heavy ball",
    "weight_decay": lambda config: config.optimizer.weight_decay,
    "decay": lambda config: round(1 / config.optimizer.schedule.params.model_dump()["gamma"]),
    "decay_epochs": lambda config: config.optimizer.schedule.params.model_dump()["step_size"],
    "decay_steps": _decay_steps,
    "linear_decay": lambda config: MIN_LINEAR_LR if config.optimizer.schedule.type == "linear" else 0.0,
    "power": lambda config: config.optimizer.schedule.params.model_dump()["power"],
    "steps": _steps,
    "epochs": lambda config: config.optimizer.schedule.epochs,
    **{
        f"epochs_{name}": lambda config: config.optimizer.schedule.epochs
        for name in ("cityscapes", "coco_stuff", "vistas")
    },
    "cardinality": lambda _: GROUPS,
    "slope": lambda config: config.network.activation_param,
    "smallest_side": lambda config: config.input.scale_train if config.input.scale_train > 0 else "none is fixed",
    "crop": lambda config: config.input.crop_train,
    "crops": lambda config: config.optimizer.batch_size // GPUS,
    "values": _values,
    "scales": _scales,
    "hard_pixels": lambda config: 100 * config.segmentation.hard_pixels if config.segmentation else 0.0,
    "dilations": lambda _: f"(1, {', '.join(map(str, HEAD_DILATIONS[8]))})",
    "channels": lambda _: HEAD_CHANNELS,
    "features": lambda _: 5 * HEAD_CHANNELS,
}
