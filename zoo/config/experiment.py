"""A whole experiment: network, optimiser, pictures, how to run it, and the score that is expected of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, StringConstraints, field_validator

from zoo.config.network import Network
from zoo.config.optimizer import Optimizer
from zoo.config.section import Section
from zoo.errors import ConfigError

# "center" or "tencrop" and the side of the crop in pixels, as in center224
Protocol = Annotated[str, StringConstraints(pattern=r"^(center|tencrop)[1-9][0-9]*$")]
THREE = Field(min_length=3, max_length=3)
Md5 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
Percent = Annotated[float, Field(ge=0, le=100)]


class Input(Section):
    """Picture sizes in pixels (``scale``: shorter side, -1: not resized); mean and std of values in [0, 1].

    ``pad_train``: training pictures get so many pixels on each side, filled as ``pad_mode_train`` says, and are cropped
    without resizing; None: crops of random size and shape, resized. ``cutout_train``: side of a square that is blanked
    in each training picture, 0 for none.
    """

    scale_train: int = -1
    crop_train: PositiveInt = 224
    pad_train: NonNegativeInt | None = None
    pad_mode_train: Literal["zeros", "reflect"] = "zeros"
    cutout_train: NonNegativeInt = 0
    color_jitter_train: bool = False
    lighting_train: bool = False
    scale_val: int = 256
    crop_val: PositiveInt = 224
    mean: Annotated[list[Annotated[float, Field(ge=0, le=1)]], THREE] = Field(default=[0.485, 0.456, 0.406])
    std: Annotated[list[Annotated[float, Field(gt=0, le=1)]], THREE] = Field(default=[0.229, 0.224, 0.225])

    @field_validator("scale_train", "scale_val")
    @classmethod
    def _must_be_size_or_minus_one(cls, value: int) -> int:
        if value < 1 and value != -1:
            raise ValueError("should be at least 1, or -1 for no resizing")
        return value

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield complaints about crops and squares that do not fit, and about a padding of nothing.

        Without ``pad_train`` the training crop may be larger than ``scale_train``: it is resized itself.
        """
        if self.scale_val != -1 and self.crop_val > self.scale_val:
            yield ("crop_val", "scale_val"), f"should be at most scale_val, which is {self.scale_val}"
        if self.pad_train is None and self.pad_mode_train != "zeros":
            yield ("pad_mode_train", "pad_train"), "says how to pad; set pad_train too, or remove the key"
        if self.pad_train is not None and self.scale_train != -1:
            yield from self._pad_conflicts(self.pad_train)
        if self.cutout_train > self.crop_train:
            yield ("cutout_train", "crop_train"), f"should be at most crop_train, which is {self.crop_train}"

    def _pad_conflicts(self, pad: int) -> Iterator[tuple[tuple[str, ...], str]]:
        side = self.scale_train + 2 * pad
        if self.crop_train > side:
            yield ("crop_train", "scale_train", "pad_train"), f"should be at most {side}, the padded scale_train"
        if self.pad_mode_train == "reflect" and pad >= self.scale_train:
            yield ("pad_train", "scale_train"), f"should be less than scale_train, {self.scale_train}, to be reflected"


class Training(Section):
    """How the steps are computed; the defaults are those of the published runs.

    ``activation_memory_budget`` tells torch.compile how much to keep for backward, from 0 (as little as by repeating
    the whole forward pass) to 1 (torch's own choice, for speed); None leaves the choice to torch.
    ``reconstruction_meter`` logs every so many steps how exactly reversible chains reconstruct their activations, which
    takes the memory that these chains save; 0: never.
    """

    amp: Literal["off", "bf16", "fp16"] = "off"
    channels_last: bool = False
    compile: bool = False
    activation_memory_budget: Annotated[float, Field(ge=0, le=1)] | None = None
    reconstruction_meter: NonNegativeInt = 0

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield a complaint about a budget without a compiler to keep it."""
        if self.activation_memory_budget is not None and not self.compile:
            yield (
                ("activation_memory_budget", "compile"),
                "is kept by torch.compile alone; set training.compile to true, or remove the key and choose a "
                "network.memory",
            )


class CheckpointConfig(Section):
    """When checkpoints are written: each epoch, and every ``every_steps`` steps unless that is 0."""

    every_steps: NonNegativeInt = 0


class Score(Section):
    """Accuracies in percent; ``top5`` is None where only the first was published."""

    top1: Percent
    top5: Percent | None = None


class Expected(Section):
    """The scores that a run should reach, one per validation protocol, and where they were published."""

    source: Annotated[str, Field(min_length=1)]
    scores: Annotated[dict[Protocol, Score], Field(min_length=1)]
    weights_md5: Md5 | None = None


class Experiment(Section):
    """All settings of one run; sections and keys that a file leaves out have the defaults given here."""

    network: Network = Network()
    optimizer: Optimizer = Optimizer()
    input: Input = Input()
    training: Training = Training()
    checkpoint: CheckpointConfig = CheckpointConfig()
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    expected: Expected | None = None

    def digest(self) -> str:
        """Return the sha256 of all settings, defaults included, without the ``expected`` scores."""
        settings = self.model_dump(mode="json", exclude={"expected"})
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def check_world_size(config: Experiment, world_size: int) -> None:
    """Check that each of ``world_size`` processes gets an equal part of a batch.

    Raises ConfigError unless ``optimizer.batch_size`` is a multiple of world size times ``accumulate_steps``.
    """
    batch_size, accumulate_steps = config.optimizer.batch_size, config.optimizer.accumulate_steps
    num_parts = world_size * accumulate_steps
    if batch_size % num_parts:
        below = batch_size // num_parts * num_parts
        choices = f"{below} or {below + num_parts}" if below else f"{num_parts}"
        raise ConfigError(
            f"optimizer.batch_size = {batch_size}: is not a multiple of {num_parts}, the number of processes "
            f"({world_size}) times optimizer.accumulate_steps ({accumulate_steps}); use {choices}"
        )
