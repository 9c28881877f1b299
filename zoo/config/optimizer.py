"""The ``optimizer`` section: optimizer, batch size and learning rates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import ConfigDict, Field, SerializeAsAny, StringConstraints, ValidationInfo, field_validator

from zoo.config.limits import MAX_BATCH, MAX_RATE, MAX_REPLICAS, MAX_STEPS
from zoo.config.schedule import Schedule
from zoo.config.section import Section

LearningRate = Annotated[float, Field(gt=0, le=MAX_RATE)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[list[Beta], Field(min_length=2, max_length=2)]
Epsilon = Annotated[float, Field(ge=0, le=1)]


class OptimizerParams(Section):
    """The parameters of a type of optimizer."""


class NoParams(OptimizerParams):
    """No parameters."""


class AdamParams(OptimizerParams):
    """Parameters of Adam and AdamW."""

    betas: Betas = Field(default=[0.9, 0.999])
    """Decay rates of the averages of the gradient and of its square."""
    eps: Epsilon = 1e-8
    """Added to the denominator."""


class RMSpropParams(OptimizerParams):
    """Parameters of RMSprop."""

    alpha: Beta = 0.99
    """Decay rate of the average of the squared gradient."""
    eps: Epsilon = 1e-8
    """Added to the denominator."""


class TimmParams(OptimizerParams):
    """Any parameters of an optimizer of timm. timm checks them."""

    model_config = ConfigDict(extra="allow")


#: The optimizers of torch.optim, and their parameters beside rate, momentum and weight decay.
OPTIMIZER_PARAMS: dict[str, type[OptimizerParams]] = {
    "SGD": NoParams,
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "RMSprop": RMSpropParams,
}
WITH_MOMENTUM = ("SGD", "RMSprop")
TIMM = "timm:"  # prefix of the names of timm's optimizers


class Optimizer(Section):
    """Optimizer, batch size and learning rate."""

    type: str = "SGD"
    """Type of optimizer: SGD, Adam, AdamW or RMSprop of torch.optim, or an optimizer of timm, if that is installed,
    such as timm:lamb."""
    batch_size: Annotated[int, Field(gt=0, le=MAX_BATCH)] = 256
    """Images per step, over all processes."""
    learning_rate: LearningRate = 0.1
    """Base learning rate, multiplied by the schedule."""
    classifier_lr: Annotated[float, Field(ge=-1, le=MAX_RATE)] = -1.0
    """Base learning rate of the classifier, the layer that computes logits; -1: same as all other layers."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of SGD and RMSprop; the other optimizers of torch do not use it."""
    weight_decay: Annotated[float, Field(ge=0, le=MAX_RATE)] = 1e-4
    """Weight decay."""
    nesterov: bool = False
    """Whether SGD uses Nesterov momentum."""
    params: SerializeAsAny[OptimizerParams] = Field(default={}, validate_default=True)
    """Parameters of the optimizer's type, see optimizer.params; for an optimizer of timm, any of its arguments."""
    clip: Annotated[float, Field(ge=0, le=MAX_STEPS)] = 1.0
    """Gradient clipping: largest norm of the whole gradient; 0: no clipping."""
    schedule: Schedule = Schedule()
    """Number of epochs and learning-rate schedule."""
    decay_norms: bool = True
    """Whether weight decay applies to the scales and shifts of norms."""
    decay_biases: bool = True
    """Whether weight decay applies to the biases of all other layers, and to all other vectors, such as the scales of
    layers."""
    accumulate_steps: Annotated[int, Field(gt=0, le=MAX_BATCH)] = 1
    """Gradient accumulation: number of micro-batches per batch."""
    freeze: list[Annotated[str, StringConstraints(min_length=1)]] = Field(default=[])
    """Parts of the network that are not trained: names of modules or parameters, or shell-style patterns of them, such
    as ["mod1", "mod2.*"]; classifier is the layer that computes logits. Norms of frozen parts stay in evaluation mode.
    "!NAME" excepts a part, and the last pattern that matches decides: ["*", "!classifier"] trains the classifier
    alone."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor of the learning rate from each layer to the layer before it, as in BEiT and timm; 1: the same rate for all
    layers."""
    release_gradients: bool = False
    """Whether backward updates each parameter as soon as its gradient is complete, and frees the gradient: less memory,
    the same bits. For one process, and without clip, replicas and fp16."""
    replicas: Annotated[int, Field(gt=0, le=MAX_REPLICAS)] | None = None
    """Number of replicas that share a batch, each with its own batch statistics, as the GPUs of a paper; synchronized
    norms have the statistics of all replicas. Any number of processes, up to one per replica, then trains the same
    weights to the bit; null: one replica per process."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a target that is spread over all classes."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the weights, which is then validated instead; null: none."""
    ema_every: Annotated[int, Field(gt=0, le=MAX_STEPS)] = 1
    """Steps between two updates of the average, counted from the start of each epoch, as torchvision's model-ema-steps.
    ema_decay is the decay of one update."""

    @field_validator("type")
    @classmethod
    def _must_be_known(cls, value: str) -> str:
        if value not in OPTIMIZER_PARAMS and not (value.startswith(TIMM) and value != TIMM):
            raise ValueError(f"should be one of {', '.join(OPTIMIZER_PARAMS)}, or {TIMM}NAME")
        return value

    @field_validator("params", mode="before")
    @classmethod
    def _resolve_params(cls, value: Any, info: ValidationInfo) -> Any:
        # an invalid type is reported separately
        return OPTIMIZER_PARAMS.get(info.data.get("type", ""), TimmParams).model_validate(value)

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
        if self.ema_decay is None and self.ema_every != 1:
            yield "ema_every", "has no effect without ema_decay; set it, or remove the key"
        if self.release_gradients and self.clip > 0:
            yield "clip", "should be 0 with release_gradients: the norm of the whole gradient needs all gradients"
        if self.release_gradients and self.replicas is not None:
            yield "replicas", "should be null with release_gradients: the sum over the replicas needs all gradients"
        if self.batch_size % self.accumulate_steps:
            yield "batch_size", f"should be a multiple of accumulate_steps, which is {self.accumulate_steps}"
