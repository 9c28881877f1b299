"""The ``optimizer`` section: optimiser, batch, learning rates and their schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from zoo.config.section import Section

# Paper, section 4.1: the rate of WideResNet38 decays linearly from 0.1 "to 1e-6". The published alpha reaches
# zero some 400 steps before the end and is negative after that, so a linear schedule stops at this rate.
MIN_LINEAR_LR = 1e-6


class StepParams(Section):
    """Rate times ``gamma`` every ``step_size`` epochs (or steps)."""

    step_size: PositiveInt
    gamma: PositiveFloat = 0.1


class MultistepParams(Section):
    """Rate times ``gamma`` at each of the ``milestones``, in epochs (or steps)."""

    milestones: Annotated[list[PositiveInt], Field(min_length=1)]
    gamma: PositiveFloat = 0.1

    @field_validator("milestones")
    @classmethod
    def _must_increase(cls, value: list[int]) -> list[int]:
        if value != sorted(set(value)):
            raise ValueError("should be in increasing order")
        return value


class ExponentialParams(Section):
    """Rate times ``gamma`` every epoch (or step)."""

    gamma: PositiveFloat


class LinearParams(Section):
    """Rate times ``alpha * epoch (or step) + beta``, never below MIN_LINEAR_LR."""

    alpha: float
    beta: float


class TriangleParams(Section):
    """Rate rising in a line from 0 to its full value at ``peak_epoch``, then falling in a line to 0 at the end."""

    peak_epoch: PositiveFloat


class NoParams(Section):
    """The constant and the cosine schedule have no parameters."""


SCHEDULE_PARAMS: dict[str, type[Section]] = {
    "constant": NoParams,
    "step": StepParams,
    "multistep": MultistepParams,
    "exponential": ExponentialParams,
    "linear": LinearParams,
    "cosine": NoParams,
    "triangle": TriangleParams,
}


class Schedule(Section):
    """How the learning rate changes; ``params`` holds what the ``type`` needs, defaults filled in."""

    type: Literal["constant", "step", "multistep", "exponential", "linear", "cosine", "triangle"] = "constant"
    mode: Literal["epoch", "step"] = "epoch"
    epochs: PositiveInt = 10
    params: dict[str, Any] = Field(default={}, validate_default=True)
    warmup_epochs: NonNegativeFloat = 0.0

    @field_validator("params")
    @classmethod
    def _resolve_params(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "type" not in info.data:  # the type is wrong, which is reported by itself
            return value
        return SCHEDULE_PARAMS[info.data["type"]].model_validate(value).model_dump()

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield complaints about a warm-up or a rise that never ends, and about a triangle in steps of an epoch."""
        if self.warmup_epochs >= self.epochs:
            yield ("warmup_epochs", "epochs"), f"should be less than epochs, which is {self.epochs}"
        if self.type != "triangle":
            return
        if self.warmup_epochs:
            yield ("warmup_epochs", "type"), "a triangle rises by itself; remove the key, and set params.peak_epoch"
        if self.mode == "epoch":
            yield ("mode", "type"), 'a triangle begins and ends at a rate of 0; use mode "step"'
        if self.params["peak_epoch"] >= self.epochs:
            yield ("params", "epochs"), f"peak_epoch should be less than epochs, which is {self.epochs}"


class Optimizer(Section):
    """Optimiser settings; ``batch_size`` counts the pictures of one step over all processes."""

    type: Literal["SGD", "Adam"] = "SGD"
    batch_size: PositiveInt = 256
    learning_rate: PositiveFloat = 0.1
    classifier_lr: float = -1.0  # -1: as learning_rate
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # SGD only
    weight_decay: NonNegativeFloat = 1e-4
    nesterov: bool = False
    clip: NonNegativeFloat = 1.0  # largest gradient norm; 0: no clipping
    schedule: Schedule = Schedule()
    decay_norms: bool = True  # False: no weight decay on norm scales and shifts
    decay_biases: bool = True  # False: no weight decay on the biases of all other layers
    accumulate_steps: PositiveInt = 1
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None  # None: no moving average of the weights

    @field_validator("classifier_lr")
    @classmethod
    def _must_be_rate_or_minus_one(cls, value: float) -> float:
        if value < 0 and value != -1:
            raise ValueError("should be at least 0, or -1 for the rate of all other layers")
        return value

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield the combinations that the optimiser refuses or would not use."""
        if self.nesterov and self.type == "Adam":
            yield ("nesterov", "type"), "Adam has no Nesterov momentum; remove the key, or use type SGD"
        elif self.nesterov and self.momentum == 0:
            yield ("nesterov", "momentum"), "needs a momentum greater than 0"
        if self.batch_size % self.accumulate_steps:
            yield (
                ("batch_size", "accumulate_steps"),
                f"should be a multiple of accumulate_steps, which is {self.accumulate_steps}",
            )
