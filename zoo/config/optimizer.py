"""The ``optimizer`` section: optimizer, batch size, learning rates and their schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from zoo.limits import MAX_BATCH, MAX_EPOCHS, MAX_RATE, MAX_STEPS
from zoo.section import Section

# Paper, section 4.1: the rate of WideResNet38 decays linearly from 0.1 "to 1e-6". With the published alpha it reaches
# zero some 400 steps before the end and then becomes negative, so a linear schedule has this lower bound.
MIN_LINEAR_LR = 1e-6

Rate = Annotated[float, Field(gt=0, le=MAX_RATE)]
Gamma = Annotated[float, Field(gt=0, le=10)]
Period = Annotated[int, Field(gt=0, le=MAX_STEPS)]
Coefficient = Annotated[float, Field(ge=-MAX_RATE, le=MAX_RATE)]


def _whole_if_integer(value: float) -> float:
    return int(value) if value.is_integer() else value  # as files of earlier versions have it


class StepParams(Section):
    """Rate times ``gamma`` every ``step_size`` epochs (or steps)."""

    step_size: Annotated[float, Field(gt=0, le=MAX_STEPS), AfterValidator(_whole_if_integer)]
    """Epochs (or steps) between two changes of the rate; may be fractional, as in timm."""
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
    """Rate that rises linearly from 0 to its full value at ``peak_epoch``, then falls linearly to 0 at the end."""

    peak_epoch: Annotated[float, Field(gt=0, le=MAX_EPOCHS)]
    """Epoch at which the rate reaches its full value; may be fractional."""


class PolynomialParams(Section):
    """Rate times ``1 - t / t_end``, the remaining fraction of training, to the power of ``power``."""

    power: Annotated[float, Field(gt=0, le=10)] = 0.9
    """Exponent; 1: the rate falls linearly to 0."""


class CosineParams(Section):
    """Rate that falls along half a cosine from 1 to ``end_factor``, once or in several cycles of equal length."""

    end_factor: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Factor of the rate at the end of each cycle."""
    cycles: Annotated[int, Field(gt=0, le=1000)] = 1
    """Number of cycles; the rate restarts at the beginning of each."""
    cycle_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    """What the highest rate is multiplied with at each restart."""


class OneCycleParams(Section):
    """Rate that rises along half a cosine and then falls along another (Smith and Topin, Super-Convergence, 2019)."""

    rise: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Fraction of training in which the rate rises."""
    start_factor: Annotated[float, Field(gt=0, le=1)] = 0.04
    """Factor of the rate at the start."""
    end_factor: Annotated[float, Field(ge=0, le=1)] = 4e-6
    """Factor of the rate at the end."""


class NoParams(Section):
    """No parameters."""


SCHEDULE_PARAMS: dict[str, type[Section]] = {
    "constant": NoParams,
    "step": StepParams,
    "multistep": MultistepParams,
    "exponential": ExponentialParams,
    "linear": LinearParams,
    "cosine": CosineParams,
    "one-cycle": OneCycleParams,
    "triangle": TriangleParams,
    "polynomial": PolynomialParams,
}


class Schedule(Section):
    """Number of epochs and learning-rate schedule."""

    type: Literal[
        "constant", "step", "multistep", "exponential", "linear", "cosine", "one-cycle", "triangle", "polynomial"
    ] = "constant"
    """Type of schedule; all except constant have parameters."""
    mode: Literal["epoch", "step"] = "epoch"
    """Whether the rate changes once per epoch or once per step; also the unit of the parameters."""
    epochs: Annotated[int, Field(gt=0, le=MAX_EPOCHS)] = 10
    """Number of passes over the training images."""
    params: dict[str, Any] = Field(default={}, validate_default=True)
    """Parameters of the schedule's type, see optimizer.schedule.params."""
    warmup_epochs: Annotated[float, Field(ge=0, le=MAX_EPOCHS)] = 0.0
    """Epochs of linear warmup at the start; 0: none."""
    warmup_start: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Factor of the rate at the start of a warmup that takes the place of the schedule, as in timm and torchvision;
    null: the warmup multiplies the schedule, and rises in each step to the fraction of it that is completed."""
    decay_after_warmup: bool = False
    """Whether the schedule begins after the warmup, as in torchvision, rather than with it; needs warmup_start."""

    @field_validator("params")
    @classmethod
    def _resolve_params(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "type" not in info.data:  # an invalid type is reported separately
            return value
        return SCHEDULE_PARAMS[info.data["type"]].model_validate(value).model_dump()

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield problems of warmup and triangle schedules."""
        if self.warmup_epochs >= self.epochs:
            yield "warmup_epochs", f"should be less than epochs, which is {self.epochs}"
        if self.warmup_start is not None and not self.warmup_epochs:
            yield "warmup_start", "has no effect without warmup_epochs"
        if self.decay_after_warmup and self.warmup_start is None:
            yield "decay_after_warmup", "needs warmup_start"
        if self.type in ("triangle", "one-cycle") and self.warmup_epochs:
            yield "warmup_epochs", f"a {self.type} schedule rises by itself; remove the key, and set params"
        if self.type != "triangle":
            return
        if self.mode == "epoch":
            yield "mode", 'a triangle begins and ends at a rate of 0; use mode "step"'
        if self.params["peak_epoch"] >= self.epochs:
            yield "params", f"peak_epoch should be less than epochs, which is {self.epochs}"


Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[list[Beta], Field(min_length=2, max_length=2)]
Epsilon = Annotated[float, Field(ge=0, le=1)]


class AdamParams(Section):
    """Parameters of Adam, AdamW, NAdam and RAdam."""

    betas: Betas = Field(default=[0.9, 0.999])
    """Decay rates of the averages of the gradient and of its square."""
    eps: Epsilon = 1e-8
    """Added to the denominator."""


class RMSpropParams(Section):
    """Parameters of RMSprop."""

    alpha: Beta = 0.99
    """Decay rate of the average of the squared gradient."""
    eps: Epsilon = 1e-8
    """Added to the denominator."""


class AdagradParams(Section):
    """Parameters of Adagrad."""

    eps: Epsilon = 1e-10
    """Added to the denominator."""


#: The optimizers of torch.optim, and their parameters beside rate, momentum and weight decay.
OPTIMIZER_PARAMS: dict[str, type[Section]] = {
    "SGD": NoParams,
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "NAdam": AdamParams,
    "RAdam": AdamParams,
    "RMSprop": RMSpropParams,
    "Adagrad": AdagradParams,
    "Adafactor": NoParams,
}
WITH_MOMENTUM = ("SGD", "RMSprop")
TIMM = "timm:"  # the beginning of the name of an optimizer of timm


class Optimizer(Section):
    """Optimizer, batch size and learning rate."""

    type: str = "SGD"
    """Type of optimizer: SGD, Adam, AdamW, NAdam, RAdam, RMSprop, Adagrad or Adafactor of torch.optim, or an optimizer
    of timm, if that is installed, such as timm:lamb."""
    batch_size: Annotated[int, Field(gt=0, le=MAX_BATCH)] = 256
    """Images per step, over all processes."""
    learning_rate: Rate = 0.1
    """Base learning rate, multiplied by the schedule."""
    classifier_lr: Annotated[float, Field(ge=-1, le=MAX_RATE)] = -1.0
    """Base learning rate of the classifier; -1: same as all other layers."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of SGD and RMSprop; the other optimizers of torch do not use it."""
    weight_decay: Annotated[float, Field(ge=0, le=MAX_RATE)] = 1e-4
    """Weight decay."""
    nesterov: bool = False
    """Whether SGD uses Nesterov momentum."""
    params: dict[str, Any] = Field(default={}, validate_default=True)
    """Parameters of the optimizer's type, see optimizer.params; for an optimizer of timm, any of its arguments."""
    clip: Annotated[float, Field(ge=0, le=MAX_STEPS)] = 1.0
    """Gradient clipping threshold, see clip_mode; 0: no clipping."""
    clip_mode: Literal["norm", "value", "agc"] = "norm"
    """What is clipped: the norm of the whole gradient, each of its values, or, adaptively, the norm of the gradient of
    each output unit, relative to the norm of its weights (agc)."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor of the learning rate from one layer to the one before it, where a layer is a block. For networks of this
    package and of timm."""
    schedule: Schedule = Schedule()
    """Number of epochs and learning-rate schedule."""
    decay_norms: bool = True
    """Whether weight decay applies to the scales and shifts of norms."""
    decay_biases: bool = True
    """Whether weight decay applies to the biases of all other layers, and to all other vectors, such as the scales of
    layers."""
    accumulate_steps: Annotated[int, Field(gt=0, le=MAX_BATCH)] = 1
    """Gradient accumulation: number of micro-batches per batch."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a target that is spread over all classes."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the weights, which is then validated instead; null: none."""
    ema_warmup: bool = False
    """Whether the decay of the average rises to ema_decay as 1 - (1 + step)^(-2/3), as timm's model-ema-warmup."""
    ema_every: Annotated[int, Field(gt=0, le=MAX_STEPS)] = 1
    """Steps between two updates of the average, counted from the start of each epoch, as torchvision's model-ema-steps.
    ema_decay is the decay of one update."""

    @field_validator("type")
    @classmethod
    def _must_be_known(cls, value: str) -> str:
        if value not in OPTIMIZER_PARAMS and not (value.startswith(TIMM) and value != TIMM):
            raise ValueError(f"should be one of {', '.join(OPTIMIZER_PARAMS)}, or {TIMM}NAME")
        return value

    @field_validator("params")
    @classmethod
    def _resolve_params(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        section = OPTIMIZER_PARAMS.get(info.data.get("type", ""))
        return value if section is None else section.model_validate(value).model_dump()

    @field_validator("classifier_lr")
    @classmethod
    def _must_be_rate_or_minus_one(cls, value: float) -> float:
        if value < 0 and value != -1:
            raise ValueError("should be at least 0, or -1 for the rate of all other layers")
        return value

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield problems of combinations that the optimizer rejects or ignores."""
        if self.nesterov and self.type != "SGD":
            yield "nesterov", f"{self.type} takes no such setting; remove the key, or use type SGD"
        elif self.nesterov and self.momentum == 0:
            yield "nesterov", "needs a momentum greater than 0"
        for key in ("ema_warmup", "ema_every"):
            if self.ema_decay is None and getattr(self, key) != Optimizer.model_fields[key].default:
                yield key, "has no effect without ema_decay; set it, or remove the key"
        if self.batch_size % self.accumulate_steps:
            yield "batch_size", f"should be a multiple of accumulate_steps, which is {self.accumulate_steps}"
