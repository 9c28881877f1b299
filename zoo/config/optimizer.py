"""The ``optimizer`` section: optimiser, batch, learning rates and their schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from zoo.limits import MAX_BATCH, MAX_EPOCHS, MAX_RATE, MAX_STEPS
from zoo.section import Section

# Paper, section 4.1: the rate of WideResNet38 decays linearly from 0.1 "to 1e-6". The published alpha reaches
# zero some 400 steps before the end and is negative after that, so a linear schedule stops at this rate.
MIN_LINEAR_LR = 1e-6

Rate = Annotated[float, Field(gt=0, le=MAX_RATE)]
Gamma = Annotated[float, Field(gt=0, le=10)]
Period = Annotated[int, Field(gt=0, le=MAX_STEPS)]
Coefficient = Annotated[float, Field(ge=-MAX_RATE, le=MAX_RATE)]


class StepParams(Section):
    """Rate times ``gamma`` every ``step_size`` epochs (or steps)."""

    step_size: Period
    """Epochs (or steps) from one change of the rate to the next."""
    gamma: Gamma = 0.1
    """What the rate is multiplied with at each change."""


class MultistepParams(Section):
    """Rate times ``gamma`` at each of the ``milestones``, in epochs (or steps)."""

    milestones: Annotated[list[Period], Field(min_length=1, max_length=1000)]
    """Epochs (or steps) at which the rate changes, in increasing order."""
    gamma: Gamma = 0.1
    """What the rate is multiplied with at each change."""

    @field_validator("milestones")
    @classmethod
    def _must_increase(cls, value: list[int]) -> list[int]:
        if value != sorted(set(value)):
            raise ValueError("should be in increasing order")
        return value


class ExponentialParams(Section):
    """Rate times ``gamma`` every epoch (or step)."""

    gamma: Gamma
    """What the rate is multiplied with every epoch (or step)."""


class LinearParams(Section):
    """Rate times ``alpha * epoch (or step) + beta``; the rate stops falling at 1e-6."""

    alpha: Coefficient
    """Change of the factor per epoch (or step)."""
    beta: Coefficient
    """Factor at the start."""


class TriangleParams(Section):
    """Rate rising in a line from 0 to its full value at ``peak_epoch``, then falling in a line to 0 at the end."""

    peak_epoch: Annotated[float, Field(gt=0, le=MAX_EPOCHS)]
    """Epoch at which the rate has its full value; parts of an epoch count."""


class PolynomialParams(Section):
    """Rate times ``1 - t / t_end``, the part of training that is left, to the power of ``power``."""

    power: Annotated[float, Field(gt=0, le=10)] = 0.9
    """Exponent; 1: the rate falls in a line to 0."""


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
    "polynomial": PolynomialParams,
}


class Schedule(Section):
    """How long training takes and how the learning rate changes."""

    type: Literal["constant", "step", "multistep", "exponential", "linear", "cosine", "triangle", "polynomial"] = (
        "constant"
    )
    """How the learning rate changes; each type but constant and cosine has parameters of its own."""
    mode: Literal["epoch", "step"] = "epoch"
    """Whether the rate changes between epochs or between steps; the parameters count the same."""
    epochs: Annotated[int, Field(gt=0, le=MAX_EPOCHS)] = 10
    """How many times training goes through the training images."""
    params: dict[str, Any] = Field(default={}, validate_default=True)
    """Parameters of the type, see optimizer.schedule.params."""
    warmup_epochs: Annotated[float, Field(ge=0, le=MAX_EPOCHS)] = 0.0
    """Epochs at the start in which the rate rises in a line to what it would be; 0: none."""

    @field_validator("params")
    @classmethod
    def _resolve_params(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "type" not in info.data:  # the type is wrong, which is reported by itself
            return value
        return SCHEDULE_PARAMS[info.data["type"]].model_validate(value).model_dump()

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield complaints about a warm-up or a rise that never ends, and about a triangle in steps of an epoch."""
        if self.mode == "epoch" and self._largest_factor_log10() > 6:
            yield ("params", "epochs"), f"makes the rate grow more than a million times in {self.epochs} epochs"
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

    def _largest_factor_log10(self) -> float:
        """Return the decimal logarithm of the power of gamma that the schedule ends with; 0 without one."""
        params = self.params
        num_changes = {
            "step": self.epochs // params.get("step_size", self.epochs),
            "multistep": len(params.get("milestones", ())),
            "exponential": self.epochs,
        }
        return num_changes.get(self.type, 0) * math.log10(params.get("gamma", 1.0))


class Optimizer(Section):
    """Optimiser, batch and learning rate."""

    type: Literal["SGD", "Adam"] = "SGD"
    """Which optimiser."""
    batch_size: Annotated[int, Field(gt=0, le=MAX_BATCH)] = 256
    """Images of one step over all processes."""
    learning_rate: Rate = 0.1
    """Base learning rate, which the schedule multiplies."""
    classifier_lr: Annotated[float, Field(ge=-1, le=MAX_RATE)] = -1.0
    """Base learning rate of the classifier; -1: that of all other layers."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of SGD; Adam does not use it."""
    weight_decay: Annotated[float, Field(ge=0, le=MAX_RATE)] = 1e-4
    """Weight decay."""
    nesterov: bool = False
    """Whether SGD's momentum is Nesterov's."""
    clip: Annotated[float, Field(ge=0, le=MAX_STEPS)] = 1.0
    """Largest norm of the gradient, which is scaled down to it; 0: no clipping."""
    schedule: Schedule = Schedule()
    """How long training takes and how the learning rate changes."""
    decay_norms: bool = True
    """false: no weight decay on the scales and shifts of norms."""
    decay_biases: bool = True
    """false: no weight decay on the biases of all other layers."""
    accumulate_steps: Annotated[int, Field(gt=0, le=MAX_BATCH)] = 1
    """Parts that a batch is computed in, one after the other, to take less memory."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a target that is spread over all classes."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of a moving average of the weights, which is validated in their place; null: none."""

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
