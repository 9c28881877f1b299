"""The learning rate schedule: a pure function of the position in training, so that checkpoints do not need it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator

from zoo.config.limits import MAX_EPOCHS, MAX_RATE, MAX_STEPS
from zoo.config.section import Section

# Paper, section 4.1: the rate of WideResNet38 decays linearly from 0.1 "to 1e-6". With the published alpha it would
# reach zero some 400 steps before the end and then become negative, hence this lower bound.
MIN_LINEAR_LR = 1e-6

Gamma = Annotated[float, Field(gt=0, le=1)]
Period = Annotated[int, Field(gt=0, le=MAX_STEPS)]
Coefficient = Annotated[float, Field(ge=-MAX_RATE, le=MAX_RATE)]


class Position(NamedTuple):
    """A position in training, in epochs or steps, the unit of the schedule.

    Args:
    - `t`: epochs or steps since the start of the schedule.
    - `end`: the value of ``t`` at the end of training.
    - `epoch`: the length of an epoch.
    """

    t: float
    end: float
    epoch: float


class ScheduleParams(Section):
    """The parameters of a type of schedule, and its formula."""

    def factor(self, position: Position) -> float:
        """Return the factor of the base learning rate."""
        raise NotImplementedError


class ConstantParams(ScheduleParams):
    """No parameters."""

    def factor(self, position: Position) -> float:
        """Return 1."""
        return 1.0


class StepParams(ScheduleParams):
    """Rate times ``gamma`` every ``step_size`` epochs (or steps)."""

    step_size: Annotated[float, Field(gt=0, le=MAX_STEPS)]
    """Epochs (or steps) between two changes of the rate; may be fractional, as in timm."""
    gamma: Gamma = 0.1
    """What the rate is multiplied with at each change."""

    def factor(self, position: Position) -> float:
        """Return gamma^(t // step_size)."""
        return float(self.gamma ** (position.t // self.step_size))


class MultistepParams(ScheduleParams):
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

    def factor(self, position: Position) -> float:
        """Return gamma^n, where n is the number of milestones <= t."""
        return float(self.gamma ** bisect_right(self.milestones, position.t))


class LinearParams(ScheduleParams):
    """Rate times ``alpha * epoch (or step) + beta``; the rate stops falling at 1e-6."""

    alpha: Coefficient
    """Change of the factor per epoch (or step)."""
    beta: Coefficient
    """Factor at the start."""

    def factor(self, position: Position) -> float:
        """Return alpha t + beta."""
        return self.alpha * position.t + self.beta


class CosineParams(ScheduleParams):
    """Rate that falls along half a cosine from 1 to ``end_factor``."""

    end_factor: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Factor of the rate at the end."""

    def factor(self, position: Position) -> float:
        """Return e + (1 - e) (1 + cos(pi t / t_end)) / 2 with e = end_factor."""
        end = self.end_factor
        return end + (1 - end) * (1 + math.cos(math.pi * position.t / position.end)) / 2


class TriangleParams(ScheduleParams):
    """Rate that rises linearly from 0 to its full value at ``peak_epoch`` and falls linearly to 0 at the end."""

    peak_epoch: Annotated[float, Field(gt=0, le=MAX_EPOCHS)]
    """Epoch at which the rate reaches its full value; may be fractional."""

    def factor(self, position: Position) -> float:
        """Return (t + 1) / p up to 1 at p = peak_epoch, then fall linearly to 0 at the last step.

        EURASIP JIVP 2023:1, section 5, interpolated as in its public code.
        """
        epoch, epochs = (position.t + 1) / position.epoch, position.end / position.epoch
        return min(epoch / self.peak_epoch, (epochs - epoch) / (epochs - self.peak_epoch))


class PolynomialParams(ScheduleParams):
    """Rate times ``1 - t / t_end``, the remaining fraction of training, to the power of ``power``."""

    power: Annotated[float, Field(gt=0, le=10)] = 0.9
    """Exponent; 1: the rate falls linearly to 0."""

    def factor(self, position: Position) -> float:
        """Return (1 - t / t_end)^power (CVPR 2018, section 4.2, with mode "step")."""
        return float((1 - position.t / position.end) ** self.power)


SCHEDULE_PARAMS: dict[str, type[ScheduleParams]] = {
    "constant": ConstantParams,
    "step": StepParams,
    "multistep": MultistepParams,
    "linear": LinearParams,
    "cosine": CosineParams,
    "triangle": TriangleParams,
    "polynomial": PolynomialParams,
}


class Schedule(Section):
    """Number of epochs and learning-rate schedule."""

    type: Literal["constant", "step", "multistep", "linear", "cosine", "triangle", "polynomial"] = "constant"
    """Type of schedule; all except constant have parameters."""
    mode: Literal["epoch", "step"] = "epoch"
    """Whether the rate changes once per epoch or once per step; also the unit of the parameters."""
    epochs: Annotated[int, Field(gt=0, le=MAX_EPOCHS)] = 10
    """Number of passes over the training images."""
    patience: Annotated[int, Field(gt=0, le=MAX_EPOCHS)] | None = None
    """Early stopping: number of epochs without a better validation score after which the run ends; null: never. The
    learning rate follows all epochs."""
    params: SerializeAsAny[ScheduleParams] = Field(default={}, validate_default=True)
    """Parameters of the schedule's type, see optimizer.schedule.params."""
    warmup_epochs: Annotated[float, Field(ge=0, le=MAX_EPOCHS)] = 0.0
    """Epochs of linear warmup at the start; 0: none."""
    warmup_start: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Factor of the rate at the start of a warmup that takes the place of the schedule, as in timm and torchvision;
    null: the warmup multiplies the schedule, and rises in each step to the fraction of it that is completed."""
    decay_after_warmup: bool = False
    """Whether the schedule begins after the warmup, as in torchvision, rather than with it; needs warmup_start."""

    @field_validator("params", mode="before")
    @classmethod
    def _resolve_params(cls, value: Any, info: ValidationInfo) -> Any:
        if "type" not in info.data:  # an invalid type is reported separately
            return ConstantParams()
        return SCHEDULE_PARAMS[info.data["type"]].model_validate(value)

    def factor(self, epoch: int, step_in_epoch: int, steps_per_epoch: int, base_lr: float) -> float:
        """Return the factor of the base learning rate in this step; epochs and steps count from 0.

        It is the factor of `params` at t = epoch (mode "epoch") or t = epoch * steps_per_epoch + step_in_epoch (mode
        "step"). A linear schedule never falls below MIN_LINEAR_LR / base_lr, the end of the published decay (CVPR 2018,
        section 4.1).

        During the first ``warmup_epochs`` the factor is multiplied by the fraction of the warm-up completed by this
        step. With ``warmup_start`` it rises linearly in t from there to 1 instead. With ``decay_after_warmup``, t and
        the end of training then count from the end of the warm-up.
        """
        step = epoch * steps_per_epoch + step_in_epoch
        length = 1.0 if self.mode == "epoch" else float(steps_per_epoch)
        t, end = float(epoch if self.mode == "epoch" else step), self.epochs * length
        warmup = self.warmup_epochs * length
        if self.warmup_start is not None:
            if t < warmup:
                return self.warmup_start + (1 - self.warmup_start) * t / warmup
            if self.decay_after_warmup:
                t, end = t - warmup, end - warmup
        factor = self.params.factor(Position(t, end, length))
        if self.type == "linear":
            factor = max(factor, MIN_LINEAR_LR / base_lr)
        warmup_steps = self.warmup_epochs * steps_per_epoch
        if warmup_steps == 0 or self.warmup_start is not None:
            return factor
        return factor * min(1.0, (step + 1) / warmup_steps)

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield problems of warmup and triangle schedules."""
        if self.warmup_epochs >= self.epochs:
            yield "warmup_epochs", self._too_long("warmup_epochs", self.warmup_epochs)
        if self.warmup_start is not None and not self.warmup_epochs:
            yield "warmup_start", "has no effect without warmup_epochs"
        if self.decay_after_warmup and self.warmup_start is None:
            yield "decay_after_warmup", "needs warmup_start"
        if self.type == "triangle" and self.warmup_epochs:
            yield "warmup_epochs", "a triangle schedule rises by itself; remove the key, and set params"
        if isinstance(self.params, TriangleParams):
            if self.mode == "epoch":
                yield "mode", 'a triangle begins and ends at a rate of 0; use mode "step"'
            if self.params.peak_epoch >= self.epochs:
                yield "params.peak_epoch", self._too_long("peak_epoch", self.params.peak_epoch)

    def _too_long(self, key: str, value: float) -> str:
        return (
            f"should be less than epochs, which is {self.epochs}; train longer, such as with --epochs "
            f"{math.floor(value) + 1}, or reduce {key}, such as to {self.epochs / 10:g}, with --set"
        )
